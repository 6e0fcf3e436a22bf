"""A client's further tries: which server it asks, and how long it waits first."""

import grpc
import pytest

from rpc.client import tries
from rpc.client.failures import Failure
from rpc.client.tries import PAUSE, ROUNDS, SPREAD, Tries

LOST = Failure(grpc.StatusCode.UNAVAILABLE, "lost")
FULL = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after=2.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [0.0]
    monkeypatch.setattr(tries.time, "monotonic", lambda: times[0])
    return times


def test_servers_take_turns_and_a_round_ends_with_a_pause() -> None:
    made, asked, pauses = Tries(["a", "b"], None), list[str](), list[float | None]()
    while not pauses or pauses[-1] is not None:
        made.begin()
        asked.append(made.server)
        pauses.append(made.pause(LOST))
    assert asked == ["a", "b"] * ROUNDS
    assert pauses == [0.0, PAUSE] * (ROUNDS - 1) + [0.0, None]


def test_progress_makes_up_for_failures() -> None:
    made = Tries(["a"], None)
    for _ in range(20):
        made.begin()
        assert made.pause(LOST, progress=True) is not None


def test_a_refusal_is_waited_out_as_long_as_the_server_says_and_so_often() -> None:
    made = Tries(["a"], None, refusals=2)
    waits = [made.pause(FULL) for _ in range(3)]
    assert waits[2] is None
    assert all(2.0 <= wait <= 2.0 * (1 + SPREAD) for wait in waits[:2] if wait is not None)
    assert Tries(["a"], None).pause(FULL) is None, "unless it is asked for"


def test_another_server_is_asked_before_one_waits() -> None:
    made = Tries(["a", "b"], None)
    assert [made.pause(FULL), made.pause(FULL)] == [0.0, None]


def test_what_has_begun_waits_for_room_as_often_as_it_takes() -> None:
    """A gateway waits for no first token, but it has promised to go on."""
    made = Tries(["a"], None)
    assert made.pause(LOST, progress=True) is not None
    for _ in range(20):
        wait = made.pause(FULL)
        assert wait is not None
        assert wait >= 2.0


def test_a_server_that_says_when_it_is_there_again_is_asked_then() -> None:
    made = Tries(["a"], None)
    assert made.pause(Failure(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING", retry_after=3.0)) == 3.0


@pytest.mark.parametrize(
    "failure",
    [
        Failure(grpc.StatusCode.INVALID_ARGUMENT, "wrong", "INVALID_FIELD"),
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow", "SLOW_READER"),
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"),
        Failure(grpc.StatusCode.UNAUTHENTICATED, "who?", "NO_TOKEN"),
        Failure(grpc.StatusCode.INTERNAL, "quarantined", "QUARANTINED"),
    ],
)
def test_what_another_try_cannot_mend_is_final(failure: Failure) -> None:
    assert Tries(["a", "b"], None, refusals=5).pause(failure) is None


def test_nothing_is_tried_that_could_not_begin_in_time(now: list[float]) -> None:
    made = Tries(["a", "b"], 3.0, refusals=9)
    assert made.begin() == 3.0
    now[0] = 0.25
    assert made.pause(FULL) is not None
    now[0] = 2.5
    assert made.begin() == 0.5
    assert made.pause(FULL) is None, "it would be over by then"
    assert made.pause(LOST) == 0.0
    now[0] = 3.5
    assert made.pause(LOST) is None
    assert made.begin() == 0.0


def test_without_a_server_there_is_nobody_to_ask() -> None:
    with pytest.raises(ValueError, match="no server"):
        Tries([], None)
