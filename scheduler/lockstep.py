"""Steps in which every running row decodes one token: most steps of a busy engine.

The plan of such a step is the one before it, each slice a position further. All else that planning would find out is
known in advance: in which steps each row fills a page, and for how many steps none reaches its max length. So a step
between two events costs a few array operations.
"""

import numpy as np
from numpy.typing import NDArray

from cache_manager.manager import CacheManager
from scheduler.admission import Admission
from scheduler.in_flight import InFlight
from scheduler.policy import SchedulingPolicy
from scheduler.rows import Index, Places, Rows
from scheduler.running import Running
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan


class Lockstep:
    """Plans steps of rows in lockstep: a fast path of `Scheduler.schedule`, to the same plans.

    Attributes:
        decoding: The rows that the last plan moved on in lockstep; None without any.
        steps: Steps that this fast path has planned.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        running: Running,
        cache: CacheManager,
        admission: Admission,
        policy: SchedulingPolicy,
        drafts: bool,
    ) -> None:
        """drafts: rows may have draft tokens. Then none is ever in lockstep, nor where all tokens are recomputed."""
        self._running, self._rows, self._queue = running, running.rows, running.queue
        self._cache, self._admission, self._policy = cache, admission, policy
        self._excluded = drafts or settings.recompute
        # Rows that the last step was planned for one by one, with its slices and logits.
        self._planned: tuple[Index, Index, Index] | None = None
        self.decoding: DecodingRows | None = None
        self.steps = 0

    def next_step(self, now: float, step: int) -> tuple[InFlight, Index] | None:
        """Gives rows in lockstep the pages of their next step, and moves them on.

        Returns:
            The step and its logits, as in the plan; None where no rows are in lockstep, or are no longer.
        """
        decoding, planned = self.decoding, self._planned
        self.leave()
        if decoding is None and planned is None:
            return None
        # Legal where no row gives way and `Admission.admit` would change nothing. Searches may suspend rows: steps of
        # theirs are planned anew.
        may_admit = len(self._queue) and (
            self._rows.used < self._rows.size or self._policy.wants_room(self._queue, self._rows, now)
        )
        if may_admit or self._admission.isolated is not None or self._running.beams:
            return None
        rows = self._policy.running(self._rows, now)
        # Found out here, not once a step is planned: where rows come and go with each step, it would not pay.
        if planned is not None and planned[0] is rows:
            decoding = DecodingRows.of(self._rows, self._cache, *planned)
        # The very array: had a row come or left, or the order changed, the policy would have returned another.
        if decoding is None or decoding.rows is not rows or not decoding.steps_left:
            return None
        due = decoding.due
        if len(due) and not self._cache.grow_by_page(decoding.rows[due]):
            return None  # nothing has changed: the scheduler preempts
        decoding.advance()
        self._rows.advance_all(step)
        self.decoding = decoding
        self.steps += 1
        flown = InFlight(
            step,
            now,
            decoding.slices,
            len(decoding.slices),
            decoding.drawing,
            decoding.serials,
            self._rows.departures,
            # A page that is full now is one in which the next token finds no place. Pages that leave a window are
            # looked for in all slices.
            filling=None if self._cache.layout.windows else decoding.due,
        )
        return flown, decoding.logits

    def planned(self, rows: Index, plan: StepPlan) -> None:
        """Notes a step that was planned one by one for these rows, which may go on in lockstep after it."""
        if len(rows) == len(plan.slices) == len(plan.logits) and not self._excluded:
            self._planned = rows, plan.slices, plan.logits

    def leave(self) -> None:
        """Ends lockstep: the next step is planned one by one."""
        self.decoding = self._planned = None


class DecodingRows:
    """Rows that decode together, one token each in every step.

    Invariant, while the policy returns `rows` and `steps_left` is above 0: each row in use has one token to compute and
    draws from its logits, and holds exactly the pages of the tokens before it. A step of all rows keeps this up, and
    without a row that comes or leaves nothing else touches it.

    Attributes:
        rows: [n] int32. All rows in use in the policy's order: the very array that the policy returned.
        slices: [n, 3] int32. As in the last plan.
        logits: [n, 2] int32. As in every plan.
        drawing: [n] intp. As in every `InFlight`.
        serials: [rows] int64. As in every `InFlight`.
        steps_left: Steps until a row has no more token to compute.
    """

    def __init__(self, running: Rows, rows: Index, slices: Index, logits: Index, page_size: int) -> None:
        """running, rows, slices, logits: as in `of`, which has checked them."""
        self.rows, self.slices, self.logits = rows, slices, logits
        self.drawing: Places = rows.astype(np.intp)
        self.serials = running.serial.copy()
        scheduled = running.scheduled[self.drawing]
        # The last token of an output is never computed.
        self.steps_left = int((running.max_length[self.drawing] - 1 - scheduled).min())
        self._further = np.zeros(slices.shape, np.int32)
        self._further[:, 1] = 1
        # A row needs a page in every `page_size`-th step. Sorted by the first such step, those of one step are a run.
        self._page_size, self._steps = page_size, 0
        first = -scheduled % page_size
        self._order = first.argsort(kind="stable")
        self._ends = first[self._order].searchsorted(np.arange(page_size), side="right").tolist()

    @staticmethod
    def of(running: Rows, cache: CacheManager, rows: Index, slices: Index, logits: Index) -> "DecodingRows | None":
        """Finds out whether rows go on in lockstep.

        Args:
            running: State of the rows, after the step was planned and before the next one.
            cache: Their pages.
            rows: [n] int32. Rows in use, as the policy returned them for the step.
            slices: [n, 3] int32. As in the step's plan.
            logits: [m, 2] int32. As in the step's plan.
        """
        decodes = len(rows) == running.used == len(slices) == len(logits) and not np.count_nonzero(slices[:, 2] != 1)
        if not decodes or np.count_nonzero(slices[:, 0] != rows):
            return None
        size, ends = cache.layout.page_size, slices[:, 1] + 1
        own_pages = cache.lack_a_page(rows, ends + size)  # no page but those of its tokens
        anew = np.count_nonzero(running.lost[rows] > ends)  # tokens that `Counters.recomputed` is to count
        return DecodingRows(running, rows, slices, logits, size) if own_pages and not anew else None

    @property
    def due(self) -> NDArray[np.intp]:
        """Returns the places in `rows` of those that need a page for their next token."""
        place = self._steps % self._page_size
        return self._order[self._ends[place - 1] if place else 0 : self._ends[place]]

    def advance(self) -> None:
        """Goes on to the next step. A new array has its slices: earlier plans keep theirs."""
        self.slices = self.slices + self._further
        self._steps += 1
        self.steps_left -= 1
