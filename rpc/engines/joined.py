"""The engines of another server, used from this process: its table says which there are and where."""

import asyncio
import logging
from dataclasses import dataclass, field

import grpc
from grpc import aio
from quire.engine.v1 import table_service_pb2 as pb
from quire.engine.v1 import table_service_pb2_grpc as pb_grpc

from rpc.engines.fleet import say_why
from rpc.frontend.engine_client import Reach
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.link.client import OPTIONS, LinkClient
from rpc.link.proof import Caller, StrangerError
from rpc.settings import JoinSettings
from scheduler.settings import RequestLimits

log = logging.getLogger("quire.engines")

PAUSE = 1.0  # seconds between two attempts to reach the server, or an engine
CONNECT_SECONDS = 10.0
KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]


class JoinError(ValueError):
    """The server's engines are not for this frontend; says why."""


@dataclass(slots=True, eq=False)
class Kept:
    """An engine of the table, as it was last told of. task: keeps a link to it."""

    number: int
    epoch: int
    reach: Reach
    place: str
    drained: bool = False
    leaving: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class JoinedEngines:
    """`Fleet` of another server's engines. model: digest of what this process has of the model. Where that server ends,
    requests wait for one that takes its place, as they do for any engine.
    """

    def __init__(
        self, settings: JoinSettings, token: str, request: RequestLimits, model: bytes, frontend: Frontend
    ) -> None:
        self._settings, self._request, self._model, self._frontend = settings, request, model, frontend
        self._token = token
        self._kept: dict[int, Kept] = {}
        self._served = asyncio.Event()
        self._said = ""
        self._follower: asyncio.Task[None] | None = None

    @property
    def summary(self) -> str:
        return f"engines of {self._settings.join}"

    async def start(self) -> None:
        """Raises JoinError where the server refuses this frontend or has another model, OSError where no engine could
        be reached in time.
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
        self._follower.add_done_callback(say_why)

    async def stop(self) -> None:
        self._frontend.close()
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drain(self, number: int) -> int:
        raise self._not_ours(number)

    def resume(self, number: int) -> None:
        raise self._not_ours(number)

    async def restart(self, number: int) -> int:
        raise self._not_ours(number)

    def _not_ours(self, number: int) -> RequestFailed:
        message = f"replica {number} is an engine of the server at {self._settings.join}: ask that one"
        return RequestFailed("FAILED_PRECONDITION", "NOT_ITS_REPLICA", message)

    async def _follow(self) -> None:
        """The server's table, whatever becomes of the server. Raises JoinError before any engine was reached."""
        while True:
            try:
                await self._watch()
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
            except Exception as error:  # one table, say, is not the last one
                log.exception("the engines of the server at %s cannot be taken in", self._settings.join)
                why = f"{type(error).__name__}: {error}"
            if why != self._said:
                log.warning("the server at %s cannot be followed, trying again: %s", self._settings.join, why)
                self._said = why
            await asyncio.sleep(PAUSE)

    async def _watch(self) -> None:
        """Until the server hangs up. Raises AioRpcError, JoinError."""
        async with aio.insecure_channel(self._settings.join, options=[*OPTIONS, *KEEPALIVE]) as channel:
            caller = Caller(self._token)
            call = pb_grpc.TableServiceStub(channel).Watch(metadata=caller.metadata)
            try:
                await caller.check(call)
            except StrangerError as error:
                raise JoinError(f"{error} of --join-token-file") from None
            while isinstance(table := await call.read(), pb.WatchResponse):
                await self._apply(table)
                self._said = ""
                await call.write(pb.WatchRequest(version=table.version))

    async def _apply(self, table: pb.WatchResponse) -> None:
        """Does what the table asks for. Raises JoinError."""
        if table.model != self._model:
            raise JoinError(
                f"the server at {self._settings.join} serves a model that has another configuration, tokenizer or chat "
                "template than --model here"
            )
        self._frontend.replicas.secret = table.secret
        wanted = {entry.number: entry for entry in table.engines}
        await self._let_go(
            [
                kept
                for number, kept in self._kept.items()
                if number not in wanted or kept.reach != _reach(wanted[number])
            ]
        )
        for number in [replica.number for replica in self._frontend.replicas.newest]:
            if number not in wanted:
                self._frontend.replicas.retire(number)
        leaves = False
        for entry in table.engines:
            kept = self._kept.get(entry.number)
            if kept is None:
                kept = Kept(entry.number, entry.epoch, _reach(entry), entry.place, entry.drained, entry.leaving)
                self._kept[entry.number] = kept
                kept.task = asyncio.create_task(self._keep(kept))
                kept.task.add_done_callback(say_why)
            elif (kept.drained, kept.leaving) != (entry.drained, entry.leaving):
                kept.drained, kept.leaving = entry.drained, entry.leaving
                replica = self._frontend.replicas.get(entry.number)
                if replica is not None:
                    self._frontend.mark(replica, entry.drained, entry.leaving)
                    leaves = leaves or entry.leaving
        if leaves:
            await self._frontend.until_moved()  # it ends then

    async def _let_go(self, gone: list[Kept]) -> None:
        tasks = [kept.task for kept in gone if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for kept in gone:
            del self._kept[kept.number]

    async def _keep(self, kept: Kept) -> None:
        """A link to the engine, until cancelled."""
        said = ""
        while True:
            why = await self._use(kept)
            if why != said:  # a place where nobody is needs no line a second
                log.warning("engine %d cannot be used, trying again: %s", kept.number, why)
                said = why
            await asyncio.sleep(PAUSE)

    async def _use(self, kept: Kept) -> str:
        """Until the engine is lost. Returns why."""
        frontend, sink = self._frontend, self._frontend.new_sink(kept.number, kept.epoch)
        client = LinkClient(kept.reach, sink, self._request, self._settings.silence, kept.place)
        try:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await client.connect()
            except TimeoutError:
                here = ", which only its own machine reaches" if kept.reach.address.startswith("unix") else ""
                return f"nobody answers at {kept.reach.address}{here}"
            except ConnectionError as error:
                return str(error)
            log.info("engine %d (%s) takes requests", kept.number, kept.place)
            frontend.attach(client, kept.number, drained=kept.drained or kept.leaving)
            self._served.set()
            return await frontend.engine_lost(kept.number)
        finally:
            frontend.detach(kept.number)
            await client.close()


def _reach(entry: pb.TableEntry) -> Reach:
    return Reach(entry.address, entry.token)
