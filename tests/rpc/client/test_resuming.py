"""A client that goes on with another server: ends, gaps and several sequences; a test makes the calls."""

import threading
from collections.abc import Iterator

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.client import resuming, tries
from rpc.client.resuming import Resuming
from rpc.client.tries import Tries


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "lost"

    def trailing_metadata(self) -> tuple:
        return ()


class Call:
    def __init__(self, messages: Iterator) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator:
        return self._messages

    def cancel(self) -> None:
        self._messages.close()


def stream_of(request: pb.StreamGenerateRequest) -> Resuming:
    return Resuming(Tries(["a:1", "b:1"], None), request, lambda server: None)


def message(*tokens: int, index: int = 0, end: bool = False) -> pb.StreamGenerateResponse:
    reason = pb.FINISH_REASON_LENGTH if end else pb.FINISH_REASON_UNSPECIFIED
    return pb.StreamGenerateResponse(deltas=[pb.SequenceDelta(index=index, token_ids=tokens, finish_reason=reason)])


@pytest.fixture
def asked() -> list[pb.GenerationSpec]:
    """By call: what was asked of the server."""
    return []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, asked: list[pb.GenerationSpec]) -> list[tuple[list[int], list]]:
    """By call: the prefix that it had, and what it was given: messages, then an end or None for a lost connection."""
    scripts: list[tuple[list[int], list]] = []
    given: list[list] = []

    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def StreamGenerate(self, request: pb.StreamGenerateRequest, **_rest: object) -> Call:  # noqa: N802
            return Call(self._messages(request))

        def _messages(self, request: pb.StreamGenerateRequest) -> Iterator:
            script = given.pop(0)
            scripts.append((list(request.spec.output_prefix.ids), script))
            asked.append(pb.GenerationSpec.FromString(request.spec.SerializeToString()))
            for item in script:
                if item is None:
                    raise Lost
                yield item

    monkeypatch.setattr(resuming.pb_grpc, "GenerationServiceStub", Stub)
    monkeypatch.setattr(tries, "PAUSE", 0.0)
    scripts.append(([], given))
    return scripts


def run(calls: list, *given: list, count: int = 1) -> list[int]:
    """Tokens that the caller gets."""
    calls[0][1].extend(given)
    request = pb.StreamGenerateRequest()
    request.spec.sampling.sequence_count = count
    request.spec.output.token_ids = True
    stream = stream_of(request)
    return [token for got in stream.messages() for delta in got.deltas for token in delta.token_ids]


def test_it_goes_on_from_what_came(calls: list) -> None:
    assert run(calls, [message(1, 2), None], [None], [message(3, end=True)]) == [1, 2, 3]
    assert [prefix for prefix, _ in calls[1:]] == [[], [1, 2], [1, 2]]


def test_an_end_whose_last_word_was_lost_is_the_end(calls: list) -> None:
    assert run(calls, [message(1, 2, end=True), None]) == [1, 2]
    assert len(calls) == 2


def test_several_sequences_are_not_begun_again(calls: list) -> None:
    calls[0][1].extend([[message(1), message(5, index=1), None]])
    with pytest.raises(Lost):
        run(calls, count=2)
    assert len(calls) == 2


def test_several_sequences_of_which_nothing_came_are(calls: list) -> None:
    ends = [message(1, end=True), message(5, index=1, end=True)]
    assert run(calls, [None], ends, count=2) == [1, 5]


def test_it_gives_up_where_nothing_comes(calls: list) -> None:
    with pytest.raises(Lost):
        run(calls, *[[None]] * 6)
    assert len(calls) == 7


def test_time_that_one_server_took_the_next_one_has_not(
    calls: list, asked: list[pb.GenerationSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0, 0, 3 * 10**9, 4 * 10**9, 30 * 10**9])  # when it is made, then before each call
    monkeypatch.setattr(resuming.time, "monotonic_ns", lambda: next(now))
    calls[0][1].extend([[None], [None], [message(1), None], [message(2, end=True)]])
    request = pb.StreamGenerateRequest()
    request.spec.max_time.FromSeconds(20)
    request.spec.max_queue_time.FromMilliseconds(3500)
    list(stream_of(request).messages())
    assert [spec.max_time.ToMilliseconds() for spec in asked] == [20_000, 17_000, 16_000, 1]
    assert [spec.max_queue_time.ToMilliseconds() for spec in asked] == [3500, 500, 1, 0]
    assert not asked[3].HasField("max_queue_time"), "it has been scheduled"


def test_times_that_are_none_stay_so(calls: list, asked: list[pb.GenerationSpec]) -> None:
    """A request that one server would refuse is refused by the next one too."""
    calls[0][1].extend([[None], [message(2, end=True)]])
    request = pb.StreamGenerateRequest()
    request.spec.max_time.FromSeconds(-1)
    list(stream_of(request).messages())
    assert [spec.max_time.ToSeconds() for spec in asked] == [-1, -1]
    assert not any(spec.HasField("max_queue_time") for spec in asked)


def test_who_cancels_while_it_waits_does_not_wait(monkeypatch: pytest.MonkeyPatch, calls: list) -> None:
    calls[0][1].extend([[None], [None]])
    stream = stream_of(pb.StreamGenerateRequest())

    def pause(*_: object, **__: object) -> float:
        threading.Thread(target=stream.cancel).start()
        return 3600.0

    monkeypatch.setattr(Tries, "pause", pause)
    assert list(stream.messages()) == []
    assert len(calls) == 2, "one call, and none after it"


@pytest.mark.parametrize("wanted", [False, True])
def test_ids_that_nobody_asked_for_are_left_out(calls: list, asked: list[pb.GenerationSpec], wanted: bool) -> None:
    """They are asked of each server all the same, so that another one can go on."""
    calls[0][1].extend([[message(1, 2), None], [message(3, end=True)]])
    request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(output=pb.OutputOptions(token_ids=wanted)))
    messages = list(stream_of(request).messages())
    ids = [list(delta.token_ids) for one in messages for delta in one.deltas]
    assert ids == ([[1, 2], [3]] if wanted else [[], []])
    assert [spec.output.token_ids for spec in asked] == [True, True]
    assert [prefix for prefix, _ in calls[1:]] == [[], [1, 2]]
