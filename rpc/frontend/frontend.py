"""The entry of requests: opens a request of a client's `Spec`, and accounts for its end.

Lives on one asyncio loop, which an engine's thread wakes once a step. `rpc.frontend.intake` submits requests,
`rpc.frontend.dispatch` has them between submission and end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.frontend.accounting import NO_TRACE, Accounting
from rpc.frontend.dispatch import Dispatch
from rpc.frontend.engine_client import EngineClient, EngineInfo
from rpc.frontend.errors import RequestFailed, internal
from rpc.frontend.intake import RequestIntake
from rpc.frontend.live import Live
from rpc.frontend.pacing import Pacer
from rpc.frontend.prepare import Preparer
from rpc.frontend.replicas import Replica, Replicas
from rpc.frontend.reporting import RequestEnd, RequestReporter
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.slo import SLOTracker
from rpc.frontend.stream import RequestStream
from rpc.frontend.workers import PrepareWorkers, PromptKind, kind_of
from rpc.observe.metrics import Metrics, Totals
from scheduler import events
from scheduler.engine import Sink
from scheduler.limits import Limits
from scheduler.spec import Spec

T = TypeVar("T")


class Frontend:
    """Serves the requests of one model.

    `attach` the client of an engine before the first request. Each further engine has a number of its own; an engine
    that replaces a lost one has the number of the lost one. All methods run on the loop, except where they say
    otherwise.

    Args:
        preparer: Turns a `Spec` into an engine's `Request`.
        settings: Times, and bounds of what clients may hold.
        metrics: Gets the counts.
        secret: Key of the engines' block hashes. Empty: prompts are not routed by their cached prefixes.
        slo: Gets the times to first and next tokens. None: a tracker without objectives.

    Attributes:
        starting: The server is not ready. `health` is false and requests are refused, whichever engines are attached.
        draining: The server is about to end. `health` is false and requests are refused.
        reporter: Reports requests that have ended; observers are added to it.
        replicas: Engines that requests can go to.
        dispatch: Live requests and the engines that they are on.
        pacer: Runs large work on the loop in short turns.
    """

    def __init__(
        self,
        preparer: Preparer,
        settings: FrontendSettings,
        metrics: Metrics,
        secret: bytes = b"",
        slo: SLOTracker | None = None,
    ) -> None:
        self.preparer, self.settings, self.metrics = preparer, settings, metrics
        self.slo = slo or SLOTracker()
        self.reporter = RequestReporter(preparer.name)
        self.accounting = Accounting(metrics, self.reporter)
        self.starting = self.draining = False
        self.replicas = Replicas(secret)
        self.pacer = Pacer()
        self.dispatch = Dispatch(self.replicas, settings, metrics, self.slo, self.pacer)
        self._starting: dict[int, Replica] = {}
        self._loop = asyncio.get_running_loop()
        self._workers = PrepareWorkers(settings.tokenizer_threads, settings.max_preparing)
        self._requests: dict[tuple[str, str], Live | None] = {}  # by tenant and id; None: in preparation
        self._intake = RequestIntake(self._prepare, self.dispatch, self.accounting, settings)
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(
            replicas=lambda: len(self.replicas.open),
            drained=lambda: sum(replica.drained for replica in self.replicas.attached),
            stalled=self.replicas.stalled_for,
            live=lambda: len(self._requests),
            parked=lambda: self.dispatch.parked,
        )

    # Engines

    def new_replica(self, number: int = 0, epoch: int | None = None) -> Replica:
        """Enters an engine that is about to start; `attach` completes it.

        Args:
            number: Place of the engine. It succeeds an earlier engine of the same number.
            epoch: The engine's epoch as its owner, another server, counts; None: the next one of this place.
        """
        replica = self._starting[number] = self.replicas.new(number, epoch)
        return replica

    def new_sink(self, number: int = 0, epoch: int | None = None) -> Sink:
        """Returns the sink for the outputs of an engine that is about to start; Args are those of `new_replica`.

        The sink may be called on any thread, and wakes the loop once a step. An engine that was replaced can still end
        its own requests through its sink, but its stats count no more.
        """
        replica = self.new_replica(number, epoch)

        def sink(outputs: events.StepOutputs) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no request is left that waits for the outputs
                self._loop.call_soon_threadsafe(self.dispatch.deliver, outputs, replica)

        return sink

    def attach(self, engine: EngineClient, number: int = 0, drained: bool | None = None) -> None:
        """Sends requests to this engine too, unless it is drained.

        Args:
            engine: Client of the engine.
            number: Place of the engine.
            drained: No new requests go there. None: true if the engine succeeds one that died drained.
        """
        replica = self._starting.pop(number, None) or self.replicas.new(number)
        replica.client = engine
        if drained is not None:
            replica.drained = drained
        self.replicas.attach(replica)
        self.metrics.engine_attached(engine.info.pages, number, engine.info.page_size)
        self.dispatch.check_alive(replica)
        if replica.usable:
            self.dispatch.engine_available()

    def detach(self, number: int = 0) -> None:
        """Removes a dead engine from the replicas and from the metrics."""
        self.replicas.detach(number)
        self.dispatch.time_quarantined()
        self.metrics.engine_gone(number)

    def drain_replica(self, number: int) -> int:
        """Drains the engine of this number: new requests and those that it has go to other engines.

        Returns:
            Count of requests that move.

        Raises:
            RequestFailed: The engine is not usable, or no other engine takes requests.
        """
        replica = self.serving(number)
        if not any(other is not replica for other in self.replicas.open):
            message = f"replica {number} is the only one that takes requests: they would have nowhere to go"
            raise RequestFailed("FAILED_PRECONDITION", "NO_OTHER_REPLICA", message)
        return self.mark(replica, drained=True, leaving=replica.leaving)

    def mark(self, replica: Replica, drained: bool, leaving: bool) -> int:
        """Marks an engine as drained or leaving, or as neither.

        A marked engine gets no new requests. Those that it has go to other engines, or wait where there is no other.

        Args:
            replica: The engine.
            drained: An operator keeps requests from it for now.
            leaving: It is about to end, and another engine may take its place.

        Returns:
            Count of requests that move.
        """
        self.replicas.mark(replica, drained, leaving)
        if drained or leaving:
            return self.dispatch.move_from(replica)
        self.dispatch.engine_available()
        return 0

    async def until_moved(self) -> None:
        """Waits until no request copies pages from an engine that it left: then that engine can end."""
        await self.dispatch.until_moved()

    def resume_replica(self, number: int) -> None:
        """Ends the drain of the engine of this number.

        Raises:
            RequestFailed: The engine is not usable.
        """
        replica = self.serving(number)
        self.mark(replica, drained=False, leaving=replica.leaving)

    def serving(self, number: int) -> Replica:
        """Returns the engine of this number.

        Raises:
            RequestFailed: The engine is not usable at the moment.
        """
        replica = self.replicas.get(number)
        if replica is None or not replica.usable:
            raise RequestFailed("NOT_FOUND", "NO_SUCH_REPLICA", f"there is no replica {number} at the moment")
        return replica

    async def engine_lost(self, number: int = 0) -> str:
        """Waits until the attached engine of this number is dead, and returns the reason."""
        replica = self.replicas.get(number)
        if replica is None or replica.client is None:
            return "it is not there"
        await replica.lost.wait()
        return replica.client.failure or ""

    @property
    def info(self) -> EngineInfo:
        """Properties that all engines have.

        Raises:
            RequestFailed: No engine was ever attached.
        """
        return self.replicas.info

    def limits(self, tenant: str) -> Limits:
        """Returns the limits of a request.

        Raises:
            RequestFailed: No engine was ever attached. Counted as a request of this tenant.
        """
        try:
            return self.info.limits
        except RequestFailed as failure:
            raise self.accounting.refused(failure, tenant) from None

    async def ask(self, question: events.AdminQuestion, number: int) -> events.AdminAnswer:
        """Returns the answer of the engine of this number to an operator's question.

        Raises:
            RequestFailed: The engine is not usable, dies meanwhile, or does not answer in time.
        """
        replica = self.serving(number)
        if replica.client is None:
            raise RuntimeError("a usable replica has no client")
        return await replica.admin_queries.ask(replica.client, question)

    def request_of(self, attempt: int) -> str:
        """Returns the id of the request that has this attempt, "" for an attempt of another frontend."""
        return self.dispatch.request_of(attempt)

    def health(self) -> bool:
        """Whether a new request can be expected to be served.

        True if at least one engine takes requests and, while it has work, makes progress.
        """
        if self.starting or self.draining:
            return False
        clients = (replica.client for replica in self.replicas.open)
        return any(client is not None and client.stalled_for() < self.settings.stall_timeout for client in clients)

    # Requests

    @property
    def live_requests(self) -> int:
        return len(self._requests)

    @property
    def totals(self) -> Totals:
        """Counts since the start."""
        return self.metrics.totals

    @property
    def requests(self) -> Mapping[tuple[str, str], Live | None]:
        """Live requests by tenant and id, oldest first; None for one in preparation."""
        return self._requests

    def replica_of(self, live: Live) -> Replica | None:
        """Returns the engine that has the request, None while it waits for one."""
        return self.dispatch.replica_of(live)

    def abort(self, tenant: str, request_id: str) -> None:
        """Ends a live request; its client keeps the output so far.

        Raises:
            RequestFailed: The request is not live, or is still in preparation.
        """
        live = self._requests.get((tenant, request_id))
        if live is not None:
            self.dispatch.abort(live)
            return
        message = f"{tenant!r} has no live request {request_id!r}"
        if (tenant, request_id) in self._requests:
            message = f"request {request_id!r} of {tenant!r} is still being tokenized: try again"
        raise RequestFailed("NOT_FOUND", "NO_SUCH_REQUEST", message)

    async def wait_idle(self) -> None:
        """Waits until no request is live."""
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
        """Submits a request, and yields it live. Leaving the context ends it in the engine if it has not ended.

        Args:
            spec: The request as the client states it.
            request_id: Unique among the tenant's live requests.
            time_remaining: Seconds until the caller's own deadline; None: it has none.
            streaming: The caller takes output as it comes, and fails as a slow reader if too much of it waits.
            trace: W3C headers of the call.

        Raises:
            RequestFailed: The request cannot be served.
        """
        with self.reporter.watch(spec, request_id, trace) as end:
            async with self._open(spec, request_id, time_remaining, streaming, trace, end) as live:
                yield live

    @asynccontextmanager
    async def _open(
        self,
        spec: Spec,
        request_id: str,
        time_remaining: float | None,
        streaming: bool,
        trace: Mapping[str, str],
        end: RequestEnd,
    ) -> AsyncIterator[Live]:
        live_id = spec.tenant, request_id
        if live_id in self._requests:
            message = f"{request_id!r} is being served"
            raise self.accounting.refused(RequestFailed("ALREADY_EXISTS", "REQUEST_ID_LIVE", message), spec.tenant)
        self._requests[live_id] = None
        self._idle.clear()
        failure: RequestFailed | None = None
        try:
            live = await self._intake.submit(spec, request_id, time_remaining, streaming, end.began)
            self._requests[live_id] = end.live = live
            try:
                yield live
            except Exception as error:
                failure = error if isinstance(error, RequestFailed) else internal()
                raise
            finally:
                end.outcome = self._close(live, failure, trace)
        finally:
            del self._requests[live_id]
            if not self._requests:
                self._idle.set()

    async def _prepare(self, spec: Spec) -> tuple[RequestStream, list[bytes]]:
        """Tokenizes, validates, reads the output prefix and hashes the prompt's pages, in a worker thread."""
        kind = kind_of(spec, self.preparer.outputs.knows_grammar(spec))
        return await self.in_worker(lambda limits: self._make_stream(spec, limits), kind, spec.tenant)

    def _make_stream(self, spec: Spec, limits: Limits) -> tuple[RequestStream, list[bytes]]:
        request = self.preparer.prepare(spec, limits)
        tokenizer = self.preparer.tokenizer
        outputs = self.preparer.outputs
        parsings = outputs.parsings(spec, request, tokenizer)
        stream = RequestStream(spec, request, tokenizer, parsings, outputs.completeness(spec, request, tokenizer))
        return stream, self.replicas.hashes_of(request)

    async def in_worker(
        self,
        task: Callable[[Limits], T],
        kind: PromptKind = PromptKind.TEXT,
        tenant: str = DEFAULT_TENANT,
        of_live: bool = False,
    ) -> T:
        """Runs a task in a thread beside the loop.

        Args:
            task: Gets the limits of a request.
            kind: Kind of the prompt that the task prepares; each kind has its own threads.
            tenant: Tenant whose quota of waiting tasks it counts to.
            of_live: The task may belong to a live request, so a server that drains takes it.

        Raises:
            RequestFailed: No engine is attached, the server starts or drains, or too much waits.
            Exception: Any exception of `task`.
        """
        if self.draining and not of_live:
            raise RequestFailed("UNAVAILABLE", "DRAINING", "the server is shutting down", retry_after=1.0)
        if self.starting:
            raise RequestFailed("UNAVAILABLE", "STARTING", "the server loads its model", retry_after=1.0)
        limits = self.info.limits
        return await self._workers.run(partial(task, limits), kind, tenant)

    def _close(self, live: Live, failure: RequestFailed | None, trace: Mapping[str, str]) -> str:
        """Removes a request that its caller is done with, ended or not.

        Args:
            live: The request.
            failure: The caller's own failure.
            trace: W3C headers of the call.

        Returns:
            The outcome, as the metrics count it.
        """
        self._intake.release(live)
        if live.deadline_timer is not None:
            live.deadline_timer.cancel()
        self.dispatch.forget(live)
        return self.accounting.ended(live, failure, trace)

    def close(self) -> None:
        """Fails requests that wait for an engine, and from now on those whose engine ends."""
        self.dispatch.close()

    def shutdown(self) -> None:
        """Ends the threads and processes beside the loop, which prepare requests and judge outputs."""
        self._workers.shutdown()
        self.dispatch.delivery.close()
        self.preparer.close()
