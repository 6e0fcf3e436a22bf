"""Both ends of a call prove to each other that they know a token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb

from rpc.frontend.engine_client import Reach
from rpc.link.client import LinkClient
from rpc.link.proof import NONCE, PROOF, TokenProof, answer_to
from rpc.link.server import LinkService
from scheduler.settings import RequestLimits
from tests.support.links import Heard, MortalEngine, Scripted, serving

TOKEN = "a token"  # noqa: S105 - of these tests


@asynccontextmanager
async def client_of(address: str, token: str) -> AsyncIterator[LinkClient]:
    client = LinkClient(Reach(address, token), Heard(), RequestLimits(), 10.0)
    try:
        yield client
    finally:
        await client.close()


def test_the_token_is_never_said() -> None:
    called = dict(TokenProof(TOKEN).metadata)
    assert called.keys() == {NONCE, PROOF}
    answered = answer_to(TOKEN, called)
    assert answered is not None
    assert TOKEN not in " ".join([*called.values(), *dict(answered).values()])
    assert dict(answered)[PROOF] != called[PROOF], "else who answers could send back what it got"


@pytest.mark.parametrize(
    "called",
    [
        {},
        dict(TokenProof("another").metadata),
        {**dict(TokenProof(TOKEN).metadata), NONCE: "0" * 32},
        {PROOF: "\xff", NONCE: ""},
    ],
)
def test_callers_without_it_are_refused(called: dict[str, str]) -> None:
    assert answer_to(TOKEN, called) is None


async def test_both_are_let_in(tmp_path: Path) -> None:
    service = LinkService(TOKEN)
    service.attach(MortalEngine(service.sink))
    async with serving(service, tmp_path) as (address, _), client_of(address, TOKEN) as client:
        await client.connect()
        assert client.failure is None


@pytest.mark.parametrize("echoes", [False, True])
async def test_a_stranger_in_an_engines_place_learns_nothing_and_is_not_believed(tmp_path: Path, echoes: bool) -> None:
    heard: list[dict[str, str]] = []

    async def stranger(_requests: AsyncIterator[pb.ConnectRequest], context: aio.ServicerContext) -> None:
        heard.append(dict(context.invocation_metadata() or ()))
        if echoes:
            await context.send_initial_metadata(((PROOF, heard[0][PROOF]),))
        await context.write(pb.ConnectResponse(info=pb.EngineInfo(vocabulary=7)))
        await asyncio.sleep(60)

    async with serving(Scripted(stranger), tmp_path) as (address, _), client_of(address, TOKEN) as client:
        with pytest.raises(ConnectionError, match="the peer does not know the token"):
            await client.connect()
    assert TOKEN not in str(heard)


async def test_a_refused_caller_hears_why(tmp_path: Path) -> None:
    service = LinkService(TOKEN)
    service.attach(MortalEngine(service.sink))
    async with serving(service, tmp_path) as (address, _), client_of(address, "wrong") as client:
        with pytest.raises(ConnectionError, match="has no token of"):
            await client.connect()


async def test_an_engine_reads_nothing_of_who_shows_no_token(tmp_path: Path) -> None:
    async with serving(LinkService(TOKEN), tmp_path) as (address, _), aio.insecure_channel(address) as channel:
        pages = channel.stream_stream("/quire.engine.v1.EngineService/Pages", bytes, bytes)
        call = pages()
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()  # nothing was sent yet
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
