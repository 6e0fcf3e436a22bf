"""The engines of another server, used from this process. The server's table lists them and their addresses."""

import asyncio
import logging
from dataclasses import dataclass, field

import grpc
from grpc import aio
from quire.engine.v1 import table_service_pb2 as pb
from quire.engine.v1 import table_service_pb2_grpc as pb_grpc

from rpc.engines.fleet import log_failure
from rpc.frontend.engine_client import Reach
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.link.client import OPTIONS, LinkClient
from rpc.link.proof import StrangerError, TokenProof
from rpc.settings import JoinSettings
from scheduler.settings import RequestLimits

log = logging.getLogger("quire.engines")

PAUSE = 1.0  # seconds between two attempts to reach the server, or an engine
CONNECT_SECONDS = 10.0
KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]


class JoinError(ValueError):
    """The server's engines are not for this frontend; the message has the cause."""


@dataclass(slots=True, eq=False)
class TableEngine:
    """An engine of the server's table, in the state of the last table.

    Attributes:
        number: Place among the server's engines.
        epoch: Epoch of the engine, as the server counts.
        reach: Address of its link.
        place: Process or machine that it runs on, for people.
        drained: An operator of the server keeps new requests from it.
        leaving: It is about to end.
        task: Task that keeps a link to it.
    """

    number: int
    epoch: int
    reach: Reach
    place: str
    drained: bool = False
    leaving: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class JoinedEngines:
    """`Fleet` of another server's engines. When that server ends, requests wait for one that takes its place.

    Args:
        settings: Address of the server, and times.
        token: Secret of the server's table.
        request: Bounds of one request, for the links.
        model: Digest of the model's files that this process has read; the server's has to be equal.
        frontend: Frontend that gets the engines.

    Attributes:
        trouble: Reason why the server cannot be followed at the moment; "" while it can.
    """

    def __init__(
        self, settings: JoinSettings, token: str, request: RequestLimits, model: bytes, frontend: Frontend
    ) -> None:
        self._settings, self._request, self._model, self._frontend = settings, request, model, frontend
        self._token = token
        self._engines: dict[int, TableEngine] = {}
        self._served = asyncio.Event()
        self.trouble = ""
        self._follower: asyncio.Task[None] | None = None

    @property
    def summary(self) -> str:
        return f"engines of {self._settings.join}"

    async def start(self) -> None:
        """Follows the server's table; returns once an engine serves.

        Raises:
            JoinError: The server refuses this frontend, or has another model.
            OSError: No engine could be reached in time.
        """
        self._follower = asyncio.create_task(self._follow())
        served = asyncio.create_task(self._served.wait())
        seconds = self._settings.start
        await asyncio.wait((self._follower, served), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        if self._follower.done():
            self._follower.result()
        if not self._served.is_set():
            raise OSError(f"no engine of the server at {self._settings.join} could be reached within {seconds:g} s")
        self._follower.add_done_callback(log_failure)

    async def stop(self) -> None:
        self._frontend.close()
        tasks = [engine.task for engine in self._engines.values() if engine.task is not None]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drain(self, number: int) -> int:
        raise self._foreign(number)

    def resume(self, number: int) -> None:
        raise self._foreign(number)

    async def restart(self, number: int) -> int:
        raise self._foreign(number)

    def _foreign(self, number: int) -> RequestFailed:
        message = f"replica {number} is an engine of the server at {self._settings.join}: ask that one"
        return RequestFailed("FAILED_PRECONDITION", "NOT_ITS_REPLICA", message)

    async def _follow(self) -> None:
        """Follows the server's table for ever, reconnects included.

        Raises:
            JoinError: The server refuses this frontend, and no engine was ever reached. Later it is a warning only.
        """
        while True:
            try:
                await self._watch_table()
                why = "it has hung up"
            except asyncio.InvalidStateError:  # it hung up while a table was acted upon
                why = "it has hung up"
            except aio.AioRpcError as error:
                why = f"{error.code().name.lower()}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and not self._served.is_set():
                    raise JoinError(f"the server at {self._settings.join} refuses this frontend: {why}") from None
            except JoinError as error:
                if not self._served.is_set():
                    raise
                why = str(error)
            except Exception as error:  # one table that cannot be applied is no reason to miss the next ones
                log.exception("the table of engines of the server at %s cannot be applied", self._settings.join)
                why = f"{type(error).__name__}: {error}"
            if why != self.trouble:
                log.warning("the server at %s cannot be followed, trying again: %s", self._settings.join, why)
                self.trouble = why
            await asyncio.sleep(PAUSE)

    async def _watch_table(self) -> None:
        """Applies the server's tables until it hangs up.

        Raises:
            AioRpcError: The call failed.
            JoinError: The server cannot prove that it has the token, or has another model.
        """
        async with aio.insecure_channel(self._settings.join, options=[*OPTIONS, *KEEPALIVE]) as channel:
            proof = TokenProof(self._token)
            call = pb_grpc.TableServiceStub(channel).Watch(metadata=proof.metadata)
            try:
                await proof.check(call)
            except StrangerError as error:
                raise JoinError(f"{error} of --join-token-file") from None
            while isinstance(table := await call.read(), pb.WatchResponse):
                await self._apply(table)
                self.trouble = ""
                # The server may wait for this answer: an engine that leaves ends once all frontends have applied it.
                await call.write(pb.WatchRequest(version=table.version))

    async def _apply(self, table: pb.WatchResponse) -> None:
        """Links to new engines of the table, drops those that are gone, and marks those that changed.

        Raises:
            JoinError: The server has another model.
        """
        if table.model != self._model:
            raise JoinError(
                f"the server at {self._settings.join} serves a model that has another configuration, tokenizer or chat "
                "template than --model here"
            )
        self._frontend.replicas.secret = table.secret
        wanted = {entry.number: entry for entry in table.engines}
        await self._drop(
            [
                engine
                for number, engine in self._engines.items()
                if number not in wanted or engine.reach != _reach(wanted[number])
            ]
        )
        for number in [replica.number for replica in self._frontend.replicas.newest]:
            if number not in wanted:
                self._frontend.replicas.retire(number)
        leaves = False
        for entry in table.engines:
            engine = self._engines.get(entry.number)
            if engine is None:
                engine = TableEngine(
                    entry.number, entry.epoch, _reach(entry), entry.place, entry.drained, entry.leaving
                )
                self._engines[entry.number] = engine
                engine.task = asyncio.create_task(self._keep(engine))
                engine.task.add_done_callback(log_failure)
            elif (engine.drained, engine.leaving) != (entry.drained, entry.leaving):
                engine.drained, engine.leaving = entry.drained, entry.leaving
                replica = self._frontend.replicas.get(entry.number)
                if replica is not None:
                    self._frontend.mark(replica, entry.drained, entry.leaving)
                    leaves = leaves or entry.leaving
        if leaves:
            await self._frontend.until_moved()  # the engine ends once the server has the answer to this table

    async def _drop(self, gone: list[TableEngine]) -> None:
        tasks = [engine.task for engine in gone if engine.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in gone:
            del self._engines[engine.number]

    async def _keep(self, engine: TableEngine) -> None:
        """Keeps a link to the engine, until cancelled."""
        said = ""
        while True:
            why = await self._serve_with(engine)
            if why != said:  # an engine that stays away needs no line a second
                log.warning("engine %d cannot be used, trying again: %s", engine.number, why)
                said = why
            await asyncio.sleep(PAUSE)

    async def _serve_with(self, engine: TableEngine) -> str:
        """Serves with an engine until it is lost, and returns the reason."""
        frontend, sink = self._frontend, self._frontend.new_sink(engine.number, engine.epoch)
        client = LinkClient(engine.reach, sink, self._request, self._settings.silence, engine.place)
        try:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await client.connect()
            except TimeoutError:
                here = ", which only its own machine reaches" if engine.reach.address.startswith("unix") else ""
                return f"no engine answers at {engine.reach.address}{here}"
            except ConnectionError as error:
                return str(error)
            log.info("engine %d (%s) takes requests", engine.number, engine.place)
            frontend.attach(client, engine.number, drained=engine.drained or engine.leaving)
            self._served.set()
            return await frontend.engine_lost(engine.number)
        finally:
            frontend.detach(engine.number)
            await client.close()


def _reach(entry: pb.TableEntry) -> Reach:
    return Reach(entry.address, entry.token)
