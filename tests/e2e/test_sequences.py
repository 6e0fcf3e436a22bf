"""Several sequences of one prompt through the public API, on a real server."""

from collections.abc import Callable, Iterator

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.offline import LLM
from scheduler.parameters import Sampling, Stopping
from tests.support.server import RunningServer, running_server, stream_request

COUNT, TOKENS, PROMPT = 4, 48, "ROMEO:\n"
SAMPLED = {"temperature": 1.0, "seed": 3, "sequence_count": COUNT}

Change = Callable[[pb.GenerationSpec], object]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--poison-freed-pages", "--kv-cache-memory", "128MiB") as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def request_of(*changes: Change) -> pb.StreamGenerateRequest:
    request = stream_request(PROMPT, TOKENS, **SAMPLED)
    for change in changes:
        change(request.spec)
    return request


def ask(server: RunningServer, channel: grpc.Channel, *changes: Change) -> pb.GenerateResponse:
    return server.stub(channel).Generate(pb.GenerateRequest(spec=request_of(*changes).spec))


@pytest.fixture(scope="module")
def plain(server: RunningServer, channel: grpc.Channel) -> pb.GenerateResponse:
    return ask(server, channel)


def test_all_sequences_come_in_order_and_are_counted(plain: pb.GenerateResponse) -> None:
    assert [sequence.index for sequence in plain.sequences] == list(range(COUNT))
    assert [len(sequence.token_ids) for sequence in plain.sequences] == [TOKENS] * COUNT
    assert len({sequence.text for sequence in plain.sequences}) == COUNT
    assert {sequence.finish_reason for sequence in plain.sequences} == {pb.FINISH_REASON_LENGTH}
    assert plain.usage.completion_tokens == COUNT * TOKENS


def test_they_are_what_the_engine_gives_without_a_server(plain: pb.GenerateResponse) -> None:
    with LLM() as llm:
        (found,) = llm.generate(PROMPT, Sampling(**SAMPLED), Stopping(max_tokens=TOKENS, ignore_eos=True))
    assert [one.token_ids for one in found.sequences] == [list(one.token_ids) for one in plain.sequences]
    assert [one.text for one in found.sequences] == [one.text for one in plain.sequences]
    assert [one.score for one in found.sequences] == pytest.approx([one.score for one in plain.sequences], rel=1e-5)
    assert found.text == plain.sequences[0].text


@pytest.mark.parametrize("least", [1, 5, 70, 1000])
def test_deltas_add_up_to_the_result_under_any_grouping(
    server: RunningServer, channel: grpc.Channel, plain: pb.GenerateResponse, least: int
) -> None:
    request = request_of()
    request.stream_options.min_tokens_per_message = least
    texts, ids, reasons = [""] * COUNT, [[] for _ in range(COUNT)], [[] for _ in range(COUNT)]
    for number, message in enumerate(server.stub(channel).StreamGenerate(request)):
        indices = [delta.index for delta in message.deltas]
        assert len(set(indices)) == len(indices)
        assert message.HasField("prompt_info") == (number == 0)
        for delta in message.deltas:
            assert delta.first_position == len(ids[delta.index])
            assert delta.token_count == len(delta.token_ids)
            assert not reasons[delta.index], "a delta after the end"
            texts[delta.index] += delta.text
            ids[delta.index].extend(delta.token_ids)
            reasons[delta.index] += [delta.finish_reason] if delta.finish_reason else []
    assert texts == [sequence.text for sequence in plain.sequences]
    assert ids == [list(sequence.token_ids) for sequence in plain.sequences]
    assert reasons == [[pb.FINISH_REASON_LENGTH]] * COUNT
    assert message.usage.completion_tokens == COUNT * TOKENS


def test_a_stop_string_ends_the_sequences_that_have_it(
    server: RunningServer, channel: grpc.Channel, plain: pb.GenerateResponse
) -> None:
    texts = [sequence.text for sequence in plain.sequences]
    stop = next(
        text[i : i + 3]
        for text in texts
        for i in range(5, len(text) - 3)
        if sum(text[i : i + 3] in other for other in texts) < COUNT
    )
    found = ask(server, channel, lambda s: s.stopping.stop.append(stop)).sequences
    assert [sequence.text for sequence in found] == [text.split(stop)[0] for text in texts]
    assert [sequence.stop_string for sequence in found] == [stop if stop in text else "" for text in texts]
    assert {sequence.finish_reason for sequence in found} == {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP}


def test_a_stop_token_ends_the_sequences_that_have_it(
    server: RunningServer, channel: grpc.Channel, plain: pb.GenerateResponse
) -> None:
    ids = [list(sequence.token_ids) for sequence in plain.sequences]
    stop = ids[1][7]
    found = ask(server, channel, lambda s: s.stopping.stop_token_ids.append(stop)).sequences
    expected = [one[: one.index(stop) + 1] if stop in one else one for one in ids]
    assert [list(sequence.token_ids) for sequence in found] == expected


def test_logprobs_come_with_each_and_the_prompts_once(
    server: RunningServer, channel: grpc.Channel, plain: pb.GenerateResponse
) -> None:
    def wanted(spec: pb.GenerationSpec) -> None:
        spec.output.top_logprobs, spec.output.prompt_logprobs = 2, True

    found = ask(server, channel, wanted)
    assert len(found.prompt_info.logprobs) == found.prompt_info.token_count
    for sequence, before in zip(found.sequences, plain.sequences, strict=True):
        assert list(sequence.token_ids) == list(before.token_ids)
        assert [position.tokens[0].token_id for position in sequence.logprobs] == list(sequence.token_ids)
        assert sequence.score == pytest.approx(sum(p.tokens[0].logprob for p in sequence.logprobs), rel=1e-4)


def test_a_client_that_leaves_lets_go_of_all_of_them(server: RunningServer, channel: grpc.Channel) -> None:
    before = server.metrics()["quire_requests_total{cancelled}"]
    call = server.stub(channel).StreamGenerate(request_of(lambda s: setattr(s.stopping, "max_tokens", 400)))
    next(iter(call))
    call.cancel()
    server.wait_for_metric("quire_num_requests_running", 0)
    server.wait_for_metric("quire_kv_pages_used", 0)
    assert server.metrics()["quire_requests_total{cancelled}"] == before + 1, "one request, however many sequences"


def test_entries_of_a_batch_have_several_too(
    server: RunningServer, channel: grpc.Channel, plain: pb.GenerateResponse
) -> None:
    entries = [pb.GenerateRequest(spec=request_of().spec), pb.GenerateRequest(spec=stream_request(PROMPT, 3).spec)]
    answers = list(server.stub(channel).BatchGenerate(pb.BatchGenerateRequest(requests=entries)))
    by_position = {answer.position: answer.response for answer in answers}
    assert [one.text for one in by_position[0].sequences] == [one.text for one in plain.sequences]
    assert len(by_position[1].sequences) == 1
