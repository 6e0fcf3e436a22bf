"""AdminService of real servers: the page map adds up, names who holds what, and a reset forgets what was cached."""

import asyncio
import json
import subprocess
from collections import Counter

import grpc
import pytest
from grpc import aio
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc
from quire.v1 import generation_service_pb2 as generation_pb
from quire.v1 import generation_service_pb2_grpc as generation_grpc

from tests.support.server import QUIRE, RunningServer, clean_environment, running_server, stream_request

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
    assert server.metrics()['quire_kv_pages_evicted_total{cause="reset",}'] >= full


def test_running_requests_are_named_with_their_pages_and_outlive_a_reset(server: RunningServer) -> None:
    async def look() -> tuple[pb.GetPageMapResponse, list[int], list[int]]:
        async with aio.insecure_channel(server.address) as channel, aio.insecure_channel(server.admin) as admin:
            stub, operator = generation_grpc.GenerationServiceStub(channel), pb_grpc.AdminServiceStub(admin)
            request = stream_request(PROMPT, 150, temperature=1, seed=3)
            alone = [t async for m in stub.StreamGenerate(request) for d in m.deltas for t in d.token_ids]
            await operator.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            request.request_id = "looked-at"
            call = stub.StreamGenerate(request)
            tokens, pages = list[int](), pb.GetPageMapResponse()
            async for message in call:
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


def test_command_line_shows_the_map_and_resets(server: RunningServer) -> None:
    generate(server)

    def admin(*arguments: str) -> str:
        command = [QUIRE, "admin", *arguments, "--server", server.admin]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=True)
        return done.stdout

    shown, counted = admin("page-map"), Counter(json.loads(admin("page-map", "--json"))["states"])
    cached = counted["PAGE_STATE_CACHED"]
    assert f"o cached {cached}" in shown
    assert shown.splitlines()[0].split()[1].count("o") == min(cached, 64) > 0
    assert admin("reset-prefix-cache") == f"{cached} pages were forgotten\n"
    assert "o cached 0" in admin("page-map")


def test_admin_port_is_on_loopback_and_no_other_service_is_there(server: RunningServer) -> None:
    assert server.admin.startswith("127.0.0.1:")
    with grpc.insecure_channel(server.admin) as channel, pytest.raises(grpc.RpcError) as refused:
        server.stub(channel).Generate(generation_pb.GenerateRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_server_that_is_not_there_is_named() -> None:
    command = [QUIRE, "admin", "page-map", "--server", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr
