"""Beam search through the public API, on a real server."""

import math
import re
from collections.abc import Callable, Iterator

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.offline import LLM
from scheduler.parameters import Beam, Sampling, Stopping
from tests.support.server import RunningServer, details, running_server, stream_request

WIDTH, COUNT, TOKENS, PROMPT = 4, 3, 24, "ROMEO:\n"

Change = Callable[[pb.GenerationSpec], object]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--poison-freed-pages", "--kv-cache-memory", "128MiB", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def request_of(*changes: Change) -> pb.StreamGenerateRequest:
    request = stream_request(PROMPT, TOKENS, sequence_count=COUNT)
    request.spec.sampling.beam_search.width = WIDTH
    for change in changes:
        change(request.spec)
    return request


@pytest.fixture(scope="module")
def found(server: RunningServer, channel: grpc.Channel) -> pb.GenerateResponse:
    return server.stub(channel).Generate(pb.GenerateRequest(spec=request_of().spec))


def test_the_best_comes_first_and_beats_greedy(
    server: RunningServer, channel: grpc.Channel, found: pb.GenerateResponse
) -> None:
    scores = [sequence.score for sequence in found.sequences]
    assert [sequence.index for sequence in found.sequences] == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(sequence.token_ids) for sequence in found.sequences}) == COUNT
    spec = stream_request(PROMPT, TOKENS, temperature=0).spec
    (greedy,) = server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences
    assert scores[0] >= greedy.score / TOKENS
    assert found.usage.completion_tokens == COUNT * TOKENS


def test_it_is_what_the_engine_finds_without_a_server(found: pb.GenerateResponse) -> None:
    with LLM(dtype="float32") as llm:
        sampling = Sampling(sequence_count=COUNT, beam=Beam(WIDTH))
        (completion,) = llm.generate(PROMPT, sampling, Stopping(max_tokens=TOKENS, ignore_eos=True))
    assert [one.text for one in completion.sequences] == [one.text for one in found.sequences]
    assert [one.score for one in completion.sequences] == pytest.approx([one.score for one in found.sequences])


def test_nothing_is_streamed_before_it_is_final(
    server: RunningServer, channel: grpc.Channel, found: pb.GenerateResponse
) -> None:
    messages = list(server.stub(channel).StreamGenerate(request_of()))
    assert len(messages) == 1
    assert [delta.text for delta in messages[0].deltas] == [sequence.text for sequence in found.sequences]
    assert [list(delta.token_ids) for delta in messages[0].deltas] == [list(s.token_ids) for s in found.sequences]


def test_logprobs_add_up_to_the_score(server: RunningServer, channel: grpc.Channel) -> None:
    def wanted(spec: pb.GenerationSpec) -> None:
        spec.output.top_logprobs = 2
        spec.sampling.beam_search.length_penalty = 0.5

    answer = server.stub(channel).Generate(pb.GenerateRequest(spec=request_of(wanted).spec))
    for sequence in answer.sequences:
        total = sum(position.tokens[0].logprob for position in sequence.logprobs)
        assert sequence.score == pytest.approx(total / math.sqrt(TOKENS), rel=1e-4)
        assert all(len(position.tokens) in (2, 3) for position in sequence.logprobs)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sampling.seed", lambda s: setattr(s.sampling, "seed", 0)),
        ("sampling.temperature", lambda s: setattr(s.sampling, "temperature", 0.5)),
        ("sampling.top_k", lambda s: setattr(s.sampling, "top_k", 3)),
        ("sampling.repetition_penalty", lambda s: setattr(s.sampling, "repetition_penalty", 1.5)),
        ("sampling.frequency_penalty", lambda s: setattr(s.sampling, "frequency_penalty", 0.5)),
        ("sampling.presence_penalty", lambda s: setattr(s.sampling, "presence_penalty", -0.5)),
        ("sampling.logit_bias", lambda s: s.sampling.logit_bias.update({1: 2.0})),
        ("sampling.allowed_token_ids", lambda s: s.sampling.allowed_token_ids.append(3)),
        ("sampling.bad_words", lambda s: s.sampling.bad_words.append("the")),
        ("stopping.stop", lambda s: s.stopping.stop.append("the")),
        ("stopping.min_tokens", lambda s: setattr(s.stopping, "min_tokens", 3)),
        ("output_prefix", lambda s: s.output_prefix.ids.append(3)),
        ("sampling.beam_search.width", lambda s: setattr(s.sampling.beam_search, "width", 0)),
        ("sampling.beam_search.width", lambda s: setattr(s.sampling.beam_search, "width", COUNT - 1)),
        ("sampling.beam_search.width", lambda s: setattr(s.sampling.beam_search, "width", 17)),
        ("sampling.beam_search.width", lambda s: setattr(s.sampling.beam_search, "width", 2**31)),
        ("sampling.beam_search.length_penalty", lambda s: setattr(s.sampling.beam_search, "length_penalty", math.nan)),
        ("sampling.beam_search.length_penalty", lambda s: setattr(s.sampling.beam_search, "length_penalty", 11)),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    server: RunningServer, channel: grpc.Channel, field: str, change: Change
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        server.stub(channel).Generate(pb.GenerateRequest(spec=request_of(change).spec))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in details(refused.value)["BadRequest"].field_violations] == [f"spec.{field}"]


def test_a_client_that_leaves_ends_the_search(server: RunningServer, channel: grpc.Channel) -> None:
    before = server.metrics()["quire_requests_total{cancelled}"]
    call = server.stub(channel).StreamGenerate(request_of(lambda s: setattr(s.stopping, "max_tokens", 400)))
    server.wait_until(lambda metrics: metrics["quire_num_requests_running"] > 0, True)
    call.cancel()
    server.wait_for_metric("quire_num_requests_running", 0)
    server.wait_for_metric("quire_kv_pages_used", 0)
    assert server.metrics()["quire_requests_total{cancelled}"] == before + 1, "it ended by itself"


@pytest.mark.parametrize("most", [9, 40])
def test_every_hypothesis_keeps_a_constraint(server: RunningServer, channel: grpc.Channel, most: int) -> None:
    """Closed in time too: what takes all tokens says so."""

    def constrained(spec: pb.GenerationSpec) -> None:
        spec.structured_output.regex = "<([a-z]+ ?)+>"
        spec.stopping.ignore_eos = False
        spec.stopping.max_tokens = most

    sequences = server.stub(channel).Generate(pb.GenerateRequest(spec=request_of(constrained).spec)).sequences
    assert len({one.text for one in sequences}) == COUNT
    assert all(re.fullmatch("<([a-z]+ ?)+>", one.text) for one in sequences)
    assert {one.finish_reason for one in sequences} <= {pb.FINISH_REASON_STOP, pb.FINISH_REASON_CLOSED}
    messages = list(server.stub(channel).StreamGenerate(request_of(constrained)))
    assert ["".join(d.text for m in messages for d in m.deltas if d.index == one.index) for one in sequences] == [
        one.text for one in sequences
    ]


def test_a_search_with_too_few_outputs_says_how_many_there_are(server: RunningServer, channel: grpc.Channel) -> None:
    def two(spec: pb.GenerationSpec) -> None:
        spec.structured_output.choice.texts.extend(["a", "b"])
        spec.stopping.ignore_eos = False

    with pytest.raises(grpc.RpcError, match="the search found 2 outputs, sequence_count is 3") as refused:
        server.stub(channel).Generate(pb.GenerateRequest(spec=request_of(two).spec))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
