"""Laws of preemptions: which row gives way, for what, and how often, found without what the scheduler counts."""

from collections import Counter

import numpy as np

from scheduler.events import StepOutputs
from scheduler.preemption_cause import PreemptionCause
from scheduler.scheduler import Scheduler
from tests.scheduler.executor import law

Key = tuple[int, int]  # of a sequence: attempt, index


class TimesPreempted:
    """How often each sequence lost its row. Those of a search take over the counts of what they go on from."""

    def __init__(self) -> None:
        self._times = Counter[Key]()

    def add(self, key: Key) -> None:
        self._times[key] += 1

    def of(self, key: Key) -> int:
        return self._times[key]

    def of_rows(self, scheduler: Scheduler) -> dict[Key, int]:
        """Returns the number for each sequence that has a row. Law: the scheduler counts alike."""
        rows, found = scheduler.rows, dict[Key, int]()
        for row in rows.active().tolist():
            key, counted = (int(rows.attempt[row]), int(rows.index[row])), rows.preemptions(row)
            found[key] = counted if rows.searches[row] else self._times[key]
            law(counted == found[key], f"{key} was preempted {found[key]} times, {counted} are counted")
        return found


class Victims:
    """Law of first come, turn by turn: later ones give way, and those last that gave way often."""

    def __init__(self, most: int) -> None:
        """most: `max_preemptions` of the scheduler."""
        self._times, self._most = TimesPreempted(), most
        self._before: dict[Key, int] = {}

    def before_turn(self, scheduler: Scheduler) -> None:
        self._before = self._times.of_rows(scheduler)

    def check(self, victims: set[Key], kept: set[Key]) -> None:
        """Checks a turn. victims: sequences that lost their rows in it. kept: those that have theirs still."""
        times, most = self._before, self._most
        for victim in victims:
            law(victim != min(times) or not kept, f"{victim} was preempted, the first, and {kept} not")
            for other in kept - {min(times)}:
                spared = times[other] >= most > times[victim]  # the other was preempted too often
                law(other < victim or spared, f"{victim} was preempted, {other} not: {times}")
                law(times[victim] < most or times[other] >= most, f"{victim} was preempted again, {other} not: {times}")
            self._times.add(victim)


class PreemptionWatch:
    """Watches each preemption of a scheduler under any policy.

    Attributes:
        causes: Preemptions by cause.
        beyond: Preemptions of sequences that had reached the bound.
        spared: Preemptions of sequences that come before one that had reached the bound.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.causes, self.beyond, self.spared = Counter[PreemptionCause](), 0, 0
        self._scheduler, self._times = scheduler, TimesPreempted()
        self._preempt = scheduler.running.preempt
        self._schedule, self._commit = scheduler.schedule, scheduler.commit
        self._now, self._committing = 0.0, False
        scheduler.running.preempt = self._preempting
        scheduler.schedule, scheduler.commit = self._scheduling, self._taking_in

    def _scheduling(self, now, events):
        self._now = now
        return self._schedule(now, events)

    def _taking_in(self, result, now) -> StepOutputs:
        self._committing = True
        try:
            return self._commit(result, now)
        finally:
            self._committing = False

    def _preempting(self, row: int, cause: PreemptionCause) -> None:
        rows = self._scheduler.rows
        key = int(rows.attempt[row]), int(rows.index[row])
        possible = self._possible(row)
        law(cause in possible, f"{key} is preempted for {cause}, not for {possible}")
        if cause is PreemptionCause.PAGES:
            self._check_victim(row, key)
        if cause is PreemptionCause.PRIORITY:
            law(
                self._times.of_rows(self._scheduler)[key] < self._scheduler.settings.max_preemptions,
                f"{key} gives way again",
            )
        if cause in (PreemptionCause.PAGES, PreemptionCause.PRIORITY):
            self._times.add(key)
        self.causes[cause] += 1
        self._preempt(row, cause)

    def _possible(self, row: int) -> set[PreemptionCause]:
        """Returns the causes that the state at this moment allows: one, or two where a request waits and pages lack."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        if self._committing:
            return {PreemptionCause.LOST_COPY}
        search = scheduler.running.beams.get(int(rows.attempt[row]))
        if search is not None and search.has_offer(int(rows.index[row])):
            return {PreemptionCause.SEARCH}
        wanted = len(scheduler.queue) and scheduler.policy.wants_room(scheduler.queue, rows, self._now)
        found = {PreemptionCause.PRIORITY} if wanted else set()
        return found | ({PreemptionCause.PAGES} if self._pages_lack() else set())

    def _pages_lack(self) -> bool:
        """Whether the free pages may be too few for the tokens that the running rows compute next."""
        rows, cache, settings = self._scheduler.rows, self._scheduler.cache, self._scheduler.settings
        active = rows.active()
        need = np.minimum(rows.length[active], rows.max_length[active] - 1) - rows.scheduled[active]
        need = np.minimum(need, settings.chunk)
        uncovered = need[(need > 0) & ~cache.covers(active, rows.scheduled[active] + need)]
        most = int((uncovered // cache.layout.page_size + 2).sum()) * len(cache.layout.groups)
        return not cache.pool.returning and cache.pool.free < most

    def _check_victim(self, row: int, key: Key) -> None:
        scheduler, times = self._scheduler, self._times.of_rows(self._scheduler)
        rows, most = scheduler.rows, scheduler.settings.max_preemptions
        order = [
            (int(rows.attempt[one]), int(rows.index[one])) for one in scheduler.policy.running(rows, self._now).tolist()
        ]
        law(key != order[0] or len(order) == 1, f"{key} gives way, which comes before all of {order}")
        later = order[order.index(key) + 1 :]
        law(all(times[one] >= most for one in later), f"{key} gives way, {later} are behind it: {times}")
        self.spared += bool(later)
        if times[key] >= most:
            below = [one for one in order[1:] if times[one] < most]
            law(not below and not later, f"{key} gives way again, though {below or later} may: {times}")
            self.beyond += 1

    def total(self, attempt: int) -> int:
        """Returns how often the first sequence of an attempt lost its row to others."""
        return self._times.of((attempt, 0))

    def check_the_end(self) -> None:
        """Checks the scheduler's counts by cause."""
        stats = self._scheduler.stats()
        found = {cause: getattr(stats, f"preemptions_{cause}") for cause in PreemptionCause}
        law(
            found == {cause: self.causes[cause] for cause in PreemptionCause}, f"{found} are counted, not {self.causes}"
        )
        law(stats.preemptions == self.causes.total(), f"{stats.preemptions} are counted, not {self.causes.total()}")
