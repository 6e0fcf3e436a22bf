"""Executor that computes nothing: a step takes the modelled time, and draws what `rows.py` says."""

import time
from collections import deque

import numpy as np

from model.simulated.rows import SimulatedRows
from model.simulated.timeline import Timeline
from model.structured.grammar_store import GrammarStore
from scheduler.step import StepPlan, StepResult
from scheduler.step_costs import StepCosts


class SimulatedExecutor:
    """`Executor` of a simulated engine. Any number of steps may be in flight.

    It reads no page, so it does nothing for copies, swaps and transfers.

    Attributes:
        flying: Steps in flight, oldest first: when each ends, and its result.
    """

    def __init__(
        self, rows: SimulatedRows, costs: StepCosts, timeline: Timeline, grammars: GrammarStore | None = None
    ) -> None:
        """Makes an executor.

        Args:
            rows: Its batch rows.
            costs: Of a step.
            timeline: Says when steps end, and waits for it.
            grammars: Grammars of the rows, which it ends with itself.
        """
        self._rows, self._costs, self._timeline, self._grammars = rows, costs, timeline, grammars
        self.flying: deque[tuple[float, StepResult]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Draws the tokens of a step, and begins its time."""
        began, rows = time.perf_counter(), self._rows
        for row in plan.leaves.tolist():
            rows.leave(row)
        for join in plan.joins:
            rows.join(join)
        for row, token in plan.forced.tolist():
            rows.force(row, token)
        for row, most in plan.closing.tolist():
            rows.close_within(row, most)
        parts = rows.prompt_parts(plan.slices.tolist())
        drawing = plan.logits[:, 1].astype(np.int64)
        tokens, logprobs, faults = rows.draw(drawing, positions_of(plan) - rows.prompt[drawing] + 1)
        packing = time.perf_counter() - began
        result = StepResult(plan.step, tokens, logprobs, faults, prompt_parts=parts, packing_seconds=packing)
        seconds = self._costs.seconds(plan.slices) if len(plan.slices) else 0.0
        self.flying.append((self._timeline.launch(seconds), result))

    def collect(self) -> StepResult:
        """Waits until the oldest step has taken its time, and returns its result."""
        end, result = self.flying.popleft()
        self._timeline.wait(end)
        return result

    def close(self) -> None:
        """Ends the thread that compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()


def positions_of(plan: StepPlan) -> np.ndarray:
    """Returns the position in its sequence of each token that a row draws after, [n] int64."""
    starts, counts = plan.slices[:, 1].astype(np.int64), plan.slices[:, 2].astype(np.int64)
    ends, offsets = np.cumsum(counts), plan.logits[:, 0].astype(np.int64)
    owner = np.searchsorted(ends, offsets, side="right")
    return starts[owner] + offsets - (ends - counts)[owner]
