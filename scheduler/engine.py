"""The engine's loop: the only clock of the scheduler, which one thread at a time uses.

Events come in through `send` from any thread. While the engine's thread computes a step or waits for one, and as many
are in flight as may be, the sender's thread takes them in itself: a refusal does not wait for the end of the step.
Each step's outputs go to one sink, called on the engine's thread; what has ended without a step, and the end of a dead
engine, on a sender's. The sink is called by one thread at a time while the engine lives. An idle engine waits on a
condition and uses no processor time.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from scheduler.events import End, EndReason, Event, StepOutputs, Submit, nothing
from scheduler.readiness import Readiness, with_ready
from scheduler.scheduler import Scheduler
from scheduler.step import Executor, StepPlan

log = logging.getLogger("quire.engine")

READY_POLL = 0.005  # seconds between two questions, where all requests wait for their logits processors
LEAST_TIMEOUT, TIMEOUT_FACTOR = 3.0, 10.0  # timeout of a step: seconds; multiple of its expected time
STOPPED = 1.0  # seconds between two questions whether a step hangs, from which on the process itself did not run

T = TypeVar("T")
Sink = Callable[[StepOutputs], None]


class ExecutorLost(RuntimeError):
    """The executor ended by itself. The message gives the reason."""


class EngineEnded(RuntimeError):
    """The engine does no more work. The message gives the reason."""


class Engine:
    """Runs a scheduler on an executor. `start` once, `stop` once; `send` from any thread in between.

    Attributes:
        failure: Why the engine reports nothing more, None while it lives.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sink: Sink,
        clock: Callable[[], float] = time.monotonic,
        last_excuse: Callable[[], float] = lambda: 0.0,
        readiness: Readiness | None = None,
        wake: threading.Condition | None = None,
        senders_help: bool = True,
    ) -> None:
        """Makes an engine that is not started.

        Args:
            scheduler: Plans its steps. It holds requests where there is a `readiness`.
            executor: Runs them.
            sink: Gets their outputs.
            clock: Seconds.
            last_excuse: Returns when, on `clock`, the executor last did what steps need not do, such as compiling.
            readiness: Asked between two steps whether held requests can be admitted.
            wake: Condition that its thread waits on while there is nothing to do. None for one of its own.
            senders_help: Whether threads that send may take in events. Not where a signal can interrupt them.
        """
        self._senders_help = senders_help
        self._readiness = readiness
        self._scheduler, self._executor, self._sink, self._clock = scheduler, executor, sink, clock
        self._last_excuse, self._step_timeout = last_excuse, math.inf
        self._inbox: list[Event] = []
        self._tasks: deque[Callable[[str | None], None]] = deque()
        self._wake = threading.Condition() if wake is None else wake
        self._stopping = False
        # By step in flight: seconds that its planning took, and that it is expected to take itself.
        self._launched: deque[tuple[float, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._progress = clock()
        self._asked = self._resumed = self._progress
        self._busy = False
        self._broken: str | None = None
        self._planning = threading.Lock()  # of the scheduler: its own thread leaves it while the executor works
        self._taking: list[Event] = []  # events that the scheduler takes in at this moment
        self._error: Exception | None = None  # of the scheduler, on a sender's thread
        self.failure: str | None = None

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def send(self, events: Sequence[Event]) -> None:
        """Hands over events. After a failure, or `stop`, each Submit ends at once with ENGINE_FAILED."""
        with self._wake:
            lives = self.failure is None
            if lives:
                self._inbox.extend(events)
                self._wake.notify()
        if lives:
            if self._senders_help:
                self._take_amid_a_step()
        else:
            self._report_failure([e.attempt for e in events if isinstance(e, Submit)])

    def call(self, task: Callable[[], T]) -> "Future[T]":
        """Runs a short task on the engine's thread, one between two steps, when all published KV is computed.

        From any thread.

        Returns:
            A future of what the task returns or raises; EngineEnded where the engine does no more work.
        """
        future: Future[T] = Future()

        def run(ended: str | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if ended is not None:
                    raise EngineEnded(ended)
                future.set_result(task())
            except Exception as error:  # the task's fault, not the engine's
                future.set_exception(error)

        with self._wake:
            if self.failure is None:
                self._tasks.append(run)
                self._wake.notify()
                return future
        run(self.failure)
        return future

    def fail(self, why: str) -> None:
        """Ends the engine: its executor can run no more steps. From any thread."""
        with self._wake:
            self._broken = self._broken or why
            self._wake.notify()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the loop after the steps in flight. Attempts that are open end with ENGINE_FAILED.

        Raises:
            TimeoutError: The steps in flight take longer than `timeout` seconds.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread did not end within {timeout} s: it waits for the step in flight")

    def stalled_for(self) -> float:
        """Returns seconds since the last progress, 0 for an idle engine. From any thread."""
        return self._clock() - self._progress if self._busy else 0.0

    def overdue(self) -> str:
        """Returns what is wrong where the engine's thread may wait in vain, else "". From any thread.

        It may where its executor was reported as lost, or where a step takes far longer than such steps do.

        It is to be asked several times a second. A step has no fault in a time in which nobody asked: the process was
        stopped, or its virtual machine.
        """
        if self._broken is not None and self.failure is None:  # the thread waits for the executor, maybe for ever
            return self._broken
        now = self._clock()
        if now - self._asked > STOPPED:
            self._resumed = now
        self._asked = now
        stalled = min(self.stalled_for(), now - max(self._resumed, self._last_excuse()))
        if stalled <= self._step_timeout:
            return ""
        return f"a step has run for {stalled:.1f} s, where at most {self._step_timeout:.1f} s were expected: it hangs"

    def _run(self) -> None:
        with self._planning:
            try:
                while not self._stopping:
                    self._turn(self._take())
                    if self._tasks:
                        self._tasks.popleft()(None)
                while self._launched:
                    self._collect()
                self._die("the engine was stopped")
            except Exception as error:  # a fault of the device, or a bug: every attempt ends, none is left to wait
                log.exception("the engine failed")
                self._die(f"{type(error).__name__}: {error}")
            finally:
                self._executor.close()

    def _die(self, why: str) -> None:
        """Ends every open attempt, and those of events that the scheduler has not taken in."""
        with self._wake:
            self.failure = why
            events, self._inbox = self._taking + self._inbox, []
        while self._tasks:
            self._tasks.popleft()(why)
        self._busy = False
        attempts = self._scheduler.live_attempts() + [e.attempt for e in events if isinstance(e, Submit)]
        self._report_failure(attempts, self._scheduler.pending_ends)

    def _collect(self) -> None:
        """Waits for the oldest step in flight and reports its outputs."""
        with self._left_alone():
            result = self._executor.collect()
        planning, _ = self._launched.popleft()
        began = time.perf_counter()
        outputs = self._scheduler.commit(result, self._clock())
        overhead = planning + result.packing_seconds + time.perf_counter() - began
        self._sink(replace(outputs, overheads=(overhead,)))
        self._progress = self._clock()

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        """Leaves the scheduler to senders while the executor works. Raises what it raised there."""
        self._take_in()
        self._report_ends()
        self._planning.release()
        try:
            yield
        finally:
            self._planning.acquire()
        if self._error is not None:
            raise self._error

    def _take_amid_a_step(self) -> None:
        """Takes in events on a sender's thread, if the engine's has left the scheduler.

        Events that come meanwhile wait for the next sender or the next step, so that no flood of them holds that up.
        """
        if not self._planning.acquire(blocking=False):
            return
        try:
            if self._error is None and self._take_in():
                self._report_ends()
        except Exception as error:  # the engine's thread ends with it, and ends the attempts
            log.exception("the scheduler failed on the thread of a sender")
            self._error = error
        finally:
            self._planning.release()

    def _take_in(self) -> bool:
        """Takes in events, if there are some and no step can be planned. Returns whether it has."""
        if self._scheduler.steps_in_flight < self._scheduler.settings.depth:
            return False
        with self._wake:
            events, self._inbox = self._inbox, []
        if events:
            self._schedule(events)
        return bool(events)

    def _schedule(self, events: list[Event]) -> StepPlan | None:
        """Takes in events, and plans the next step if there is room for it."""
        self._taking = events
        plan = self._scheduler.schedule(self._clock(), events)
        self._taking = []
        return plan

    def _report_ends(self) -> None:
        """Reports what has ended by now."""
        if self._scheduler.pending_ends:
            self._sink(self._scheduler.commit(None, self._clock()))

    def _report_failure(self, attempts: list[int], decided: tuple[End, ...] = ()) -> None:
        """Reports the failure. decided: ends from before it; every other attempt ends with ENGINE_FAILED."""
        message = self.failure or ""
        lost = dict.fromkeys(attempts).keys() - {end.attempt for end in decided if not end.more}
        ends = decided + tuple(End(attempt, EndReason.ENGINE_FAILED, message=message) for attempt in sorted(lost))
        stats = replace(self._scheduler.stats(), running=0, waiting=0, waiting_tokens=0, pages_used=0)
        self._sink(nothing(stats, ends))

    def _take(self) -> list[Event]:
        """Returns the events so far; waits for some where there is nothing else to do."""
        with self._wake:
            idle = not self._launched and not self._scheduler.has_work
            if idle or self._scheduler.is_held:
                self._busy = False
                self._wake.wait_for(
                    lambda: bool(self._inbox or self._tasks) or self._stopping or self._broken is not None,
                    None if idle else READY_POLL,
                )
            if self._broken is not None:
                raise ExecutorLost(self._broken)
            if not self._busy:
                self._progress = self._clock()  # before _busy: another thread must not see old progress of new work
                self._busy = True
            self._taking, self._inbox = self._inbox, []
            return self._taking

    def _turn(self, events: list[Event]) -> None:
        began = time.perf_counter()
        asked = events if self._readiness is None else with_ready(events, self._scheduler.held, self._readiness)
        plan = self._schedule(asked)
        planning = time.perf_counter() - began
        if plan is not None:
            expected = self._scheduler.expected_seconds(plan)
            flight = (planning, math.inf if expected is None else expected)
            self._step_timeout = max(
                LEAST_TIMEOUT, TIMEOUT_FACTOR * sum(seconds for _, seconds in (*self._launched, flight))
            )
            with self._left_alone():
                self._executor.launch(plan)
            self._launched.append(flight)
        if self._launched and (plan is None or len(self._launched) >= self._scheduler.settings.depth):
            self._collect()
        elif events or self._scheduler.has_news:
            self._sink(self._scheduler.commit(None, self._clock()))
        elif plan is None and self._scheduler.has_work and not self._scheduler.is_held:
            raise RuntimeError("requests wait, none can be scheduled and no step is in flight: a bug in the scheduler")
