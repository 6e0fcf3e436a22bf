"""AdminService of real servers: the page map adds up, names who holds what, and a reset forgets what was cached."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc
from quire.v1 import generation_service_pb2 as generation_pb
from quire.v1 import generation_service_pb2_grpc as generation_grpc
from typer.testing import CliRunner

from rpc.cli.main import app
from rpc.distribution import own_version
from tests.support.forking import run_quire
from tests.support.server import RunningServer, clean_environment, running_server, stream_request

PROMPT = "First Citizen: we are accounted poor citizens, the patricians good. " * 6


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with running_server("--engine", request.param, "--kv-cache-memory", "8MiB") as running:
        yield running


def page_map(server: RunningServer) -> pb.GetPageMapResponse:
    with grpc.insecure_channel(server.admin) as channel:
        return pb_grpc.AdminServiceStub(channel).GetPageMap(pb.GetPageMapRequest(), timeout=30)


def generate(server: RunningServer, max_tokens: int = 4) -> generation_pb.GenerateResponse:
    with grpc.insecure_channel(server.address) as channel:
        spec = stream_request(PROMPT, max_tokens, temperature=0).spec
        return server.stub(channel).Generate(generation_pb.GenerateRequest(spec=spec), timeout=60)


def reset(server: RunningServer) -> int:
    with grpc.insecure_channel(server.admin) as channel:
        return pb_grpc.AdminServiceStub(channel).ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=30).page_count


def test_cached_pages_are_those_of_ended_requests_until_a_reset(server: RunningServer) -> None:
    reset(server)
    answer = generate(server)
    full = (answer.usage.prompt_tokens + answer.usage.completion_tokens - 1) // 16
    assert answer.usage.cached_prompt_tokens == 0
    pages = page_map(server)
    assert pages.page_size == 16
    assert Counter(pages.states) == {pb.PAGE_STATE_CACHED: full, pb.PAGE_STATE_FREE: len(pages.states) - full}
    assert not any(pages.holder_counts)
    assert not pages.holders
    assert generate(server).usage.cached_prompt_tokens == (answer.usage.prompt_tokens - 1) // 16 * 16
    assert reset(server) == full
    assert set(page_map(server).states) == {pb.PAGE_STATE_FREE}
    assert generate(server).usage.cached_prompt_tokens == 0
    assert server.metrics()['quire_kv_pages_evicted_total{cause="reset"}'] >= full


def test_running_requests_are_named_with_their_pages_and_outlive_a_reset(server: RunningServer) -> None:
    async def look() -> tuple[pb.GetPageMapResponse, list[int], list[int]]:
        async with aio.insecure_channel(server.address) as channel, aio.insecure_channel(server.admin) as admin:
            stub, operator = generation_grpc.GenerationServiceStub(channel), pb_grpc.AdminServiceStub(admin)
            request = stream_request(PROMPT, 600, temperature=1, seed=3)
            alone = [t async for m in stub.StreamGenerate(request) for d in m.deltas for t in d.token_ids]
            request.request_id = "looked-at"
            tokens, pages = list[int](), pb.GetPageMapResponse()
            while not pages.holders:  # on a busy machine it can end before this process gets to look at it
                await operator.ResetPrefixCache(pb.ResetPrefixCacheRequest())
                tokens = []
                async for message in stub.StreamGenerate(request):
                    if not tokens:
                        pages = await operator.GetPageMap(pb.GetPageMapRequest())
                        await operator.ResetPrefixCache(pb.ResetPrefixCacheRequest())
                    tokens += message.deltas[0].token_ids
            return pages, tokens, alone

    pages, tokens, alone = asyncio.run(look())
    assert tokens == alone
    held = {i for i, state in enumerate(pages.states) if state == pb.PAGE_STATE_HELD}
    assert {holder.request_id for holder in pages.holders} == {"looked-at"}
    assert {page for holder in pages.holders for page in holder.pages} == held
    assert sum(pages.holder_counts) == sum(len(holder.pages) for holder in pages.holders) == len(held) > 0


def test_a_server_says_what_it_is(server: RunningServer) -> None:
    with grpc.insecure_channel(server.admin) as channel:
        info = pb_grpc.AdminServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
    assert (info.model, info.architecture, info.device) == (server.model, "LlamaForCausalLM", "cpu")
    assert info.version == own_version()
    assert (info.page_size, info.max_sequences, info.max_model_length) == (16, 256, 1024)
    assert info.dtype


def rows_of(answer: pb.ListRequestsResponse) -> list[tuple[str, str, int, int]]:
    return [(one.request_id, one.tenant, one.state, one.replica) for one in answer.requests]


def test_live_requests_are_listed_counted_and_ended(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel, grpc.insecure_channel(server.admin) as admin:
        stub, operator = server.stub(channel), pb_grpc.AdminServiceStub(admin)
        before = operator.GetLoad(pb.GetLoadRequest(), timeout=30).load
        calls = []
        for name in ("one", "two"):
            request = stream_request([5, 6, 7, 8], 900)
            request.request_id = name
            calls.append(stub.StreamGenerate(request, timeout=120))
            first = next(calls[-1])
            assert first.deltas[0].token_count >= 1
        listed = operator.ListRequests(pb.ListRequestsRequest(), timeout=30)
        assert rows_of(listed) == [(name, "default", pb.REQUEST_STATE_RUNNING, 0) for name in ("one", "two")]
        assert all(one.prompt_tokens == 4 and one.completion_tokens >= 1 for one in listed.requests)
        assert listed.requests[0].age.ToNanoseconds() > listed.requests[1].age.ToNanoseconds() > 0
        some = operator.ListRequests(pb.ListRequestsRequest(max_count=1), timeout=30)
        assert (len(some.requests), some.total_count) == (1, 2)
        load = operator.GetLoad(pb.GetLoadRequest(), timeout=30).load
        assert [(t.tenant, t.request_count, t.waiting_count) for t in load.tenants] == [("default", 2, 0)]
        assert load.request_count == sum(replica.request_count for replica in load.replicas) == 2
        assert load.prompt_tokens_total - before.prompt_tokens_total == 8
        assert load.first_tokens_total - before.first_tokens_total == 2
        assert load.first_token_time_total.ToNanoseconds() > before.first_token_time_total.ToNanoseconds()
        assert load.generation_tokens_total >= before.generation_tokens_total + 2
        operator.CancelRequest(pb.CancelRequestRequest(request_id="one"), timeout=30)
        *_, last = calls[0]
        assert [delta.finish_reason for delta in last.deltas] == [generation_pb.FINISH_REASON_ABORTED]
        assert last.usage.completion_tokens < 900
        with pytest.raises(grpc.RpcError) as raised:
            operator.CancelRequest(pb.CancelRequestRequest(request_id="one"), timeout=30)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError):
            operator.CancelRequest(pb.CancelRequestRequest(request_id="two", tenant="another"), timeout=30)
        assert [one.request_id for one in operator.ListRequests(pb.ListRequestsRequest()).requests] == ["two"]
        calls[1].cancel()
        server.wait_for_metric("quire_requests_total{aborted}", 1)


def test_the_load_is_told_again_and_again(server: RunningServer) -> None:
    with grpc.insecure_channel(server.admin) as admin:
        operator = pb_grpc.AdminServiceStub(admin)
        request = pb.WatchLoadRequest()
        request.interval.FromMilliseconds(100)
        watch = operator.WatchLoad(request, timeout=60)
        first, generated = next(watch).load, generate(server, 7).usage.completion_tokens
        while (load := next(watch).load).ended_requests_total == first.ended_requests_total:
            pass
        assert load.generation_tokens_total == first.generation_tokens_total + generated
        assert load.uptime.ToNanoseconds() > first.uptime.ToNanoseconds()
        watch.cancel()
        for interval in (1, 0, -1):
            request.interval.FromMilliseconds(interval)
            with pytest.raises(grpc.RpcError) as raised:
                next(operator.WatchLoad(request, timeout=30))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@contextmanager
def long_request(server: RunningServer) -> Iterator[Any]:
    """A stream that goes on for one command: on a busy machine it could have ended before a second one."""
    with grpc.insecure_channel(server.address) as channel:
        request = stream_request([5, 6, 7, 8], 900)
        request.request_id = "a-long-one"
        call = server.stub(channel).StreamGenerate(request, timeout=120)
        next(call)
        yield call


def test_command_line_lists_requests(server: RunningServer) -> None:
    with long_request(server):
        listed = json.loads(at_once(server, "requests", "--json"))["requests"]
    assert [(one["request_id"], one["state"]) for one in listed] == [("a-long-one", "REQUEST_STATE_RUNNING")]
    with long_request(server):
        table = at_once(server, "requests")
    assert "live requests" in table
    assert "a-long-one" in table


def test_command_line_ends_a_request(server: RunningServer) -> None:
    with long_request(server) as call:
        assert at_once(server, "cancel", "a-long") == "request a-long-one has ended\n"
        *_, last = call
        assert last.deltas[0].finish_reason == generation_pb.FINISH_REASON_ABORTED


def at_once(server: RunningServer, *arguments: str) -> str:
    """As `admin`, in this process: a request may have ended by the time that another one has started."""
    done = CliRunner().invoke(app, ["admin", *arguments, "--server", server.admin])
    assert done.exit_code == 0, done.output
    return done.stdout


def admin(server: RunningServer, *arguments: str) -> str:
    done = run_quire("admin", *arguments, "--server", server.admin, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_command_line_shows_the_map_and_resets(server: RunningServer) -> None:
    generate(server)

    shown, counted = admin(server, "page-map"), Counter(json.loads(admin(server, "page-map", "--json"))["states"])
    cached = counted["PAGE_STATE_CACHED"]
    assert f"⠿ cached {cached}" in shown
    assert shown.splitlines()[0].split()[1].count("⠿") == min(cached, 64) > 0
    assert admin(server, "reset-prefix-cache") == f"{cached} pages were forgotten\n"
    assert "⠿ cached 0" in admin(server, "page-map")


def test_admin_port_is_on_loopback_and_no_other_service_is_there(server: RunningServer) -> None:
    assert server.admin.startswith("127.0.0.1:")
    with grpc.insecure_channel(server.admin) as channel, pytest.raises(grpc.RpcError) as refused:
        server.stub(channel).Generate(generation_pb.GenerateRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_server_that_is_not_there_is_named() -> None:
    done = run_quire("admin", "page-map", "--server", "127.0.0.1:1", env=clean_environment())
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr
