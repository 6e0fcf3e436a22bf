"""Sampling controls through the public API, on a real server."""

from collections.abc import Callable, Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from quire.v1 import generation_service_pb2 as pb

from tests.support.server import RunningServer, running_server, stream_request

Change = Callable[[pb.GenerationSpec], object]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def ask(server: RunningServer, channel: grpc.Channel, *changes: Change) -> pb.SequenceResult:
    spec = stream_request("ROMEO:\n", 40, temperature=0).spec
    spec.output.token_ids = True
    for change in changes:
        change(spec)
    return server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences[0]


@pytest.fixture(scope="module")
def plain(server: RunningServer, channel: grpc.Channel) -> pb.SequenceResult:
    return ask(server, channel)


def test_a_bad_word_is_never_generated(server: RunningServer, channel: grpc.Channel, plain: pb.SequenceResult) -> None:
    words = sorted({word for word in plain.text.split() if word.isalpha() and len(word) > 2})
    assert words
    found = ask(server, channel, lambda s: s.sampling.bad_words.extend(words))
    assert not set(words) & set(found.text.split())
    assert found.text


def test_only_allowed_tokens_are_generated(server: RunningServer, channel: grpc.Channel) -> None:
    found = ask(server, channel, lambda s: s.sampling.allowed_token_ids.extend((70, 71, 72)))
    assert set(found.token_ids) <= {70, 71, 72}
    assert len(found.token_ids) == 40


def test_a_bias_of_100_decides_and_of_minus_100_forbids(
    server: RunningServer, channel: grpc.Channel, plain: pb.SequenceResult
) -> None:
    assert set(ask(server, channel, lambda s: s.sampling.logit_bias.update({70: 100})).token_ids) == {70}
    first = plain.token_ids[0]
    assert first not in ask(server, channel, lambda s: s.sampling.logit_bias.update({first: -100})).token_ids


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 5.0), ("frequency_penalty", 2.0), ("presence_penalty", 2.0)]
)
def test_penalties_make_output_more_varied(
    server: RunningServer, channel: grpc.Channel, plain: pb.SequenceResult, name: str, value: float
) -> None:
    found = ask(server, channel, lambda s: setattr(s.sampling, name, value))
    assert len(set(found.token_ids)) > len(set(plain.token_ids))


def test_min_tokens_keeps_stop_tokens_and_stop_strings_away(
    server: RunningServer, channel: grpc.Channel, plain: pb.SequenceResult
) -> None:
    stop = plain.token_ids[5]
    early = ask(server, channel, lambda s: s.stopping.stop_token_ids.append(stop))
    assert len(early.token_ids) <= 6
    late = ask(
        server,
        channel,
        lambda s: s.stopping.stop_token_ids.append(stop),
        lambda s: setattr(s.stopping, "min_tokens", 20),
    )
    assert len(late.token_ids) > 20 or late.finish_reason == pb.FINISH_REASON_LENGTH
    assert stop not in late.token_ids[:20]
    string = plain.text[3:6]
    assert ask(server, channel, lambda s: s.stopping.stop.append(string)).stop_string == string
    passed = ask(
        server, channel, lambda s: s.stopping.stop.append(string), lambda s: setattr(s.stopping, "min_tokens", 20)
    )
    assert passed.token_ids[:20] == plain.token_ids[:20]


def test_controls_that_leave_no_token_are_the_clients_fault(server: RunningServer, channel: grpc.Channel) -> None:
    """Only after a first token is there nothing left, so that no check of the values alone can tell."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(
            server,
            channel,
            lambda s: s.sampling.allowed_token_ids.append(70),
            lambda s: s.stopping.stop_token_ids.append(70),
            lambda s: setattr(s.stopping, "min_tokens", 5),
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(info)
    assert info.reason == "NO_TOKEN_LEFT"
    assert ask(server, channel).token_ids, "the next request is served"


def test_the_same_controls_in_a_crowd_give_the_same_tokens(server: RunningServer, channel: grpc.Channel) -> None:
    def change(spec: pb.GenerationSpec) -> None:
        spec.sampling.temperature, spec.sampling.seed = 1.0, 5
        spec.sampling.repetition_penalty, spec.sampling.frequency_penalty = 1.2, 0.3
        spec.sampling.bad_words.append("the")

    alone = ask(server, channel, change)
    spec = stream_request("ROMEO:\n", 40, temperature=0).spec
    spec.output.token_ids = True
    change(spec)
    others = [stream_request(f"{i}:", 30, temperature=1, seed=i).spec for i in range(12)]
    calls = [
        server.stub(channel).Generate.future(pb.GenerateRequest(spec=one)) for one in [*others[:6], spec, *others[6:]]
    ]
    assert list(calls[6].result().sequences[0].token_ids) == list(alone.token_ids)
    for call in calls:
        call.result()


def test_logprobs_of_the_prompt(server: RunningServer, channel: grpc.Channel) -> None:
    spec = stream_request([5, 70, 71, 72], 3, temperature=0).spec
    spec.output.prompt_logprobs, spec.output.top_logprobs = True, 2
    whole = server.stub(channel).Generate(pb.GenerateRequest(spec=spec))
    told = whole.prompt_info.logprobs
    assert not told[0].tokens, "nothing comes before the first token"
    assert [position.tokens[0].token_id for position in told[1:]] == [70, 71, 72]
    assert all(2 <= len(position.tokens) <= 3 for position in told[1:])
    # The logprob of a prompt's token is the one that it would have as output.
    spec.token_ids.ids[:] = [5]
    spec.sampling.allowed_token_ids.append(70)
    drawn = server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences[0].logprobs[0].tokens[0]
    assert (drawn.token_id, drawn.rank) == (70, told[1].tokens[0].rank)
    assert drawn.logprob == pytest.approx(told[1].tokens[0].logprob, abs=1e-5)
    # In a stream they come with the first message.
    spec.token_ids.ids[:] = [5, 70, 71, 72]
    spec.sampling.ClearField("allowed_token_ids")
    messages = list(server.stub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=spec)))
    assert messages[0].prompt_info.logprobs == told
    assert not any(message.HasField("prompt_info") for message in messages[1:])
