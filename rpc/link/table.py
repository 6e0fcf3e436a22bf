"""The table of a server's engines, for frontends in other processes: each gets it whenever it changes."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
from grpc import aio
from quire.engine.v1 import table_service_pb2 as pb
from quire.engine.v1 import table_service_pb2_grpc as pb_grpc

from rpc.frontend.replicas import Replica, Replicas
from rpc.link import LISTENING
from rpc.link.proof import answer_to
from rpc.ports import check_free, check_path_free

FLAG = "--join-address"

PINGS = [
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),  # tables change rarely, so frontends ping to see that the server lives
]
SETTLE_SECONDS = 5.0  # time in which frontends apply a table


class TableService(pb_grpc.TableServiceServicer):
    """quire.engine.v1.TableService.

    Args:
        replicas: The server's engines.
        address: unix:PATH, which only this user can open, or HOST:PORT.
        token: Secret that frontends have to prove; "" for none.
        model: Digest of the model's files; frontends compare it with their own.

    Attributes:
        acknowledged: Version that each connected frontend has applied.
    """

    def __init__(self, replicas: Replicas, address: str, token: str, model: bytes) -> None:
        self._replicas, self._address, self._model = replicas, address, model
        self._token = token
        self.acknowledged: dict[object, int] = {}
        self._changed = asyncio.Event()
        self._server: aio.Server | None = None

    async def open(self) -> None:
        """Starts to serve the table. Raises OSError where it cannot listen."""
        server = aio.server(options=[*LISTENING, *PINGS])
        pb_grpc.add_TableServiceServicer_to_server(self, server)
        mask = os.umask(0o177)  # so that the socket's file is this user's alone from its first moment
        try:
            self._listen(server)
        finally:
            os.umask(mask)
        self._server = server
        await server.start()

    def _listen(self, server: aio.Server) -> None:
        """Opens the address on the server. Raises OSError where it is taken or cannot be opened."""
        if self._address.startswith("unix:"):
            check_path_free(FLAG, Path(self._address.removeprefix("unix:")))
        else:
            host, _, port = self._address.rpartition(":")
            check_free(FLAG, host.strip("[]"), int(port))
        try:
            server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"{FLAG} {self._address} cannot be opened: {error}") from None

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def settled(self) -> None:
        """Waits until all frontends have applied the table as it is now, but at most SETTLE_SECONDS."""
        version = self._replicas.version
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while any(done < version for done in self.acknowledged.values()):
                    self._changed.clear()
                    await self._changed.wait()

    async def Watch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: aio.ServicerContext
    ) -> None:
        answer = answer_to(self._token, dict(context.invocation_metadata() or ()))
        if answer is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "these engines need their server's token")
        await context.send_initial_metadata(answer)
        frontend = object()
        reader = asyncio.create_task(self._read(request_iterator, frontend))
        try:
            while not reader.done():
                version = self._replicas.version
                self.acknowledged.setdefault(frontend, version - 1)  # a new frontend has yet to apply this version
                await context.write(self._table(version))
                newer = asyncio.create_task(self._replicas.wait_newer(version))
                await asyncio.wait((newer, reader), return_when=asyncio.FIRST_COMPLETED)
                newer.cancel()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self.acknowledged.pop(frontend, None)
            self._changed.set()

    async def _read(self, requests: AsyncIterator[pb.WatchRequest], frontend: object) -> None:
        async for message in requests:
            self.acknowledged[frontend] = message.version
            self._changed.set()

    def _table(self, version: int) -> pb.WatchResponse:
        replicas = sorted(self._replicas, key=lambda replica: replica.number)
        engines = [entry for replica in replicas if (entry := _entry(replica)) is not None]
        return pb.WatchResponse(version=version, secret=self._replicas.secret, model=self._model, engines=engines)


def _entry(replica: Replica) -> pb.TableEntry | None:
    """Returns an engine's entry of the table; None where other processes cannot reach it."""
    if not replica.usable or replica.client is None or replica.client.reach is None:
        return None
    reach = replica.client.reach
    return pb.TableEntry(
        number=replica.number,
        epoch=replica.epoch,
        address=reach.address,
        token=reach.token,
        place=replica.client.place,
        drained=replica.drained,
        leaving=replica.leaving,
    )
