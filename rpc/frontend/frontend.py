"""Between the services and the engines: makes a live request of what a client asks, sees it on its way and out again.

Lives on one asyncio loop, which an engine's thread wakes once a step. `rpc.frontend.dispatch` is what happens between.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cache_manager.page_names import DEFAULT_TENANT
from rpc.frontend.accounting import NO_TRACE, Accounting
from rpc.frontend.dispatch import Dispatch
from rpc.frontend.engine_client import EngineClient, EngineInfo
from rpc.frontend.errors import RequestFailed, internal, invalid
from rpc.frontend.live import Live
from rpc.frontend.pacing import Pacer
from rpc.frontend.prepare import Preparer
from rpc.frontend.promises import Promises
from rpc.frontend.quota import Quota
from rpc.frontend.replicas import Replica, Replicas
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import RequestStream
from rpc.frontend.watching import Ending, Watching
from rpc.frontend.workers import PrepareWorkers, PromptKind, kind_of
from rpc.observe.metrics import Metrics, Totals
from scheduler import events
from scheduler.engine import Sink
from scheduler.limits import Limits
from scheduler.request import InvalidRequest, Spec

T = TypeVar("T")

log = logging.getLogger("quire.frontend")


class Frontend:
    """Requests of one served model. `attach` an engine's client before the first request, further ones under numbers of
    their own, and a new one's under the number of one that was lost. secret: what all engines name their pages with.
    promises: how late answers come.

    Attributes:
        starting: The server is not ready: health says so, and requests are refused, whichever engines there are.
        draining: The same, as the server is about to end.
    """

    def __init__(
        self,
        preparer: Preparer,
        settings: FrontendSettings,
        metrics: Metrics,
        secret: bytes = b"",
        promises: Promises | None = None,
    ) -> None:
        self.preparer, self.settings, self._metrics = preparer, settings, metrics
        self.promises = promises or Promises()
        self.watching = Watching(preparer.name)
        self.accounting = Accounting(metrics, self.watching)
        self.starting = self.draining = False
        self.replicas = Replicas(secret)
        self.pacer = Pacer()
        self._dispatch = Dispatch(self.replicas, settings, metrics, self.promises, self.pacer)
        self._coming: dict[int, Replica] = {}
        self._loop = asyncio.get_running_loop()
        self._workers = PrepareWorkers(settings.tokenizer_threads, settings.max_preparing)
        self._requests: dict[tuple[str, str], Live | None] = {}  # by tenant and id; None: is being prepared
        self._image_memory = Quota(settings.image_memory, "bytes of images are held")
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(
            replicas=lambda: len(self.replicas.open),
            drained=lambda: sum(replica.drained for replica in self.replicas.attached),
            stalled=self._stalled_for,
            live=lambda: len(self._requests),
            parked=lambda: self._dispatch.parked,
        )

    # Engines

    def new_sink(self, number: int = 0, epoch: int | None = None) -> Sink:
        """For the next engine of this number, to be called on any thread: one wake-up of the loop a step. An engine
        that is replaced can still end its own requests, but its stats count no more. epoch: as another server counts.
        """
        replica = self._coming[number] = self.replicas.new(number, epoch)

        def sink(outputs: events.StepOutputs) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._dispatch.deliver, outputs, replica)

        return sink

    def attach(self, engine: EngineClient, number: int = 0, drained: bool | None = None) -> None:
        """From now on requests go to this engine too, unless it is drained; None: where it is one that took the place
        of a drained one.
        """
        replica = self._coming.pop(number, None) or self.replicas.new(number)
        replica.client = engine
        if drained is not None:
            replica.drained = drained
        self.replicas.attach(replica)
        self._metrics.engine_attached(engine.info.pages, number, engine.info.page_size)
        self._dispatch.look_at(replica)
        if replica.usable:
            self._dispatch.engine_came()

    def detach(self, number: int = 0) -> None:
        """The dead engine is let go of, with all that it holds."""
        self.replicas.detach(number)
        self._metrics.engine_gone(number)

    def drain_replica(self, number: int) -> int:
        """No new requests go to the engine of this number, and those that it has go elsewhere; how many. Raises
        RequestFailed where there is no such engine, or no other.
        """
        replica = self.serving(number)
        if not any(other is not replica for other in self.replicas.open):
            message = f"replica {number} is the only one that takes requests: they would have nowhere to go"
            raise RequestFailed("FAILED_PRECONDITION", "NO_OTHER_REPLICA", message)
        return self.mark(replica, drained=True, leaving=replica.leaving)

    def mark(self, replica: Replica, drained: bool, leaving: bool) -> int:
        """drained: for now. leaving: another engine takes its place. Either way nothing new goes there, and what it has
        goes elsewhere, or waits where there is no other; how many.
        """
        self.replicas.mark(replica, drained, leaving)
        if drained or leaving:
            return self._dispatch.move_from(replica)
        self._dispatch.engine_came()
        return 0

    async def until_moved(self) -> None:
        """Until nobody takes anything from an engine that was emptied: then it can end."""
        await self._dispatch.until_moved()

    def resume_replica(self, number: int) -> None:
        """Requests go to the engine of this number again. Raises RequestFailed where there is none."""
        replica = self.serving(number)
        self.mark(replica, drained=False, leaving=replica.leaving)

    def serving(self, number: int) -> Replica:
        """The engine of this number. Raises RequestFailed where there is none at the moment."""
        replica = self.replicas.get(number)
        if replica is None or not replica.usable:
            raise RequestFailed("NOT_FOUND", "NO_SUCH_REPLICA", f"there is no replica {number} at the moment")
        return replica

    async def engine_lost(self, number: int = 0) -> str:
        """Until the attached engine of this number is dead; why."""
        replica = self.replicas.get(number)
        if replica is None or replica.client is None:
            return "it is not there"
        await replica.lost.wait()
        return replica.client.failure or ""

    @property
    def info(self) -> EngineInfo:
        """What is true of all engines. Raises RequestFailed where there is none."""
        return self.replicas.info

    def limits(self, tenant: str) -> Limits:
        """Returns what a request may ask for.

        Raises:
            RequestFailed: There is no engine. Counted as a request of this tenant.
        """
        try:
            return self.info.limits
        except RequestFailed as failure:
            raise self.accounting.refused(failure, tenant) from None

    async def ask(self, question: events.Question, number: int) -> events.Answer:
        """An operator's question to the engine of this number. Raises RequestFailed where it does not answer."""
        replica = self.serving(number)
        if replica.client is None:
            raise RuntimeError("a usable replica has no client")
        return await replica.questions.ask(replica.client, question)

    def request_of(self, attempt: int) -> str:
        """The request that has this attempt, "" if it is none of this frontend's."""
        return self._dispatch.request_of(attempt)

    def health(self) -> bool:
        """Whether new requests can be expected to be served: an engine lives and, if it has work, makes progress."""
        if self.starting or self.draining:
            return False
        takes = (replica.client for replica in self.replicas.open)
        return any(client is not None and client.stalled_for() < self.settings.stall_timeout for client in takes)

    def _stalled_for(self) -> float:
        """Seconds, of the engine that has waited longest. On any thread."""
        clients = [replica.client for replica in self.replicas.attached]
        return max((client.stalled_for() for client in clients if client is not None), default=0.0)

    # Requests

    @property
    def live_requests(self) -> int:
        return len(self._requests)

    @property
    def totals(self) -> Totals:
        """What has been counted since the start."""
        return self._metrics.totals

    @property
    def requests(self) -> Mapping[tuple[str, str], Live | None]:
        """Live ones by tenant and id, oldest first; None: it is being prepared."""
        return self._requests

    def replica_of(self, live: Live) -> Replica | None:
        """The engine that has it."""
        return self._dispatch.place_of(live)

    def abort(self, tenant: str, request_id: str) -> None:
        """Ends a live request with what there is of it. Raises RequestFailed where it is not there."""
        live = self._requests.get((tenant, request_id))
        if live is not None:
            self._dispatch.abort(live)
            return
        message = f"{tenant!r} has no live request {request_id!r}"
        if (tenant, request_id) in self._requests:
            message = f"request {request_id!r} of {tenant!r} is still being tokenized: try again"
        raise RequestFailed("NOT_FOUND", "NO_SUCH_REQUEST", message)

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()

    @asynccontextmanager
    async def open(
        self,
        spec: Spec,
        request_id: str,
        time_remaining: float | None,
        streaming: bool = True,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> AsyncIterator[Live]:
        """A live request; leaving the context ends it in the engine if it has not ended.

        time_remaining: seconds until the caller's own deadline. streaming: the caller takes output as it comes, and is
        too slow if much of it waits. trace: W3C headers of the call. Raises RequestFailed.
        """
        with self.watching.watch(spec, request_id, trace) as ending:
            async with self._open(spec, request_id, time_remaining, streaming, trace, ending) as live:
                yield live

    @asynccontextmanager
    async def _open(
        self,
        spec: Spec,
        request_id: str,
        time_remaining: float | None,
        streaming: bool,
        trace: Mapping[str, str],
        ending: Ending,
    ) -> AsyncIterator[Live]:
        live_id = spec.tenant, request_id
        if live_id in self._requests:
            message = f"{request_id!r} is being served"
            raise self.accounting.refused(RequestFailed("ALREADY_EXISTS", "REQUEST_ID_LIVE", message), spec.tenant)
        self._requests[live_id] = None
        self._idle.clear()
        failure: RequestFailed | None = None
        try:
            live = await self._submit(spec, request_id, time_remaining, streaming, ending.began)
            self._requests[live_id] = ending.live = live
            try:
                yield live
            except Exception as error:
                failure = error if isinstance(error, RequestFailed) else internal()
                raise
            finally:
                ending.outcome = self._close(live, failure, trace)
        finally:
            del self._requests[live_id]
            if not self._requests:
                self._idle.set()

    async def _submit(
        self, spec: Spec, request_id: str, time_remaining: float | None, streaming: bool, started: float
    ) -> Live:
        stream, names = await self._prepare(spec)
        now = time.monotonic()
        spent = now - started
        patience = [t - spent for t in (stream.request.patience, time_remaining) if t is not None]
        stream.request = replace(stream.request, patience=max(0.0, min(patience)) if patience else None)
        self._check_image_memory(stream.request.image_bytes, spec.tenant)
        live = Live(stream, request_id, started, streaming, names)
        live.patience = None if stream.request.patience is None else now + stream.request.patience
        if stream.ended:  # its output prefix has a stop string
            live.tell()
        else:
            most = self.settings.request_time
            seconds = most if spec.max_time is None else min(spec.max_time, most)
            try:
                self._dispatch.submit(live, seconds - spent)
            except RequestFailed as failure:
                raise self.accounting.refused(failure, spec.tenant) from None
        self._image_memory.take(spec.tenant, stream.request.image_bytes)
        return live

    def _check_image_memory(self, size: int, tenant: str) -> None:
        """Raises RequestFailed, counted."""
        most = self.settings.image_memory // (1 if tenant == DEFAULT_TENANT else 2)
        try:
            if size > most:
                raise invalid(InvalidRequest("images", f"{size} bytes in memory", f"at most {most} bytes"))
            if size:
                self._image_memory.check(tenant, size)
        except RequestFailed as failure:
            raise self.accounting.refused(failure, tenant) from None

    async def _prepare(self, spec: Spec) -> tuple[RequestStream, list[bytes]]:
        """Tokenizes, validates, reads the output prefix and names the prompt's pages, in a worker thread. Raises
        RequestFailed.
        """
        try:
            with self.accounting.counting_cancel(spec.tenant):
                kind = kind_of(spec)
                return await self.in_worker(lambda limits: self._make_stream(spec, limits), kind, spec.tenant)
        except RequestFailed as failure:
            raise self.accounting.refused(failure, spec.tenant) from None
        except Exception:
            self.accounting.refused(internal(), spec.tenant)
            raise

    def _make_stream(self, spec: Spec, limits: Limits) -> tuple[RequestStream, list[bytes]]:
        request = self.preparer.prepare(spec, limits)
        return RequestStream(spec, request, self.preparer.tokenizer), self.replicas.names_of(request)

    async def in_worker(
        self, task: Callable[[Limits], T], kind: PromptKind = PromptKind.TEXT, tenant: str = DEFAULT_TENANT
    ) -> T:
        """Runs what takes a while in a thread beside the loop.

        Args:
            task: Gets what a request may ask for.
            kind: Of the prompt that it prepares.
            tenant: Whose place it takes.

        Raises:
            RequestFailed: No engine is attached, the server starts or drains, or too much waits.
            Exception: What `task` raises.
        """
        if self.draining:
            raise RequestFailed("UNAVAILABLE", "DRAINING", "the server is shutting down", retry_after=1.0)
        if self.starting:
            raise RequestFailed("UNAVAILABLE", "STARTING", "the server loads its model", retry_after=1.0)
        limits = self.info.limits
        return await self._workers.run(partial(task, limits), kind, tenant)

    def _close(self, live: Live, failure: RequestFailed | None, trace: Mapping[str, str]) -> str:
        """Takes the request out, served or not.

        Args:
            live: The request, which its caller is done with.
            failure: The caller's own failure.
            trace: W3C headers of the call.

        Returns:
            The outcome, as the metrics count it.
        """
        self._image_memory.give_back(live.stream.spec.tenant, live.stream.request.image_bytes)
        if live.timer is not None:
            live.timer.cancel()
        self._dispatch.forget(live)
        return self.accounting.ended(live, failure, trace)

    def close(self) -> None:
        """Engines are ended from now on: their requests end with them."""
        self._dispatch.close()

    def shutdown(self) -> None:
        """Nothing is prepared any more."""
        self._workers.shutdown()
        self.preparer.close()
