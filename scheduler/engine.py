"""The engine's loop: the only clock and the only thread of the scheduler.

Events come in through `send` from any thread; each step's outputs go to one sink, called on the engine's thread, and on
the sender's once the engine is dead. An idle engine waits on a condition and uses no processor time.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from scheduler.events import End, EndReason, Event, StepOutputs, Submit, nothing
from scheduler.scheduler import Scheduler
from scheduler.step import Executor

log = logging.getLogger("quire.engine")

LEAST_PATIENCE, PATIENCE = 3.0, 10.0  # seconds; times what a step is expected to take

T = TypeVar("T")
Sink = Callable[[StepOutputs], None]


class ExecutorLost(RuntimeError):
    """What computes has ended by itself, says why."""


class EngineEnded(RuntimeError):
    """Nothing more is done by this engine, says why."""


class Engine:
    """Runs `scheduler` on `executor`. `start` once, `stop` once; `send` from any thread in between. last_excuse: when,
    on the clock, the executor last did what steps need not do, such as compiling a kernel.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sink: Sink,
        clock: Callable[[], float] = time.monotonic,
        last_excuse: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._scheduler, self._executor, self._sink, self._clock = scheduler, executor, sink, clock
        self._last_excuse, self._patience = last_excuse, math.inf
        self._inbox: list[Event] = []
        self._tasks: deque[Callable[[str | None], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        # By step in flight: seconds that its planning took, and that it is expected to take itself.
        self._launched: deque[tuple[float, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._progress = clock()
        self._busy = False
        self._broken: str | None = None
        self.failure: str | None = None
        """Why nothing more comes from this engine, None while it lives."""

    def start(self) -> None:
        self._thread.start()

    def send(self, events: Sequence[Event]) -> None:
        """Hands over events. After a failure, or `stop`, each Submit is answered at once with ENGINE_FAILED."""
        with self._wake:
            if self.failure is None:
                self._inbox.extend(events)
                self._wake.notify()
                return
        self._tell_failure([e.attempt for e in events if isinstance(e, Submit)])

    def call(self, task: Callable[[], T]) -> "Future[T]":
        """Has a short task run on the engine's thread, one between two steps, when all KV that has a name is computed.
        From any thread. Gives what it returns or raises, or EngineEnded.
        """
        future: Future[T] = Future()

        def run(ended: str | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if ended is not None:
                    raise EngineEnded(ended)
                future.set_result(task())
            except Exception as error:  # it is the caller's
                future.set_exception(error)

        with self._wake:
            if self.failure is None:
                self._tasks.append(run)
                self._wake.notify()
                return future
        run(self.failure)
        return future

    def fail(self, why: str) -> None:
        """From any thread: the executor can run no more steps, which it says before it is asked for one."""
        with self._wake:
            self._broken = self._broken or why
            self._wake.notify()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the loop after the steps in flight; what still lives gets ENGINE_FAILED. Raises TimeoutError where that
        takes over `timeout` seconds.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread did not end within {timeout} s: it waits for the step in flight")

    def stalled_for(self) -> float:
        """Seconds since the last progress, 0 for an idle engine. Read from any thread."""
        return self._clock() - self._progress if self._busy else 0.0

    def overdue(self) -> str:
        """What is wrong, where a step takes far longer than such steps do; "" while it may still end. Read from any
        thread.
        """
        stalled = min(self.stalled_for(), self._clock() - self._last_excuse())
        if stalled <= self._patience:
            return ""
        return f"a step has run for {stalled:.1f} s, where at most {self._patience:.1f} s were expected: it hangs"

    def _run(self) -> None:
        events: list[Event] = []
        try:
            while not self._stopping:
                events = self._take()
                self._turn(events)
                if self._tasks:
                    self._tasks.popleft()(None)
            while self._launched:
                self._collect()
            self._die("the engine was stopped", [])
        except Exception as error:  # a fault of the device, or a bug: every attempt is told, none is left to wait
            log.exception("the engine failed")
            self._die(f"{type(error).__name__}: {error}", events)
        finally:
            self._executor.close()

    def _die(self, why: str, events: list[Event]) -> None:
        """Tells every attempt that lives, or came in `events` or since, that no more comes."""
        with self._wake:
            self.failure = why
            events, self._inbox = events + self._inbox, []
        while self._tasks:
            self._tasks.popleft()(why)
        self._busy = False
        attempts = self._scheduler.live_attempts() + [e.attempt for e in events if isinstance(e, Submit)]
        self._tell_failure(attempts, self._scheduler.untold_ends)

    def _collect(self) -> None:
        """Waits for the oldest step in flight and tells what came of it."""
        result = self._executor.collect()
        planning, _ = self._launched.popleft()
        began = time.perf_counter()
        outputs = self._scheduler.commit(result, self._clock())
        overhead = planning + result.packing_seconds + time.perf_counter() - began
        self._sink(replace(outputs, overheads=(overhead,)))
        self._progress = self._clock()

    def _tell_failure(self, attempts: list[int], decided: tuple[End, ...] = ()) -> None:
        """decided: ends from before the failure. Every other attempt gets ENGINE_FAILED."""
        message = self.failure or ""
        lost = dict.fromkeys(attempts).keys() - {end.attempt for end in decided if not end.more}
        ends = decided + tuple(End(attempt, EndReason.ENGINE_FAILED, message=message) for attempt in sorted(lost))
        stats = replace(self._scheduler.stats(), running=0, waiting=0, waiting_tokens=0, pages_used=0)
        self._sink(nothing(stats, ends))

    def _take(self) -> list[Event]:
        """The events so far; waits for some where there is nothing else to do."""
        with self._wake:
            idle = not self._launched and not self._scheduler.has_work
            if idle:
                self._busy = False
                self._wake.wait_for(
                    lambda: bool(self._inbox or self._tasks) or self._stopping or self._broken is not None
                )
            if self._broken is not None:
                raise ExecutorLost(self._broken)
            if not self._busy:
                self._progress = self._clock()  # before _busy: another thread must not see old progress of new work
                self._busy = True
            events, self._inbox = self._inbox, []
            return events

    def _turn(self, events: list[Event]) -> None:
        began = time.perf_counter()
        plan = self._scheduler.schedule(self._clock(), events)
        planning = time.perf_counter() - began
        if plan is not None:
            expected = self._scheduler.expected_seconds(plan)
            flight = (planning, math.inf if expected is None else expected)
            self._patience = max(LEAST_PATIENCE, PATIENCE * sum(seconds for _, seconds in (*self._launched, flight)))
            self._executor.launch(plan)
            self._launched.append(flight)
        if self._launched and (plan is None or len(self._launched) >= self._scheduler.settings.depth):
            self._collect()
        elif events or self._scheduler.has_news:
            self._sink(self._scheduler.commit(None, self._clock()))
        elif plan is None and self._scheduler.has_work:
            raise RuntimeError("requests wait, none can be scheduled and no step is in flight: a bug in the scheduler")
