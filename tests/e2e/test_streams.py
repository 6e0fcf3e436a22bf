"""Real channels to a real server: streams, cancels, killed clients."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.offline import LLM
from scheduler.parameters import Sampling, Stopping
from tests.support import client_process
from tests.support.client_process import prompt_of
from tests.support.server import RunningServer, details, running_server, stream_request

STREAMS, TOKENS = 64, 48


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--poison-freed-pages", "--kv-cache-memory", "128MiB") as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Results of the 64 seeded requests, each of which runs alone."""
    with LLM() as llm:
        stopping = Stopping(max_tokens=TOKENS, ignore_eos=True)
        return [
            llm.generate(prompt_of(seed), Sampling(seed=seed, temperature=1.0), stopping)[0].token_ids
            for seed in range(STREAMS)
        ]


async def read_stream(address: str, seed: int, leave_after: int | None) -> list[int]:
    ids: list[int] = []
    async with aio.insecure_channel(address) as channel:
        request = stream_request(prompt_of(seed), TOKENS, seed=seed, temperature=1.0)
        call = pb_grpc.GenerationServiceStub(channel).StreamGenerate(request)
        async for message in call:
            for delta in message.deltas:
                assert delta.first_position == len(ids), "a gap or a duplicate"
                ids.extend(delta.token_ids)
            if leave_after is not None and len(ids) >= leave_after:
                call.cancel()
                break
    return ids


