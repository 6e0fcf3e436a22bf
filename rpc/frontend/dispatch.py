"""Live requests and the engines that they are on: mints attempts, and moves requests when their engine dies or drains.

Invariant: a client sees neither a gap nor a duplicate when its request moves. A token counts only if its attempt is
known and its position is the next one. A new attempt starts behind the emitted tokens. A beam search emits no token
before its end, so its new attempt starts from the beginning.

`rpc.frontend.delivery` hands each step's tokens to the streams. All of this runs on one asyncio loop.
"""

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from dataclasses import replace

from rpc.frontend.delivery import Delivery
from rpc.frontend.errors import RequestFailed
from rpc.frontend.live import Live
from rpc.frontend.output import Finish, FinishReason
from rpc.frontend.pacing import Pacer
from rpc.frontend.quarantine import PoisonQuarantine
from rpc.frontend.replicas import Replica, Replicas
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.slo import SLOTracker
from rpc.observe.metrics import Metrics
from scheduler import events

log = logging.getLogger("quire.frontend")

MOVE_SECONDS = 4.0  # a little more than a KV transfer may take


class Dispatch:
    """Keeps each live request of a frontend on an engine, waiting for one, or in quarantine.

    Attributes:
        replicas: Engines that requests can go to.
        delivery: Writes engines' outputs to the streams.
        quarantine: Requests that may kill engines.
    """

    def __init__(
        self, replicas: Replicas, settings: FrontendSettings, metrics: Metrics, slo: SLOTracker, pacer: Pacer
    ) -> None:
        self.replicas, self._settings, self._metrics = replicas, settings, metrics
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._attempts = itertools.count(1)
        self._live: dict[int, Live] = {}
        self.delivery = Delivery(self._live, self, settings.backlog_tokens, metrics, slo, pacer)
        self._replicas_by_attempt: dict[int, Replica] = {}
        self._parked: dict[Live, None] = {}
        self.quarantine = PoisonQuarantine()
        self._moving: dict[Live, None] = {}
        self._none_moving = asyncio.Event()

    def request_of(self, attempt: int) -> str:
        """Returns the id of the request that has this attempt, "" for an attempt of another frontend."""
        live = self._live.get(attempt)
        return live.request_id if live is not None else ""

    def replica_of(self, live: Live) -> Replica | None:
        """Returns the engine that has the request, None while it waits for one."""
        return self._replicas_by_attempt.get(live.attempt)

    @property
    def parked(self) -> int:
        """Count of requests that wait for an engine, quarantined ones included. Read on any thread."""
        return len(self._parked) + self.quarantine.count

    @property
    def waiting_for_engine(self) -> list[Live]:
        """Requests that wait for an engine, without those in quarantine, oldest first."""
        return list(self._parked)

    # On their way to an engine

    def submit(self, live: Live, seconds: float) -> None:
        """Submits a request for the first time.

        Args:
            live: The request.
            seconds: Time until its deadline, at which it ends with the output so far.

        Raises:
            RequestFailed: No engine takes requests, and the frontend closes or too many requests wait for an engine.
        """
        # Moved requests, which have been submitted before, do not count: they are never refused.
        new = sum(not waiting.submissions for waiting in self._parked)
        if not self.replicas.open and (self._closing or new >= self._settings.max_parked):
            raise RequestFailed("UNAVAILABLE", "STARTING", "there is no engine at the moment", retry_after=1.0)
        live.deadline_timer = self._loop.call_later(max(0.0, seconds), self._deadline_passed, live)
        live.deadline = min(live.deadline, time.monotonic() + seconds)
        self._route(live)

    def _send(self, live: Live, replica: Replica, isolated_steps: int = 0) -> None:
        stream, client, again = live.stream, replica.client, live.submissions > 0
        if client is None:
            raise RuntimeError("a request is sent to an engine that is not there")
        # A number of its own for each attempt: outputs of an earlier attempt that are still under way are dropped.
        live.attempt, live.started_here = next(self._attempts), False
        live.submissions += 1
        live.sent = time.monotonic()
        if again:
            self._metrics.resubmitted(stream.length)
        live.stop_queue_timer()
        live.stop_failover_timer()
        self._live[live.attempt], self._replicas_by_attempt[live.attempt] = live, replica
        emitted = stream.emitted()
        replica.attempt_sent(live.attempt, stream.length)
        request = replace(stream.request, deadline=max(0.0, live.deadline - live.sent))
        if live.queue_timeout is not None:
            # A request that an engine has served once has left the queue for good, so its timeout is over.
            left = None if live.served is not None else max(0.0, live.queue_timeout - time.monotonic())
            request = replace(request, queue_timeout=left)
        source, live.source = live.source, None
        if source is not None:
            self._moving[live] = None
        client.send([events.Submit(live.attempt, request, emitted, again, isolated_steps, source)])

    def _route(self, live: Live) -> None:
        """Sends a request to the engine that suits it best, or lets it wait until there is an engine."""
        replica = self.replicas.choose(live.hashes, live.stream.length)
        if replica is not None:
            self._send(live, replica)
        else:
            self._parked[live], live.source = None, None  # by the time there is an engine, the source may be gone
            self._end_move(live)
            self._start_failover_timer(live)
            self._start_queue_timer(live)

    def _start_queue_timer(self, live: Live) -> None:
        """Starts the queue timeout of a request that waits in the frontend rather than in an engine's queue."""
        live.stop_queue_timer()
        if live.queue_timeout is not None and live.served is None:
            left = max(0.0, live.queue_timeout - time.monotonic())
            live.queue_timer = self._loop.call_later(left, self._queue_timed_out, live)

    def _queue_timed_out(self, live: Live) -> None:
        message = "it was not scheduled within the time that it would wait: there was no engine for it"
        self.cut_off(live, RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", message, retry_after=1.0))

    def _start_failover_timer(self, live: Live) -> None:
        """Starts the time for which a request waits while there is no engine, unless it runs already."""
        if live.failover_timer is None:
            live.failover_timer = self._loop.call_later(self._settings.failover, self._failover_timed_out, live)

    def _failover_timed_out(self, live: Live) -> None:
        message = f"there was no engine for it within {self._settings.failover:g} s"
        self.cut_off(live, RequestFailed("UNAVAILABLE", "ENGINE_FAILED", message, retry_after=5.0))

    def engine_available(self) -> None:
        """Sends off the requests that wait, since an engine takes requests again."""
        parked, self._parked = self._parked, {}
        for live in parked:
            self._route(live)
        self._run_quarantined()
        self.time_quarantined()

    def time_quarantined(self) -> None:
        """Has the time of the suspects run while no engine takes requests. While one does, they wait for their turn.

        To be called whenever an engine has come, gone or been marked.
        """
        for live in self.quarantine.waiting:
            if self.replicas.open:
                live.stop_failover_timer()
            else:
                self._start_failover_timer(live)

    def _run_quarantined(self) -> None:
        if not self.replicas.open or (turn := self.quarantine.next()) is None:
            return
        live, steps = turn
        replica = self.replicas.choose((), live.stream.length)
        if replica is None:
            self.quarantine.postpone()
            return
        replica.isolated_request = live
        self._send(live, replica, isolated_steps=steps)

    # Away from an engine

    def move_from(self, replica: Replica) -> int:
        """Moves all requests of an engine to other engines, and returns their count.

        The new engine of a request that has started copies its KV pages from the old one, if it can reach that.
        """
        moved = [self._live[attempt] for attempt in list(replica.waiting) if attempt in self._live]
        reach = replica.client.reach if replica.client is not None else None
        for live in moved:
            if reach is not None and live.started_here:
                live.source = events.KVSource(reach.address, reach.token)
            self._withdraw(live)
            if live is replica.isolated_request:
                live.source = None  # the old engine may be gone by the time that it runs isolated again
                self.quarantine.postpone()
                self._start_queue_timer(live)
            else:
                self._route(live)
        replica.isolated_request = None
        self._metrics.requests_moved(len(moved), "drain")
        self._run_quarantined()
        self.time_quarantined()
        return len(moved)

    async def until_moved(self) -> None:
        """Waits until moved requests have started elsewhere, or ended, but at most MOVE_SECONDS.

        Until then they may copy pages from the engine that had them; after MOVE_SECONDS they wait for pages no more.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVE_SECONDS):
                while self._moving:
                    self._none_moving.clear()
                    await self._none_moving.wait()

    def _end_move(self, live: Live) -> None:
        self._moving.pop(live, None)
        if not self._moving:
            self._none_moving.set()

    def _withdraw(self, live: Live) -> None:
        """Aborts the request's attempt on its engine, if it is on one."""
        attempt = live.attempt
        if self._live.pop(attempt, None) is not None:
            replica = self._remove_from_replica(attempt)
            if replica is not None and replica.client is not None:
                replica.client.send([events.Abort(attempt)])

    def forget(self, live: Live) -> None:
        """Ends a request whose output is no longer wanted."""
        self.delivery.forget(live)
        self._withdraw(live)
        self._finish(live)

    def _remove_from_replica(self, attempt: int) -> Replica | None:
        replica = self._replicas_by_attempt.pop(attempt, None)
        if replica is not None:
            replica.attempt_ended(attempt)
        return replica

    def _finish(self, live: Live) -> None:
        """Releases all that waits for the request, since it has ended."""
        self._parked.pop(live, None)
        self._end_move(live)
        live.stop_queue_timer()
        live.stop_failover_timer()
        if self.quarantine.forget(live):
            self._end_isolation()

    def _end_isolation(self) -> None:
        for replica in self.replicas:
            if replica.isolated_request is not None and replica.isolated_request is not self.quarantine.running:
                replica.isolated_request = None
        self._run_quarantined()

    def close(self) -> None:
        """Fails requests that wait for an engine, and from now on those whose engine ends."""
        self._closing = True
        for live in (*self._parked, *self.quarantine.waiting):
            self._fail_lost(live)

    def engine_lost(self, replica: Replica, lives: list[Live], rows: int) -> None:
        """Takes the requests of a dead engine elsewhere, or into quarantine.

        Args:
            replica: The dead engine.
            lives: Requests that were on it, and are on no engine any more.
            rows: Running sequences in its last stats, those of other frontends included.
        """
        if self._closing:
            for live in lives:
                self._fail_lost(live)
            return
        isolated = replica.isolated_request
        if isolated is None:
            free = self.quarantine.died_with(lives, replica.identity)
            for live in self.quarantine.waiting:
                self._start_queue_timer(live)
        else:
            free = [live for live in lives if live is not isolated]
            if isolated in lives and (isolated.started_here or not rows):
                free += self._died_isolated(replica, isolated)
            elif isolated in lives:  # it waited for others' rows to end, so the engine cannot have died of it
                replica.isolated_request = None
                self.quarantine.postpone()
                self._start_queue_timer(isolated)
        log.warning("engine %d had %d requests when it died", replica.number, len(lives))
        self._metrics.requests_moved(sum(not live.stream.ended for live in lives), "engine_lost")
        for live in free:
            self._route(live)
        self._run_quarantined()
        self.time_quarantined()

    def _died_isolated(self, replica: Replica, live: Live) -> list[Live]:
        """Gives up a request that killed an engine while isolated there. Returns requests that this acquits."""
        acquitted = self.quarantine.died_isolated(live.started_here)
        replica.isolated_request = None
        if acquitted is None:
            self._start_queue_timer(live)
            return []
        message = (
            "engines died while they computed this request, the last one with nothing else to compute: it is not tried "
            "again. The server's log says how they ended"
        )
        log.error("request %s is given up: engines die of it", live.request_id)
        live.stream.fail(RequestFailed("INTERNAL", "QUARANTINED", message))
        live.wake()
        return acquitted

    def _fail_lost(self, live: Live) -> None:
        self.cut_off(live, RequestFailed("UNAVAILABLE", "ENGINE_FAILED", "the engine has ended", retry_after=5.0))

    def cut_off(self, live: Live, failure: RequestFailed) -> None:
        """Ends the request with this failure, on its engine too."""
        live.stream.fail(failure)
        self.forget(live)
        live.wake()

    def _deadline_passed(self, live: Live) -> None:
        self._close(live, FinishReason.DEADLINE)

    def abort(self, live: Live) -> None:
        """Ends the request for an operator; its client keeps the output so far."""
        self._close(live, FinishReason.ABORTED)

    def _close(self, live: Live, reason: FinishReason) -> None:
        with self.delivery.contained(live):
            live.stream.close(Finish(reason))
        self.forget(live)
        live.wake()

    # Outputs of engines

    def deliver(self, outputs: events.StepOutputs, replica: Replica) -> None:
        """Takes in the outputs of a step of this engine, or of its end.

        The order matters: starts before tokens, since the first token's time counts from the start; tokens before ends,
        since an end closes its stream.
        """
        now, rows = time.monotonic(), replica.stats.running  # rows of the step before, which `replica.update` replaces
        if self.replicas.get(replica.number) is replica:
            self._metrics.engines.step(outputs, replica.number)
        replica.update(outputs)
        replica.admin_queries.resolve(outputs.answers)
        for start in outputs.starts:
            live = self._live.get(start.attempt)
            if live is not None:
                self._take_start(live, start, now)
        self.delivery.deliver(outputs, now)
        replica.failing = replica.failing or any(end.reason is events.EndReason.ENGINE_FAILED for end in outputs.ends)
        lost = [live for end in outputs.ends if (live := self._take_end(end)) is not None]
        if lost:
            self.engine_lost(replica, lost, rows)
        if self.quarantine.running is not None and self.quarantine.has_passed():
            self.quarantine.parole()
            self._end_isolation()
        self.check_alive(replica)

    def check_alive(self, replica: Replica) -> None:
        """Wakes all tasks that wait for the engine's end, if its client reports a failure."""
        if replica.client is not None and replica.client.failure is not None:
            attached = self.replicas.get(replica.number) is replica
            if attached and not (replica.lost.is_set() or replica.leaving or self._closing):
                self._metrics.engine_failed()
            replica.lost.set()
            replica.admin_queries.engine_lost()

    def _take_start(self, live: Live, start: events.Start, now: float) -> None:
        live.started_here = True
        self._end_move(live)
        if live.served is None:
            queued = live.serve(start.age, now)
            live.stream.cached_tokens = start.cached
            self._metrics.request_started(len(live.stream.request.prompt), start.cached, queued)

    def _take_end(self, end: events.End) -> Live | None:
        """Ends a sequence. Returns its request if that has to go on elsewhere, since its engine failed."""
        live = self._live.get(end.attempt)
        if live is None:
            return None
        if not end.more:
            del self._live[end.attempt]
            self._remove_from_replica(end.attempt)
        if end.reason is events.EndReason.ENGINE_FAILED and not live.stream.ended:
            return live
        self.delivery.end(live, end)
        return None

    def has_ended(self, live: Live) -> None:
        """Releases a request of which its engine has sent all output, and wakes its reader."""
        self._finish(live)
        live.wake()

    def stop_sequence(self, live: Live, index: int) -> None:
        """Aborts one sequence of the request on its engine; the others go on."""
        if (replica := self._replicas_by_attempt.get(live.attempt)) is not None and replica.client is not None:
            replica.client.send([events.Abort(live.attempt, index)])
