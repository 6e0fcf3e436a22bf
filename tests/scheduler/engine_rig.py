"""An engine with its thread for tests that wait for no time to pass.

The executor stops where a test wants it to, and `wait_until_idle` returns when the loop has nothing left to do.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

from cache_manager.block_hash import BlockHasher
from cache_manager.manager import CacheManager
from scheduler.engine import Engine
from scheduler.events import End, EndReason, EngineStats, Event, StepOutputs, Submit
from scheduler.readiness import Readiness
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.workloads import PATIENT, SECRET, make_layout, make_request

PATIENCE = 20.0  # seconds after which a wait of these tests is a failure


class Gate:
    """Stops the engine's thread in one place until it is opened."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop_here(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "the gate was never opened"

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "the engine never came to the gate"

    def open(self) -> None:
        self._open.set()


class HookedExecutor(FakeExecutor):
    """Does what a test wants before it launches or collects.

    Attributes:
        before: What to do, by call and its number from 0.
        calls: How often each was called.
        ended: Set when it is closed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.before: dict[tuple[str, int], Callable[[], None]] = {}
        self.calls: dict[str, int] = defaultdict(int)
        self.ended = threading.Event()

    def launch(self, plan: StepPlan) -> None:
        self._hook("launch")
        super().launch(plan)

    def collect(self) -> StepResult:
        self._hook("collect")
        return super().collect()

    def close(self) -> None:
        super().close()
        self.ended.set()

    def _hook(self, call: str) -> None:
        number = self.calls[call]
        self.calls[call] += 1
        self.before.get((call, number), lambda: None)()


class Parking(threading.Condition):
    """The engine's condition; tells when the loop goes to sleep on it. left: called when a thread leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = threading.Semaphore(0)
        self.left: Callable[[], None] = lambda: None

    def __exit__(self, *error):
        super().__exit__(*error)
        self.left()

    def wait_for(self, predicate, timeout=None):
        self.sleeps.release()
        return super().wait_for(predicate, timeout)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """An engine with its thread, and all that its sink was told."""

    def __init__(
        self,
        depth: int = 1,
        rows: int = 4,
        pages: int = 64,
        queue: QueueLimits = PATIENT,
        readiness: Readiness | None = None,
        senders_help: bool = True,
    ) -> None:
        settings = SchedulerSettings(max_batched_tokens=16, max_sequences=rows, steps_in_flight=depth)
        layout = make_layout(4)
        hasher = BlockHasher(SECRET, b"model", layout.page_size)
        cache = CacheManager(layout, pages, rows, ahead=settings.ahead)
        self.scheduler = Scheduler(settings, queue, cache, hasher, holds=readiness is not None)
        self.executor = HookedExecutor(layout, pages, settings)
        self.clock = Clock()
        self.excuse = 0.0
        self.parking = Parking()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            self._sink,
            self.clock,
            lambda: self.excuse,
            readiness,
            self.parking,
            senders_help,
        )
        self.on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, list[End]] = defaultdict(list)
        self.threads: set[str] = set()
        self.stats = EngineStats()
        self.schedules = 0
        self._told = threading.Condition()
        self._count_schedules()

    def _count_schedules(self) -> None:
        real = self.scheduler.schedule

        def counting(now, events):
            self.schedules += 1
            return real(now, events)

        self.scheduler.schedule = counting

    def _sink(self, outputs: StepOutputs) -> None:
        with self._told:
            self.threads.add(threading.current_thread().name)
            for attempt, position, token in zip(
                outputs.attempts.tolist(), outputs.positions.tolist(), outputs.tokens.tolist(), strict=True
            ):
                assert position == len(self.tokens[attempt]), "a gap or a duplicate"
                assert not self.ends[attempt], "a token after the end"
                self.tokens[attempt].append(token)
            self.stats = outputs.stats
            for end in outputs.ends:
                self.ends[end.attempt].append(end)
            self._told.notify_all()
        self.on_outputs(outputs)

    def stop_at(self, call: str, number: int) -> Gate:
        gate = Gate()
        self.executor.before[call, number] = gate.stop_here
        return gate

    def fail_at(self, call: str, number: int) -> None:
        def fail() -> None:
            raise RuntimeError("the device is gone")

        self.executor.before[call, number] = fail

    def wait_until_idle(self) -> None:
        """Until the loop sleeps once more."""
        assert self.parking.sleeps.acquire(timeout=PATIENCE), "the engine does not come to rest"

    def wait_ends(self, *attempts: int) -> None:
        with self._told:
            done = self._told.wait_for(lambda: all(self.ends[attempt] for attempt in attempts), PATIENCE)
        assert done, f"no end of {[a for a in attempts if not self.ends[a]]}"

    def wait_dead(self) -> None:
        """Waits until the loop has ended by itself."""
        assert self.executor.ended.wait(PATIENCE), "the engine's loop goes on"
        self.engine.stop(PATIENCE)

    def reasons(self) -> dict[int, list[EndReason]]:
        return {attempt: [end.reason for end in ends] for attempt, ends in self.ends.items() if ends}


def submits(count: int, max_tokens: int = 5) -> list[Event]:
    return [Submit(i, make_request(i, 3, max_tokens)) for i in range(1, count + 1)]
