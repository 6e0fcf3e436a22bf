"""An engine on a virtual clock: the scheduler itself, and steps that take as long as their costs say."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHasher
from cache_manager.kv_events import KVEventLog
from scheduler.blueprint import Blueprint
from scheduler.events import Event, Logprobs, Ready, StepOutputs
from scheduler.rows import Rows
from scheduler.step import StepPlan, StepResult
from scheduler.step_costs import StepCosts

Ints = NDArray[np.int32]
Draws = Callable[[Rows, NDArray[np.intp]], Ints]
"""Returns the token that each of these rows draws, [n] int32. The array may be returned again: nothing writes to it."""

SECRET = bytes(32)  # which block hashes are equal does not depend on it
SLOWEST = 1e9  # factor
LOOK_SECONDS = 1.0  # between two looks at an engine whose waiting requests can only time out


@dataclass(slots=True, eq=False)  # not frozen, see `scheduler.events.EngineStats`
class _Launched:
    """A step in flight. ends: when its result comes, in seconds."""

    ends: float
    plan: StepPlan
    result: StepResult


class SimulatedEngine:
    """One engine. It does something at `due`: `wake` it then, not before.

    Attributes:
        scheduler: Its scheduler.
        due: Seconds on the virtual clock; infinity where it waits for events.
        slowed: Factors of the time of steps that are yet to be planned.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        costs: StepCosts,
        draws: Draws,
        kv_events: bool = False,
        ready_after: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """Makes an engine without work.

        Args:
            blueprint: Of its scheduler. Drafts are not simulated.
            costs: Of its steps.
            draws: Draws tokens.
            kv_events: Whether outputs report the changes of its prefix cache.
            ready_after: Returns the seconds that an attempt is held for, as its grammar is compiled, say.
        """
        blueprint = replace(blueprint, settings=replace(blueprint.settings, draft_tokens=0))
        cache = blueprint.cache()
        if kv_events and blueprint.prefix_cache:
            cache.prefix.index.log = KVEventLog()
        hasher = BlockHasher(SECRET, b"", blueprint.layout.page_size) if blueprint.prefix_cache else None
        self.scheduler = blueprint.scheduler(cache, hasher)
        self._depth, self._costs, self._draws = blueprint.settings.depth, costs, draws
        self._events: list[Event] = []
        self._flying: deque[_Launched] = deque()
        self._ready_after, self._ready_at = ready_after, dict[int, float]()
        self.due, self._busy = math.inf, 0.0
        self._logits, self._drawing = np.empty((0, 2), np.int32), np.empty(0, np.intp)  # of the last plan
        self._logprobs = _certain(0)  # of the last step: all steps of as many tokens share theirs
        self.slowed: list[float] = []

    def put(self, event: Event, now: float) -> None:
        """Gives it an event, which it looks at before its next plan. now: seconds."""
        self._events.append(event)
        if not self._flying:
            self.due = now

    def wake(self, now: float, take: Callable[[StepOutputs], object]) -> None:
        """Ends the step whose result comes now, and plans as many as may be in flight.

        Args:
            now: Seconds: `due`.
            take: Takes the outputs of the step, or of no step where there is other news. The next plan is made after
                it, so an event that it `put`s counts for that.
        """
        scheduler, outputs = self.scheduler, None
        self._get_ready(now)
        if self._flying and self._flying[0].ends <= now:
            outputs = scheduler.commit(self._flying.popleft().result, now)
            take(outputs)
        while len(self._flying) < self._depth:
            events, self._events = self._events, []
            if (plan := scheduler.schedule(now, events)) is None:
                break
            seconds = self._costs.seconds(plan.slices)
            if self.slowed:
                seconds *= min(math.prod(self.slowed), SLOWEST)
            begins = self._flying[-1].ends if self._flying else now
            self._flying.append(_Launched(begins + seconds, plan, self._result(plan)))
            self._busy += seconds
        if scheduler.pending_ends or (outputs is None and not self._flying):
            take(scheduler.commit(None, now))
        self._note_held(now)
        self.due = self._flying[0].ends if self._flying else self._idle_due(now)

    def _get_ready(self, now: float) -> None:
        """Makes the events of attempts that need not be held any more."""
        if not self._ready_at:
            return
        held = self.scheduler.held
        self._ready_at = {attempt: at for attempt, at in self._ready_at.items() if attempt in held}
        ready = [attempt for attempt, at in self._ready_at.items() if at <= now]
        self._events += [Ready(attempt) for attempt in ready]

    def _note_held(self, now: float) -> None:
        """Notes until when attempts are held that were not before. One that was preempted is ready at once."""
        for attempt in self.scheduler.held:
            if attempt not in self._ready_at:
                self._ready_at[attempt] = now + self._ready_after(attempt)

    def _idle_due(self, now: float) -> float:
        if self.scheduler.has_news:
            return now
        moments = [max(now, at) for at in self._ready_at.values()]
        return min(moments, default=now + LOOK_SECONDS) if self.scheduler.has_work else math.inf

    def busy_until(self, now: float) -> float:
        """Returns the seconds up to now in which a step ran."""
        return self._busy - max(0.0, self._flying[-1].ends - now if self._flying else 0.0)

    def _result(self, plan: StepPlan) -> StepResult:
        if plan.logits is not self._logits:  # steps of rows in lockstep have one and the same array
            self._logits, self._drawing = plan.logits, plan.logits[:, 1].astype(np.intp)
        tokens = self._draws(self.scheduler.rows, self._drawing)
        if len(tokens) != len(self._logprobs.chosen):
            self._logprobs = _certain(len(tokens))
        return StepResult(plan.step, tokens, self._logprobs)


def _certain(tokens: int) -> Logprobs:
    """Returns the logprobs of so many tokens, each drawn with probability 1."""
    nothing = np.empty((tokens, 0), np.int32), np.empty((tokens, 0), np.float32)
    return Logprobs(np.zeros(tokens, np.float32), np.ones(tokens, np.int32), *nothing)
