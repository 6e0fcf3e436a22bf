"""Live requests and the engines that they are on: mints attempts, and takes requests elsewhere when their engine dies.
`rpc.frontend.delivery` hands each step's tokens to their streams.

A client sees no gap and no duplicate of that: a token counts only if its attempt is known and its position is the next
one. The new attempt goes on from what was delivered; a beam search, of which nothing is before its end, starts again.
Lives on one asyncio loop.
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
from rpc.frontend.promises import Promises
from rpc.frontend.replicas import Replica, Replicas
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.suspects import Suspects
from rpc.observe.metrics import Metrics
from scheduler import events

log = logging.getLogger("quire.frontend")

MOVE_SECONDS = 4.0  # a pull's, and a little more


class Dispatch:
    """The live requests of one frontend, each on an engine, on its way to one, or under suspicion."""

    def __init__(
        self, replicas: Replicas, settings: FrontendSettings, metrics: Metrics, promises: Promises, pacer: Pacer
    ) -> None:
        self.replicas, self._settings, self._metrics = replicas, settings, metrics
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._attempts = itertools.count(1)
        self._live: dict[int, Live] = {}
        self._delivery = Delivery(self._live, self, settings.backlog_tokens, metrics, promises, pacer)
        self._places: dict[int, Replica] = {}
        self._parked: dict[Live, None] = {}
        self._without_engine: asyncio.TimerHandle | None = None
        self._suspects = Suspects()
        self._moving: dict[Live, None] = {}
        self._none_moving = asyncio.Event()

    def request_of(self, attempt: int) -> str:
        """The request that has this attempt, "" if it is none of this frontend's."""
        live = self._live.get(attempt)
        return live.request_id if live is not None else ""

    def place_of(self, live: Live) -> Replica | None:
        """The engine that has it."""
        return self._places.get(live.attempt)

    @property
    def parked(self) -> int:
        """Requests that wait for an engine. On any thread."""
        return len(self._parked) + self._suspects.count

    # On their way to an engine

    def submit(self, live: Live, seconds: float) -> None:
        """For the first time; it ends after so many seconds with what there is. Raises RequestFailed where no engine is
        there, and too many wait for one.
        """
        new = sum(not waiting.submissions for waiting in self._parked)
        if not self.replicas.open and (self._closing or new >= self._settings.max_parked):
            raise RequestFailed("UNAVAILABLE", "STARTING", "there is no engine at the moment", retry_after=1.0)
        live.timer = self._loop.call_later(max(0.0, seconds), self._time_is_up, live)
        self._go_on(live)

    def _send(self, live: Live, replica: Replica, alone: int = 0) -> None:
        stream, client, again = live.stream, replica.client, live.submissions > 0
        if client is None:
            raise RuntimeError("a request is sent to an engine that is not there")
        live.attempt, live.started_here = next(self._attempts), False
        live.submissions += 1
        live.sent = time.monotonic()
        if again:
            self._metrics.replayed(stream.length)
        live.stop_waiting()
        self._live[live.attempt], self._places[live.attempt] = live, replica
        emitted = stream.emitted()
        replica.send_off(live.attempt, stream.length)
        request = stream.request
        if live.patience is not None:
            left = None if live.served is not None else max(0.0, live.patience - time.monotonic())
            request = replace(request, patience=left)
        source, live.source = live.source, None
        if source is not None:
            self._moving[live] = None
        client.send([events.Submit(live.attempt, request, emitted, again, alone, source)])

    def _go_on(self, live: Live) -> None:
        """On an engine, as soon as there is one."""
        replica = self.replicas.choose(live.names, live.stream.length)
        if replica is not None:
            self._send(live, replica)
        else:
            self._parked[live], live.source = None, None  # by the time there is an engine, that one may be gone
            self._has_moved(live)
            self._limit_the_wait()
            self._limit_the_patience(live)

    def _limit_the_patience(self, live: Live) -> None:
        """Of one that waits here rather than in an engine's queue."""
        live.stop_waiting()
        if live.patience is not None and live.served is None:
            left = max(0.0, live.patience - time.monotonic())
            live.waits = self._loop.call_later(left, self._patience_is_up, live)

    def _patience_is_up(self, live: Live) -> None:
        message = "it was not scheduled within the time that it would wait: there was no engine for it"
        self.cut_off(live, RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", message, retry_after=1.0))

    def _limit_the_wait(self) -> None:
        """For an engine."""
        if self._without_engine is None:
            self._without_engine = self._loop.call_later(self._settings.failover, self._give_up)

    def _give_up(self) -> None:
        """There was no engine for too long."""
        self._without_engine = None
        message = f"there was no engine for it within {self._settings.failover:g} s"
        for live in (*self._parked, *self._suspects.waiting):
            self.cut_off(live, RequestFailed("UNAVAILABLE", "ENGINE_FAILED", message, retry_after=5.0))

    def engine_came(self) -> None:
        """There is one for those that wait."""
        if self._without_engine is not None:
            self._without_engine.cancel()
            self._without_engine = None
        parked, self._parked = self._parked, {}
        for live in parked:
            self._go_on(live)
        self._try_a_suspect()

    def _try_a_suspect(self) -> None:
        if not self.replicas.open or (turn := self._suspects.next()) is None:
            return
        live, steps = turn
        replica = self.replicas.choose((), live.stream.length)
        if replica is None:
            self._suspects.postpone()
            return
        replica.alone = live
        self._send(live, replica, alone=steps)

    # Away from it

    def move_from(self, replica: Replica) -> int:
        """Its requests go on elsewhere; how many. Of those that have started, KV pages can be copied from there where
        other engines reach it.
        """
        moved = [self._live[attempt] for attempt in list(replica.waiting) if attempt in self._live]
        reach = replica.client.reach if replica.client is not None else None
        for live in moved:
            if reach is not None and live.started_here:
                live.source = events.Source(reach.address, reach.token)
            self._take_off(live)
            if live is replica.alone:
                live.source = None  # it may be long until its turn
                self._suspects.postpone()
                self._limit_the_patience(live)
            else:
                self._go_on(live)
        replica.alone = None
        self._metrics.requests_moved(len(moved), "drain")
        self._try_a_suspect()
        if not self.replicas.open:
            self._limit_the_wait()
        return len(moved)

    async def until_moved(self) -> None:
        """Until requests that were moved have started elsewhere, or ended: so long they may take pages from the engine
        that had them. No longer than they would wait for these.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVE_SECONDS):
                while self._moving:
                    self._none_moving.clear()
                    await self._none_moving.wait()

    def _has_moved(self, live: Live) -> None:
        self._moving.pop(live, None)
        if not self._moving:
            self._none_moving.set()

    def _take_off(self, live: Live) -> None:
        """Its engine need not go on with it."""
        attempt = live.attempt
        if self._live.pop(attempt, None) is not None:
            replica = self._left(attempt)
            if replica is not None and replica.client is not None:
                replica.client.send([events.Finish(attempt)])

    def forget(self, live: Live) -> None:
        """No more of its output is wanted."""
        self._delivery.forget(live)
        self._take_off(live)
        self._gone(live)

    def _left(self, attempt: int) -> Replica | None:
        replica = self._places.pop(attempt, None)
        if replica is not None:
            replica.left(attempt)
        return replica

    def _gone(self, live: Live) -> None:
        """It has ended, one way or another."""
        self._parked.pop(live, None)
        self._has_moved(live)
        live.stop_waiting()
        if self._suspects.forget(live):
            self._free_who_was_alone()

    def _free_who_was_alone(self) -> None:
        for replica in self.replicas:
            if replica.alone is not None and replica.alone is not self._suspects.running:
                replica.alone = None
        self._try_a_suspect()

    def close(self) -> None:
        """Engines that end from now on take their requests with them; so do those that have ended."""
        self._closing = True
        for live in (*self._parked, *self._suspects.waiting):
            self._cut_off_lost(live)

    def engine_lost(self, replica: Replica, lives: list[Live], rows: int) -> None:
        """It died with these on it, which are on no engine any more. rows: sequences that it last said to compute, also
        of other frontends.
        """
        if self._closing:
            for live in lives:
                self._cut_off_lost(live)
            return
        alone = replica.alone
        if alone is None:
            free = self._suspects.died_with(lives, replica.identity)
            for live in self._suspects.waiting:
                self._limit_the_patience(live)
        else:
            free = [live for live in lives if live is not alone]
            if alone in lives and (alone.started_here or not rows):
                free += self._died_alone(replica, alone)
            elif alone in lives:  # others were to end first
                replica.alone = None
                self._suspects.postpone()
        log.warning("engine %d had %d requests when it died", replica.number, len(lives))
        self._metrics.requests_moved(sum(not live.stream.ended for live in lives), "engine_lost")
        for live in free:
            self._go_on(live)
        self._try_a_suspect()
        if not self.replicas.open:
            self._limit_the_wait()

    def _died_alone(self, replica: Replica, live: Live) -> list[Live]:
        """Returns those that are free to go on."""
        acquitted = self._suspects.died_alone(live.started_here)
        replica.alone = None
        if acquitted is None:
            return []
        message = (
            "engines died while they computed this request, the last one with nothing else to compute: it is not tried "
            "again. The server's log says how they ended"
        )
        log.error("request %s is given up: engines die of it", live.request_id)
        live.stream.fail(RequestFailed("INTERNAL", "QUARANTINED", message))
        live.tell()
        return acquitted

    def _cut_off_lost(self, live: Live) -> None:
        self.cut_off(live, RequestFailed("UNAVAILABLE", "ENGINE_FAILED", "the engine has ended", retry_after=5.0))

    def cut_off(self, live: Live, failure: RequestFailed) -> None:
        """It ends with this."""
        live.stream.fail(failure)
        self.forget(live)
        live.tell()

    def _time_is_up(self, live: Live) -> None:
        self._close(live, FinishReason.DEADLINE)

    def abort(self, live: Live) -> None:
        """It ends with what there is: an operator wants no more of it."""
        self._close(live, FinishReason.ABORTED)

    def _close(self, live: Live, reason: FinishReason) -> None:
        with self._delivery.contained(live):
            live.stream.close(Finish(reason))
        self.forget(live)
        live.tell()

    # What engines tell

    def deliver(self, outputs: events.StepOutputs, replica: Replica) -> None:
        """What a step of this engine gave, or its end."""
        now, rows = time.monotonic(), replica.stats.running
        if self.replicas.get(replica.number) is replica:
            self._metrics.engines.step(outputs, replica.number)
        replica.take(outputs)
        replica.questions.take(outputs.answers)
        for start in outputs.starts:
            live = self._live.get(start.attempt)
            if live is not None:
                self._started(live, start, now)
        self._delivery.deliver(outputs, now)
        replica.failing = replica.failing or any(end.reason is events.EndReason.ENGINE_FAILED for end in outputs.ends)
        lost = [live for end in outputs.ends if (live := self._ended(end)) is not None]
        if lost:
            self.engine_lost(replica, lost, rows)
        if self._suspects.running is not None and self._suspects.has_passed():
            self._suspects.parole()
            self._free_who_was_alone()
        self.look_at(replica)

    def look_at(self, replica: Replica) -> None:
        """Whether it lives."""
        if replica.client is not None and replica.client.failure is not None:
            attached = self.replicas.get(replica.number) is replica
            if attached and not (replica.lost.is_set() or replica.leaving or self._closing):
                self._metrics.engine_failed()
            replica.lost.set()
            replica.questions.engine_lost()

    def _started(self, live: Live, start: events.Start, now: float) -> None:
        live.started_here = True
        self._has_moved(live)
        if live.served is None:
            queued = live.serve(start.age, now)
            live.stream.cached_tokens = start.cached
            self._metrics.request_started(len(live.stream.request.prompt), start.cached, queued)

    def _ended(self, end: events.End) -> Live | None:
        """Returns the request where it has to go on elsewhere."""
        live = self._live.get(end.attempt)
        if live is None:
            return None
        if not end.more:
            del self._live[end.attempt]
            self._left(end.attempt)
        if end.reason is events.EndReason.ENGINE_FAILED and not live.stream.ended:
            return live
        self._delivery.end(live, end)
        return None

    def has_ended(self, live: Live) -> None:
        """Its engine has said all of it."""
        self._gone(live)
        live.tell()

    def stop_sequence(self, live: Live, index: int) -> None:
        """Its engine need not go on with this sequence of it."""
        if (replica := self._places.get(live.attempt)) is not None and replica.client is not None:
            replica.client.send([events.Finish(live.attempt, index)])