def test_cancelled_streams_free_their_pages_and_change_nobody(server: RunningServer, expected: list[list[int]]) -> None:
    rng = random.Random(5)
    leaving = {seed: rng.randrange(TOKENS // 2) for seed in rng.sample(range(STREAMS), STREAMS // 2)}
    before = server.metrics()

    async def all_streams() -> list[list[int]]:
        return await asyncio.gather(*(read_stream(server.address, seed, leaving.get(seed)) for seed in range(STREAMS)))

    for seed, ids in enumerate(asyncio.run(all_streams())):
        assert ids == expected[seed][: len(ids)]
        assert seed in leaving or len(ids) == TOKENS
    server.wait_for_metric("quire_kv_pages_used", 0)
    ended = "quire_requests_total{length}"
    ways = ("quire_requests_total{cancelled}", ended)
    server.wait_until(lambda metrics: sum(metrics[way] - before[way] for way in ways), STREAMS)
    # A client that is slow to leave may find its stream at its end.
    assert STREAMS - len(leaving) <= server.metrics()[ended] - before[ended] < STREAMS


def test_killed_clients_free_their_pages_and_change_nobody(server: RunningServer, expected: list[list[int]]) -> None:
    each = STREAMS // 8
    clients = [client_process.client(server.address, first, each, TOKENS) for first in range(0, STREAMS, each)]
    doomed = random.Random(11).sample(clients, 4)
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        if client in doomed:
            client.send_signal(signal.SIGKILL)
    for client in clients:
        output = client.stdout.read() if client.stdout else ""  # `communicate` misses what came with the first line
        client.wait(timeout=120)
        if client not in doomed:
            assert client.returncode == 0
            for seed, ids in json.loads(output).items():
                assert ids == expected[int(seed)]
    server.wait_for_metric("quire_num_requests_running", 0)
    server.wait_for_metric("quire_kv_pages_used", 0)


def test_stream_matches_unary_and_accounts_for_every_token(server: RunningServer) -> None:
    before = server.metrics()
    with grpc.insecure_channel(server.address) as channel:
        request = stream_request("ROMEO:", 30, seed=3)
        request.spec.output.logprobs = True
        messages = list(server.stub(channel).StreamGenerate(request))
        whole = server.stub(channel).Generate(pb.GenerateRequest(spec=request.spec))
    assert messages[0].request_id
    assert messages[0].prompt_info.token_count == 2
    assert messages[0].prompt_info.seed == 3
    deltas = [delta for message in messages for delta in message.deltas]
    assert "".join(d.text for d in deltas) == whole.sequences[0].text
    assert [i for d in deltas for i in d.token_ids] == list(whole.sequences[0].token_ids)
    assert sum(d.token_count for d in deltas) == messages[-1].usage.completion_tokens == 30
    assert [d.finish_reason for d in deltas[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.sequences[0].finish_reason == pb.FINISH_REASON_LENGTH
    logprobs = [position.tokens[0].logprob for position in whole.sequences[0].logprobs]
    assert len(logprobs) == 30
    assert whole.sequences[0].score == pytest.approx(sum(logprobs), rel=1e-5)
    after = server.metrics()
    assert after["quire_generation_tokens_total"] - before["quire_generation_tokens_total"] == 60
    assert after["quire_prompt_tokens_total"] - before["quire_prompt_tokens_total"] == 4


NEW_TOKENS = "quire_request_generation_tokens_sum"


def test_output_prefix_goes_on_where_the_output_stopped(server: RunningServer) -> None:
    """From places where a message ended, and from the end."""
    request = stream_request("ROMEO:", 40, seed=9, temperature=1.2)
    request.spec.stopping.stop.append("never to be found")
    counted, new = server.metrics()[NEW_TOKENS], 0
    with grpc.insecure_channel(server.address) as channel:
        deltas = [message.deltas[0] for message in server.stub(channel).StreamGenerate(request)]
        for told in [*range(1, len(deltas), 9), len(deltas)]:
            _, known = _joined(deltas[:told])
            request.spec.output_prefix.ids[:] = known
            rest = [message.deltas[0] for message in server.stub(channel).StreamGenerate(request)]
            assert rest[0].first_position == len(known)
            assert _joined(rest) == _joined(deltas[told:])
            assert rest[-1].finish_reason == pb.FINISH_REASON_LENGTH
            new += sum(delta.token_count for delta in rest)
        text, ids = _joined(deltas)
        request.spec.stopping.stop[0] = text[10:14]
        request.spec.output_prefix.ids[:] = ids
        (ended,) = server.stub(channel).StreamGenerate(request)
    assert ended.deltas[0].stop_string == request.spec.stopping.stop[0]
    assert ended.deltas[0].token_count == 0
    server.wait_for_metric(NEW_TOKENS, counted + 40 + new)


def _joined(deltas: list[pb.SequenceDelta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


def test_stop_string_ends_the_stream_and_never_leaks(server: RunningServer) -> None:
    request = stream_request("First Citizen:", 200, seed=1)
    request.spec.stopping.stop.extend(["zzz", "AUFID"])
    with grpc.insecure_channel(server.address) as channel:
        messages = list(server.stub(channel).StreamGenerate(request))
    texts = [d.text for m in messages for d in m.deltas]
    assert "".join(texts).endswith("\n")
    assert "AU" not in "".join(texts)
    last = messages[-1].deltas[0]
    assert (last.finish_reason, last.stop_string) == (pb.FINISH_REASON_STOP, "AUFID")
    assert sum(d.token_count for m in messages for d in m.deltas) == messages[-1].usage.completion_tokens < 30


def test_deltas_are_grouped_as_asked(server: RunningServer) -> None:
    request = stream_request("KING:", 40, temperature=0)
    request.stream_options.min_tokens_per_message = 16
    request.stream_options.usage_in_every_message = True
    with grpc.insecure_channel(server.address) as channel:
        messages = list(server.stub(channel).StreamGenerate(request))
    counts = [m.deltas[0].token_count for m in messages]
    assert counts[0] < 16
    assert all(count >= 16 for count in counts[1:-1])
    assert [m.usage.completion_tokens for m in messages] == [sum(counts[: i + 1]) for i in range(len(counts))]


def test_batch_answers_every_entry_though_some_fail(server: RunningServer) -> None:
    specs = [stream_request(f"Speech {i}:", 5, temperature=0).spec for i in range(20)]
    specs[7].sampling.top_p = 3
    request = pb.BatchGenerateRequest(requests=[pb.GenerateRequest(spec=spec) for spec in specs])
    with grpc.insecure_channel(server.address) as channel:
        answers = {a.position: a for a in server.stub(channel).BatchGenerate(request)}
        alone = server.stub(channel).Generate(pb.GenerateRequest(spec=specs[3]))
    assert sorted(answers) == list(range(20))
    assert [p for p, a in answers.items() if a.WhichOneof("outcome") == "error"] == [7]
    assert sorted(answers[7].error.message.split()[:3]) == ["3.0:", "is", "sampling.top_p"]
    assert answers[7].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answers[3].response.sequences[0].token_ids == alone.sequences[0].token_ids


def test_cancelled_batch_counts_every_entry(server: RunningServer) -> None:
    def ended(metrics: dict[str, float]) -> float:
        return sum(value for name, value in metrics.items() if name.startswith("quire_requests_total"))

    before = server.metrics()
    entries = [pb.GenerateRequest(spec=stream_request(f"Speech {i}:", 900, temperature=1).spec) for i in range(300)]
    with grpc.insecure_channel(server.address) as channel:
        call = server.stub(channel).BatchGenerate(pb.BatchGenerateRequest(requests=entries))
        server.wait_until(lambda metrics: metrics["quire_num_requests_running"] >= 128, True)
        call.cancel()
    server.wait_until(ended, ended(before) + 300)
    cancelled = server.metrics()["quire_requests_total{cancelled}"] - before["quire_requests_total{cancelled}"]
    assert cancelled >= 128, "those that ran when the call was cancelled"


def test_the_overhead_of_steps_is_told_and_is_part_of_them(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        list(server.stub(channel).StreamGenerate(stream_request("ROMEO:", 20, temperature=0)))
    metrics = server.metrics()
    overhead, whole = "quire_step_overhead_seconds", "quire_step_duration_seconds"
    server.wait_until(lambda now: now[f"{overhead}_count"] - now[f"{whole}_count"], 0)
    assert metrics[f"{whole}_count"] >= 20
    assert 0 < metrics[f"{overhead}_sum"] < metrics[f"{whole}_sum"]


def test_deadline_stops_the_work(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(server.stub(channel).StreamGenerate(stream_request("A", 1000, temperature=1), timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.wait_for_metric("quire_kv_pages_used", 0)
        request = stream_request("A", 1000, temperature=1)
        request.spec.max_time.FromMilliseconds(300)
        messages = list(server.stub(channel).StreamGenerate(request))
    assert messages[-1].deltas[0].finish_reason == pb.FINISH_REASON_DEADLINE
    assert messages[-1].usage.completion_tokens < 1000


def test_burst_of_short_requests_all_end_properly_and_none_is_refused(server: RunningServer) -> None:
    """An idle server refuses no request; and many ends come while an earlier message is being written."""

    async def one(stub: pb_grpc.GenerationServiceStub, i: int) -> tuple[int, int, int]:
        messages = [m async for m in stub.StreamGenerate(stream_request(f"Speech {i}:", 3, temperature=1, seed=i))]
        tokens = sum(d.token_count for m in messages for d in m.deltas)
        return tokens, messages[-1].usage.completion_tokens, messages[-1].deltas[-1].finish_reason

    async def burst() -> list[tuple[int, int, int]]:
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection each: one carries 128 streams
        async with AsyncExitStack() as stack:
            channels = [aio.insecure_channel(server.address, options=own) for _ in range(2)]
            stubs = [pb_grpc.GenerationServiceStub(await stack.enter_async_context(c)) for c in channels]
            return await asyncio.gather(*(one(stubs[i % 2], i) for i in range(200)))

    assert set(asyncio.run(burst())) == {(3, 3, pb.FINISH_REASON_LENGTH)}


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_told_once_it_reads_and_the_log_has_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its request ends at once, the call when the client reads, or leaves: gRPC has no status overtake a message."""
    entry = stream_request("KING:", 300, temperature=1, seed=1).spec
    entry.output.logprobs, entry.output.top_logprobs, entry.sampling.sequence_count = True, 20, 4
    batch = pb.BatchGenerateRequest(requests=[pb.GenerateRequest(spec=entry)])
    narrow = [("grpc.http2.bdp_probe", 0)]  # a message is larger than what may be sent to who reads nothing
    flags = ("--engine", "thread", "--kv-cache-memory", "16MiB", "--write-stall", "0.5", "--max-backlog", "100000")
    with running_server(*flags) as server:
        with grpc.insecure_channel(server.address, options=narrow) as channel:
            unread = [server.stub(channel).BatchGenerate(batch) for _ in range(2)]
            streams = [server.stub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=entry)) for _ in range(2)]
            server.wait_for_metric("quire_requests_total{slow_reader}", len(streams))
            server.wait_for_metric("quire_kv_pages_used", 0)
            lines = wait_for_lines(capfd, "read nothing", len(unread) + len(streams))
            for call in (unread[0], streams[0]):
                with pytest.raises(grpc.RpcError) as told:
                    for _ in call:
                        pass
                assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert told.value.details() == "the client read nothing for 0.5 s"
                assert details(told.value)["ErrorInfo"].reason == "SLOW_READER"
            for call in (unread[1], streams[1]):
                call.cancel()
        assert server.stop() == 0
    said = lines + capfd.readouterr().err
    assert said.count("a client read nothing for 0.5 s: its call ends") == len(unread) + len(streams)
    assert "Traceback" not in said
    assert "ExecuteBatchError" not in said


def wait_for_lines(capfd: pytest.CaptureFixture[str], words: str, count: int) -> str:
    """Returns the server's lines until this many of them had these words."""
    said, deadline = "", time.monotonic() + 60
    while said.count(words) < count:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
        said += capfd.readouterr().err
    return said
