"""Continuous batching: every step mixes decodes with chunked prefill under a token budget.

There is no prefill phase and no decode phase: a row has `length` tokens, `scheduled` of which are computed, and each
step closes the gap as far as budget and pages allow. Decodes go first, then running prefills, then the waiting queue.
Order is the policy's. The victim of a preemption is the policy's last row that was preempted fewer than
`max_preemptions` times (`scheduler.running_work` has the exact bound); it waits in front of all newcomers. The policy's
first row is never a victim, so work always ends.

`schedule` and `commit` are pure: time comes in as an argument, and the same calls give the same plans.

Sources: Orca (Yu et al., OSDI 2022) for iteration-level scheduling; PagedAttention (Kwon et al., SOSP 2023) for pages
and preemption by recompute; Sarathi-Serve (Agrawal et al., OSDI 2024) for chunked prefill beside decodes.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.ledger import audit
from cache_manager.manager import CacheManager
from scheduler.admission import Admission
from scheduler.backpressure import Backpressure
from scheduler.closing_time import ClosingTime
from scheduler.costs import SwapCost
from scheduler.counters import Counters
from scheduler.drafting import Drafting
from scheduler.drafts import NO_DRAFTS, Drafter, Ints
from scheduler.event_intake import EventIntake
from scheduler.events import (
    SHORT_HASH,
    End,
    EngineStats,
    Event,
    KVEvents,
    NewTokens,
    PromptPart,
    StepOutputs,
)
from scheduler.in_flight import InFlight
from scheduler.jump_forward import JumpForward
from scheduler.lockstep import Lockstep
from scheduler.page_forecast import PageForecast
from scheduler.policies import POLICIES
from scheduler.policy import SchedulingPolicy
from scheduler.preemption import Preemption
from scheduler.preemption_cause import PreemptionCause
from scheduler.request import Request
from scheduler.results import Results
from scheduler.rows import Index
from scheduler.running import Running
from scheduler.running_work import RunningWork
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult, transfer_bytes
from scheduler.step_time import Pace, StepTime

AUDIT_STEPS = 1024  # between two audits of the ledger
SWAP_RETRY_STEPS = 256  # between two tries of swapping while it takes longer than computing again

log = logging.getLogger("quire.scheduler")

TRANSFER_RATE = 5e7  # bytes of transferred pages a second, at least


class Scheduler:
    """Plans steps for one engine, on the pages of `cache`.

    Args:
        hasher: None goes without a prefix cache.
        drafter: Guesses tokens, at most `settings.draft_tokens` a row; None guesses none.
        policy: None makes the one that `settings.policy` names.
        holds: Any sequence, not only one with a grammar, is admitted after a `Ready` of its attempt alone, see
            `scheduler.readiness`.

    Attributes:
        intake: Takes in events.
        lockstep: Plans steps in which all rows decode.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        queue_limits: QueueLimits,
        cache: CacheManager,
        hasher: BlockHasher | None = None,
        drafter: Drafter | None = None,
        policy: SchedulingPolicy | None = None,
        holds: bool = False,
    ) -> None:
        self.settings = settings
        self.policy = policy or POLICIES[settings.policy](settings, cache.layout.tokens_in(cache.pool.total))
        self.queue_limits = queue_limits
        self.cache = cache
        layout, pages = cache.layout, cache.pool.total
        self.backpressure = Backpressure(queue_limits, layout.tokens_in(pages), settings.max_sequences)
        self._counters = Counters()
        self._running = Running(settings.max_sequences, cache, self._counters, self.policy, holds)
        self.rows, self.queue = self._running.rows, self._running.queue
        forecast = PageForecast(settings.schedule_conservativeness, self._running, cache, self.backpressure)
        self._admission = Admission(settings, self._running, cache, hasher, self._counters, self.policy, forecast)
        self.intake = EventIntake(
            settings, queue_limits, cache, self._running, self._admission, self.backpressure, self.policy
        )
        self._attempts = self._running.attempts
        self._drafting = None if drafter is None else Drafting(drafter, settings, self._running, cache, self._counters)
        self.lockstep = Lockstep(
            settings, self._running, cache, self._admission, self.policy, self._drafting is not None
        )
        self._preemption = Preemption(settings, self._running, cache, self._admission, self.policy)
        self._running_work = RunningWork(settings, self._running, cache, self.policy, self._drafting is not None)
        self._jump_forward = JumpForward(self._running, self._counters) if settings.jump_forward else None
        self._results = Results(self._running, cache, self.backpressure, self._drafting, self._jump_forward)
        self._in_flight: deque[InFlight] = deque()
        self._steps = 0
        self._swap_cost = SwapCost()
        self._closing_time = ClosingTime(self.rows, settings.depth)
        self._step_time = None if settings.target_itl is None else StepTime()
        self._last_commit = -math.inf

    @property
    def running(self) -> Running:
        """Rows in use, searches, and what the next plan reports of them."""
        return self._running

    # For the engine's loop

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits, or a step is in flight."""
        return bool(self.rows.used or len(self.queue) or self._in_flight)

    @property
    def steps_in_flight(self) -> int:
        """Number of planned steps whose results have not come."""
        return len(self._in_flight)

    @property
    def held(self) -> Mapping[int, Request]:
        """Requests by attempt, of which waiting sequences are held until a `Ready` comes."""
        return self._running.held

    @property
    def is_held(self) -> bool:
        """Whether all of its work waits for a `Ready`, so that no step can be planned."""
        if not self.held or self.rows.used or self._in_flight:
            return False
        if self._admission.is_isolated(self._steps) and self._admission.isolated in self.held:
            return True
        return all(attempt in self.held for attempt in self.queue.attempts())

    @property
    def has_news(self) -> bool:
        """Whether `commit` would report something even without a step."""
        return bool(self._attempts.ends or self._admission.has_news or self.intake.has_answers)

    @property
    def pending_ends(self) -> tuple[End, ...]:
        """Ends that the next `commit` will report."""
        return tuple(self._attempts.ends)

    @property
    def draws_are_checked(self) -> bool:
        """Whether rows may have draft tokens, so that not every draw counts."""
        return self._drafting is not None

    def stats(self) -> EngineStats:
        seconds = 0.0
        if len(self.queue):
            seconds = self.backpressure.predicted_wait(*self.intake.will_wait(), self.queue.mean_output)
        isolated = self._admission.is_isolated(self._steps)
        return self._counters.stats(self.rows, self.queue, self.cache, seconds, isolated)

    def live_attempts(self) -> list[int]:
        return self._attempts.live()

    def expected_seconds(self, plan: StepPlan) -> float | None:
        """Predicts how long a step will take; None before the first step, and for one that encodes images."""
        if any(join.images for join in plan.joins):
            return None
        computing = self.backpressure.cost.expected(self._computed(plan.slices))
        return None if computing is None else computing + transfer_bytes(plan.joins) / TRANSFER_RATE

    def _computed(self, slices: Index) -> int:
        """Returns the tokens that slices take to compute."""
        return int(slices[:, 1 if self.settings.recompute else 2 :].sum())

    # Planning

    def schedule(self, now: float, events: Seq[Event]) -> StepPlan | None:
        """Takes in events and plans the next step.

        Args:
            now: Seconds on a monotonic clock.
            events: Since the last call.

        Returns:
            The plan. None where there is nothing to compute, or where `settings.depth` steps are in flight: then events
            are taken in alone.
        """
        self.cache.pool.begin(now, self._steps)
        self.cache.pool.swaps = self.cache.pool.tier is not None and self._swapping_pays()
        for event in events:
            self.intake.take(event, now)
        self.intake.expire(now)
        if self.held:
            self._running.forget_ended()
        if len(self._in_flight) >= self.settings.depth:
            return None
        if (further := self.lockstep.next_step(now, self._steps)) is not None:
            flown, logits = further
            return self._launched(flown, logits, NO_DRAFTS)
        self._preemption.make_way(now, self._steps)
        wanted, preempted = self._running_work.make_room(now)
        drafts = {} if self._drafting is None or preempted else self._drafting.propose(wanted)
        pace = None if self._step_time is None else Pace(self._step_time, self.settings.target_itl or 0.0)
        slices = self._running_work.slices(wanted, drafts, pace)
        if not preempted:
            self._admission.admit(now, self._steps, slices)
        work = slices.array()
        if not len(work):
            return None
        plan = self._plan(now, work, drafts)
        self.lockstep.planned(wanted.rows, plan)
        return plan

    def _swapping_pays(self) -> bool:
        """Whether a page comes from the host sooner than it is computed, by the costs measured so far."""
        layout, page = self.cache.layout, self._swap_cost.page_seconds
        _, token = self.backpressure.cost.fit()
        if page is None or not token or self._steps % SWAP_RETRY_STEPS == 0:
            return True
        return page * len(layout.groups) < token * layout.page_size

    def _plan(self, now: float, work: Index, drafts: dict[int, Ints]) -> StepPlan:
        rows, step, running = self.rows, self._steps, self._running
        which, starts, counts = work[:, 0].astype(np.intp), work[:, 1], work[:, 2]
        ends, length, lost = starts + counts, rows.length[which], rows.lost[which]
        if np.count_nonzero(lost):
            self._counters.recomputed += int(np.maximum(np.minimum(lost, ends) - starts, 0).sum())
        packed = np.cumsum(counts)
        rows.advance(which, ends, int(packed[-1]), step)
        if drafts:
            length = length + rows.drafts[which]
        (draws,) = ((ends == length) & (length < rows.max_length[which])).nonzero()
        logits = np.empty((len(draws), 2), np.int32)
        logits[:, 0], logits[:, 1] = packed[draws] - 1, work[draws, 0]
        logits, drafted = self._forked(logits), None
        drawing = logits[:, 1].astype(np.intp)
        if running.jumping:
            running.jumping.difference_update(drawing.tolist())
        rows.length[drawing[~rows.searches[drawing]] if running.beams else drawing] += 1
        if drafts and self._drafting is not None:
            checked = np.fromiter(drafts, np.int32)
            rows.length[checked] += rows.drafts[checked]
            logits, drafted = self._drafting.draws(logits, drafts)
            drawing = logits[:, 1].astype(np.intp)
        flown = InFlight(
            step, now, work, self._computed(work), drawing, rows.serial.copy(), rows.departures, 0, drafted
        )
        return self._launched(flown, logits, _pairs(drafts) if drafts else NO_DRAFTS)

    def _launched(self, flown: InFlight, logits: Index, drafts: Ints) -> StepPlan:
        """Returns the plan of a step, with all that has changed since the last plan."""
        running, pool = self._running, self.cache.pool
        joins, running.joins = tuple(running.joins), []
        changes = pool.take_changes()
        outs, ins = changes.swap_outs(), changes.swap_ins()
        filled = sum(len(join.transfer.pages) for join in joins if join.transfer is not None) if joins else 0
        if swapped := len(outs) + len(ins) + filled:
            flown = replace(flown, swapped=swapped)
        self._in_flight.append(flown)
        self._steps += 1
        self._counters.peak = max(self._counters.peak, pool.total - pool.free)
        return StepPlan(
            flown.step,
            running.take_leaves(),
            joins,
            changes.grown(),
            changes.copies(),
            outs,
            ins,
            changes.freed_pages(),
            flown.slices,
            logits,
            running.take_forced(),
            drafts,
            running.take_jumps(),
            self._closing_time.take(flown.launched),
        )

    def _forked(self, logits: Index) -> Index:
        """Gives sequences that go on from a prompt computed in this step their rows; they draw from the same logits.

        Args:
            logits: [n, 2] int32, as in the plan, before.

        Returns:
            [m, 2] int32 with their draws behind the others'.
        """
        rows, draws = self.rows, list[tuple[int, int]]()
        if not np.count_nonzero(rows.siblings):
            return logits
        forked = (rows.siblings[logits[:, 1]] > 0) & ~rows.searches[logits[:, 1]]
        for offset, row in logits[forked].tolist():
            draws += [(offset, self._running.fork(row, sibling)) for sibling in rows.take_siblings(row)]
        return np.concatenate((logits, np.array(draws, np.int32).reshape(-1, 2)))

    # Results

    def commit(self, result: StepResult | None, now: float) -> StepOutputs:
        """Takes in the result of the oldest step in flight.

        Args:
            result: None where no step ran and only starts, ends and answers are to be reported.
            now: Seconds on a monotonic clock.

        Raises:
            RuntimeError: The result is of another step.
        """
        new, parts, took = None, tuple[PromptPart, ...](), tuple[float, ...]()
        if result is not None:
            flown = self._in_flight.popleft()
            if flown.step != result.step:
                raise RuntimeError(f"step {result.step} was collected, step {flown.step} is the oldest in flight")
            seconds = now - max(flown.launched, self._last_commit)  # with two in flight, a step starts when one ends
            took, self._last_commit = (seconds,), now
            self._observe(flown, result, seconds)
            self.cache.pool.begin(now, self._steps)
            self._retire(result.step)
            for row in self.cache.arrived(result.step, result.lost_pages):
                self._running.preempt(row, PreemptionCause.LOST_COPY)  # it computes those tokens again
            if result.step % AUDIT_STEPS == 0:
                self._audit()
            new, parts = self._results.take(flown, result)
            if self._running.jumps or self._running.sitting_out:
                self.lockstep.leave()
        new = new or NewTokens.none()
        ends, stats = self._attempts.take_ends(), self.stats()
        return StepOutputs(
            new.attempts,
            new.indices,
            new.positions,
            new.tokens,
            new.logprobs,
            self._admission.take_starts(now),
            ends,
            stats,
            took,
            self.intake.take_answers(),
            parts,
            kv_events=self._kv_events(),
        )

    def _kv_events(self) -> tuple[KVEvents, ...]:
        log = self.cache.prefix.index.log
        if log is None:
            return ()
        removed, added = (b"".join(one[:SHORT_HASH] for one in hashes) for hashes in log.take())
        return (KVEvents(removed, added),) if removed or added else ()

    def _observe(self, flown: InFlight, result: StepResult, seconds: float) -> None:
        self._counters.computed += flown.computed
        self._counters.images_encoded += result.images_encoded
        self.backpressure.observe_step(flown.computed, seconds - result.swap_seconds)
        if len(result.tokens):
            self._closing_time.observe(seconds)
        if self._step_time is not None and not result.images_encoded:
            self._step_time.observe(flown.slices, seconds - result.swap_seconds)
        if flown.swapped:
            self._swap_cost.observe(flown.swapped, result.swap_seconds)

    def _retire(self, step: int) -> None:
        self._running.retired = step
        self._counters.steps = step + 1
        self.cache.pool.retire(step)

    def _audit(self) -> None:
        """Checks the ledger. A wrong page is a bug: it must become neither a wrong token nor an outage."""
        wrong = audit(self.cache)
        if wrong:
            log.error("%s. They are set aside; please report this", wrong)


def _pairs(drafts: Mapping[int, Ints]) -> Ints:
    """Returns [n, 2] int32 of row, token."""
    return np.concatenate(
        [np.stack((np.full(len(tokens), row, np.int32), tokens), 1) for row, tokens in drafts.items()]
    )
