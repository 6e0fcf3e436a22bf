"""Law: joined deltas equal the unary result, byte for byte, for every control and any grouping of tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from quire.v1 import generation_service_pb2 as pb

from tests.support.server import RunningServer, running_server

TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 11}
CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "temperature": {"sampling": SAMPLED},
    "top_p, top_k, min_p": {"sampling": SAMPLED | {"topP": 0.8, "topK": 30, "minP": 0.01}},
    "penalties": {"sampling": SAMPLED | {"repetitionPenalty": 1.3, "frequencyPenalty": 0.5, "presencePenalty": 0.5}},
    "logit_bias": {"sampling": SAMPLED | {"logitBias": {"12": 3.0, "199": -4.0}}},
    "allowed_token_ids": {"sampling": SAMPLED | {"allowedTokenIds": [5, 70, 71, 199, 220, 300]}},
    "bad_words": {"sampling": SAMPLED | {"badWords": ["the", "a", "you"]}},
    "min_tokens and stop": {"sampling": SAMPLED, "stopping": {"minTokens": 9, "stop": ["e", "\n"]}},
    "stop": {"sampling": SAMPLED, "stopping": {"stop": ["ing", " th"]}},
    "stop, included": {"sampling": SAMPLED, "stopping": {"stop": ["ing", " th"], "includeStop": True}},
    "a stop string that never comes": {"sampling": SAMPLED, "stopping": {"stop": ["qqqqqqqq"]}},
    "stop_token_ids": {"sampling": SAMPLED, "stopping": {"stopTokenIds": [199]}},
    "end tokens count": {"sampling": SAMPLED, "stopping": {"ignoreEos": False}},
    "logprobs": {"sampling": SAMPLED, "output": {"logprobs": True}},
    "top_logprobs": {"sampling": SAMPLED, "output": {"topLogprobs": 3}},
    "prompt_logprobs": {"sampling": SAMPLED, "output": {"promptLogprobs": True, "topLogprobs": 1}},
    "no text": {"sampling": SAMPLED, "output": {"text": False}},
    "special tokens shown": {"sampling": SAMPLED | {"logitBias": {"0": 5.0}}, "output": {"skipSpecialTokens": False}},
    "bytes that are no characters": {"sampling": SAMPLED | {"allowedTokenIds": list(range(120, 190))}},
    "sequences": {"sampling": SAMPLED | {"sequenceCount": 3}, "stopping": {"stop": ["e"]}},
    "beam search": {"sampling": {"sequenceCount": 2, "beamSearch": {"width": 3}}, "output": {"topLogprobs": 2}},
}
GROUPINGS: list[dict[str, Any]] = [
    {},
    {"minTokensPerMessage": 3},
    {"minTokensPerMessage": 17, "usageInEveryMessage": True},
    {"minTokensPerMessage": 1000},
    {"minTokensPerMessage": 5, "maxDelay": "0.001s"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@dataclass
class Joined:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    end: list[tuple[int, int | None, str]] = field(default_factory=list)

    def add(self, delta: pb.SequenceDelta) -> None:
        assert not self.end, "a delta after the end"
        assert delta.first_position == len(self.token_ids)
        assert delta.token_count == len(delta.token_ids)
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.end += [cause(delta)] if delta.finish_reason else []


def cause(message: pb.SequenceDelta | pb.SequenceResult) -> tuple[int, int | None, str]:
    token = message.stop_token_id if message.HasField("stop_token_id") else None
    return message.finish_reason, token, message.stop_string


def spec_of(controls: dict[str, Any]) -> pb.GenerationSpec:
    stopping = {"maxTokens": TOKENS, "ignoreEos": True} | controls.get("stopping", {})
    output = {"tokenIds": True} | controls.get("output", {})
    return ParseDict(
        {"text": "ROMEO:\n", "sampling": controls["sampling"], "stopping": stopping, "output": output},
        pb.GenerationSpec(),
    )


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.sample(3)
def test_deltas_add_up_to_the_result(server: RunningServer, channel: grpc.Channel, name: str) -> None:
    spec, stub = spec_of(CONTROLS[name]), server.stub(channel)
    whole = stub.Generate(pb.GenerateRequest(spec=spec))
    for grouping in GROUPINGS:
        request = pb.StreamGenerateRequest(spec=spec, stream_options=ParseDict(grouping, pb.StreamOptions()))
        messages = list(stub.StreamGenerate(request))
        joined = [Joined() for _ in whole.sequences]
        for delta in itertools.chain.from_iterable(message.deltas for message in messages):
            joined[delta.index].add(delta)
        for one, result in zip(joined, whole.sequences, strict=True):
            assert one.text.encode() == result.text.encode(), grouping
            assert one.token_ids == list(result.token_ids)
            assert one.logprobs == list(result.logprobs)
            assert one.end == [cause(result)]
        assert messages[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert messages[0].prompt_info.logprobs == whole.prompt_info.logprobs
        assert [message.HasField("prompt_info") for message in messages] == [True] + [False] * (len(messages) - 1)


def test_the_controls_do_something(server: RunningServer, channel: grpc.Channel) -> None:
    """Else the law would hold of twenty times the same."""
    stub = server.stub(channel)
    results = {name: stub.Generate(pb.GenerateRequest(spec=spec_of(controls))) for name, controls in CONTROLS.items()}
    texts = {name: result.sequences[0].text for name, result in results.items()}
    alike = {"logprobs", "top_logprobs", "prompt_logprobs", "a stop string that never comes", "end tokens count"}
    changed = set(CONTROLS) - alike - {"temperature"}
    assert {name for name in changed if texts[name] == texts["temperature"]} == set()
    assert "\ufffd" in texts["bytes that are no characters"]
    reasons = {name: result.sequences[0].finish_reason for name, result in results.items()}
    assert {reasons[name] for name in ("stop", "stop, included", "stop_token_ids")} == {pb.FINISH_REASON_STOP}
