"""How long a step will take, learned from the steps that ran, and how much prefill a target leaves room for.

The costs of `StepCosts` are fitted by least squares with none below 0, older steps fading.

Source: the step budget in tokens of Sarathi-Serve (Agrawal et al., OSDI 2024), here in seconds.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import Index
from scheduler.step_costs import StepCosts, StepWork, pairs

MEMORY = 0.98  # weight of a step against the one after it: about 50 steps count
LEAST_PREFILL = 16  # tokens of a step, also where the target leaves no room: a prompt has to come to its end
OUTLIER = 3.0  # times the prediction: a pause of the machine counts as no more
SETTLED = 20  # steps, after which there are outliers
UNITS = np.array((1.0, 16.0, 65536.0, 256.0, 65536.0))  # of the features, so that none outweighs the others
PREFILL, PAIRS = 3, 4  # which of them are of prefill
DAMPING = 1e-10  # of the largest product: what cannot be told apart yet is shared between the costs
UNBOUNDED = 2**31  # tokens
GROWTH = 2  # of the work of a step, against what was tried before

Floats = NDArray[np.float64]


class StepTime:
    """Predicts the seconds of a step."""

    def __init__(self, memory: float = MEMORY, outlier: float = OUTLIER) -> None:
        """Makes it without steps.

        Args:
            memory: Weight of a step against the one after it.
            outlier: Times the prediction, as more than which no step counts.
        """
        self._outlier = outlier
        self._memory = memory
        self._products = np.zeros((len(UNITS), len(UNITS)))
        self._with_time = np.zeros(len(UNITS))
        self._costs = np.zeros(len(UNITS))  # of a unit of each feature
        self._steps = self._most_prefill = 0
        self._most_pairs = 0.0
        self._fitted = True

    def observe(self, slices: Index, seconds: float, weight: float = 1.0) -> None:
        """Learns from a step.

        Args:
            slices: [n, 3] int32, as in its plan.
            seconds: How long it took.
            weight: How much the square of its error counts.
        """
        work = StepWork.of(slices)
        self._most_prefill = max(self._most_prefill, work.prefill)
        self._most_pairs = max(self._most_pairs, work.pairs)
        features = _features(work)
        bounded = self._steps >= SETTLED and self._outlier < math.inf
        predicted = self._predicted(features) if bounded else 0.0
        seconds = min(max(0.0, seconds), self._outlier * predicted if predicted else math.inf)
        self._steps += 1
        self._products = self._memory * self._products + weight * np.outer(features, features)
        self._with_time = self._memory * self._with_time + weight * seconds * features
        self._fitted = False

    def costs(self) -> StepCosts:
        """Returns what was learned; zeros before the first step."""
        return StepCosts(*(self._fit() / UNITS).tolist())

    @property
    def knows_prefill(self) -> bool:
        """Whether a step has prefilled tokens."""
        return self._most_prefill > 0

    def expected(self, work: StepWork) -> float:
        """Predicts the seconds of a step; 0 before the first one."""
        return self._predicted(_features(work))

    def expected_of(self, slices: Index) -> float:
        """Predicts the seconds of a planned step. slices: [n, 3] int32, as in its plan."""
        return self.expected(StepWork.of(slices))

    def prefill_within(self, seconds: float, start: int) -> int:
        """Returns how many tokens of a prompt, from position `start` on, are prefilled in a time.

        They are at most twice as many as in any step before, and see twice as many: what was not tried may cost more.
        """
        each, pair = (self._fit() / UNITS)[[PREFILL, PAIRS]].tolist()
        tried = min(GROWTH * self._most_prefill, _tokens_within(GROWTH * self._most_pairs, 0.0, 1.0, start))
        return min(tried, _tokens_within(seconds, each, pair, start))

    def _predicted(self, features: Floats) -> float:
        return float(self._fit() @ features)

    def _fit(self) -> Floats:
        """Returns the costs of a unit of each feature."""
        if not self._fitted:
            self._fitted, self._costs = True, nonnegative_fit(self._products, self._with_time)
        return self._costs


def nonnegative_fit(products: Floats, with_time: Floats) -> Floats:
    """Returns the costs of features by least squares.

    Those that come out below 0 are put at 0, the lowest first, and the others are fitted anew.

    Args:
        products: [n, n] float64. Sums over steps of the products of each two features.
        with_time: [n] float64. Sums over steps of each feature times the step's seconds.
    """
    costs, free = np.zeros(len(with_time)), np.arange(len(with_time))
    damped = products + DAMPING * products.max() * np.eye(len(with_time))
    while len(free):
        found = np.linalg.solve(damped[np.ix_(free, free)], with_time[free])
        if found.min() >= 0:
            costs[free] = found
            break
        free = np.delete(free, found.argmin())
    return costs


def _tokens_within(bound: float, each: float, pair: float, start: int) -> int:
    """Returns the most tokens from `start` on that cost no more, at a cost of each token and of each pair."""
    each += pair * (start + 0.5)
    if bound <= 0 or not each:
        return 0 if bound <= 0 else UNBOUNDED
    # pair / 2 x k^2 + each x k = bound, in the form that loses no digits where pair is small
    return int(min(2 * bound / (each + math.sqrt(each * each + 2 * pair * bound)), UNBOUNDED))


def _features(work: StepWork) -> Floats:
    return np.array((1.0, work.decodes, work.context, work.prefill, work.pairs)) / UNITS


class Pace:
    """The time that a step has for prefill beside the rows that decode."""

    def __init__(self, time: StepTime, target: float) -> None:
        """target: seconds that a step with decodes should take at most."""
        self._time, self._target = time, target
        self._work = StepWork()  # of rows that decode
        self._left: float | None = None  # seconds, once prefill has begun
        self._prefilled = 0

    def decodes(self, count: int, context: float) -> None:
        """Adds rows that decode one token each, and what these see."""
        work = self._work
        self._work = replace(work, decodes=work.decodes + count, context=work.context + context)

    def several(self, start: int, count: int) -> None:
        """Adds a row that decodes with drafts or a jump. As `StepWork.of`, it counts as prefill if it has several."""
        if count == 1:
            return self.decodes(1, start + 1)
        work = self._work
        self._work = replace(work, prefill=work.prefill + count, pairs=work.pairs + pairs(start, count))
        return None

    def most(self, start: int) -> int:
        """Returns how many tokens of a prompt may be prefilled from position `start` on, after what was `taken`."""
        if self._work == StepWork():
            return UNBOUNDED  # no stream waits for this step
        if self._left is None:
            self._left = self._target - self._time.expected(self._work)
        room = self._time.prefill_within(self._left, start) if self._time.knows_prefill else 0
        return max(room, LEAST_PREFILL - self._prefilled)

    def taken(self, start: int, count: int) -> None:
        """Counts prefill that the step has got."""
        self._prefilled += count
        if self._left is not None:
            with_it = StepWork(prefill=count, pairs=pairs(start, count))
            self._left -= self._time.expected(with_it) - self._time.expected(StepWork())
