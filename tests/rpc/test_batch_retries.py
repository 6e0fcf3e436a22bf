"""Waits of a batch job, by its own clock."""

import pytest
from quire.v1 import generation_service_pb2 as pb

import rpc.batch.retries as retries_module
import rpc.batch.retrying as retrying
from rpc.batch.retries import AWAY, BUSY, LONGEST_PAUSE, PAUSE, JobStoppedError, RetryPolicy
from rpc.batch.retrying import RetryingRunner
from rpc.frontend.errors import RequestFailed


class Clock:
    """In the place of `time` and of sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retries_module, "time", made)
    return made


class Full:
    """A runner that is full a number of times."""

    in_flight = 1

    def __init__(self, retry_after: float, times: int) -> None:
        self._failure = RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", "full", retry_after=retry_after)
        self._times = times

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        self._times -= 1
        if self._times >= 0:
            raise self._failure
        return pb.GenerateResponse()

    async def ask(self, *_: object) -> str:
        await self.run(pb.GenerateRequest())
        return "answer"


@pytest.mark.parametrize(
    ("retry_after", "slept"),
    [
        (0.0, [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, 16 * PAUSE, LONGEST_PAUSE]),
        (3.0, [3.0, 3.0, 3.0, 4.0, 8.0, LONGEST_PAUSE]),
        (3600.0, [LONGEST_PAUSE] * 6),
    ],
)
@pytest.mark.parametrize("question", [False, True])
async def test_pauses_grow_from_what_a_server_says_to_the_longest(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, retry_after: float, slept: list[float], question: bool
) -> None:
    monkeypatch.setattr(retrying.asyncio, "sleep", clock.sleep)
    runner = RetryingRunner(Full(retry_after, len(slept)), RetryPolicy())
    if question:
        assert await runner.ask(object, "ListModels", None, ()) == "answer"
    else:
        await runner.run(pb.GenerateRequest())
    assert clock.slept == slept


def test_a_success_starts_both_clocks_anew(clock: Clock) -> None:
    retries = RetryPolicy()
    for _ in range(3):
        retries.busy("full")
        retries.away("gone")
        clock.now += min(AWAY, BUSY) - 1
        retries.away("gone")
        retries.succeeded()
        clock.now += BUSY
    retries.busy("full")
    clock.now += BUSY + 1
    with pytest.raises(JobStoppedError, match="nothing has succeeded for 1201 s: full"):
        retries.busy("full")


def test_an_answer_of_any_kind_ends_an_absence_alone(clock: Clock) -> None:
    retries = RetryPolicy()
    retries.busy("full")
    retries.away("gone")
    clock.now += AWAY
    retries.answered()
    clock.now += 1
    retries.away("gone")
    clock.now += AWAY + 1
    with pytest.raises(JobStoppedError, match="nothing has succeeded for 61 s: gone"):
        retries.away("gone")
    clock.now += BUSY
    with pytest.raises(JobStoppedError, match="full"):
        retries.busy("full")
