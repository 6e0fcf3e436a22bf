"""Costs of a step: how long it takes, by what it computes.

seconds = fixed + a x decodes + b x their context + c x prefilled tokens + d x pairs of a prefilled token and one that
it sees + curve(tokens). Decodes read their context from memory, and prefill computes on it: so these have costs of
their own. A curve says what the products of so many tokens take, where that is not linear: a step of few tokens waits
for the weights, and kernels have sizes at which they are better.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler.rows import Index

MOST_SECONDS = 1e6
MOST_TOKENS, MOST_POINTS = 2**31, 64  # of a curve in a file
LINEAR = ("fixed", "decode", "context", "prefill", "pair")


def pairs(start: int, count: int) -> float:
    """Returns how many pairs of a token and one that it sees `count` tokens from `start` on have."""
    return count * start + count * (count + 1) / 2


@dataclass(slots=True)  # not frozen, see `scheduler.events.EngineStats`
class StepWork:
    """Work of a step: tokens, and what they see."""

    decodes: int = 0
    context: float = 0.0
    prefill: int = 0
    pairs: float = 0.0

    @staticmethod
    def of(slices: Index) -> "StepWork":
        """slices: [n, 3] int32, as in the plan."""
        firsts, lengths = slices[:, 1:].T.tolist()
        if lengths.count(1) == len(lengths):  # most steps, of few rows each: whole numbers, so sums are exact
            return StepWork(len(firsts), float(sum(firsts) + len(firsts)))
        starts, counts = slices[:, 1].astype(np.float64), slices[:, 2].astype(np.float64)
        one = counts == 1
        seen = counts * starts + counts * (counts + 1) / 2
        return StepWork(
            int(np.count_nonzero(one)), float(seen[one].sum()), int(counts[~one].sum()), float(seen[~one].sum())
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, by its work.

    Attributes:
        fixed: Of a step, whatever it computes.
        decode: Of a sequence that decodes.
        context: Of each token that such a sequence sees.
        prefill: Of a prefilled token.
        pair: Of a prefilled token and one that it sees.
        curve: Points of the curve: tokens of a step, increasing, and the seconds that it adds. It is linear between
            them, and beyond the last as between the last two. None or at least two.
    """

    fixed: float
    decode: float
    context: float
    prefill: float
    pair: float
    curve: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        times = {name: getattr(self, name) for name in LINEAR}
        times |= {f"curve[{i}]": seconds for i, (_, seconds) in enumerate(self.curve)}
        for name, value in times.items():
            if not 0 <= value <= MOST_SECONDS:
                raise ValueError(f"costs.{name} is {value!r:.30}, must be in [0, {MOST_SECONDS:g}] seconds")
        tokens = [count for count, _ in self.curve]
        if len(tokens) == 1 or any(after <= before for before, after in pairwise([0, *tokens])):
            raise ValueError("costs.curve must be at least two points, with more tokens in each than in the one before")

    def seconds(self, slices: Index) -> float:
        """Returns the seconds of a planned step. slices: [n, 3] int32, as in its plan."""
        return self.seconds_of(StepWork.of(slices))

    def seconds_of(self, work: StepWork) -> float:
        """Returns the seconds of a step with this work."""
        seconds = (
            self.fixed
            + self.decode * work.decodes
            + self.context * work.context
            + self.prefill * work.prefill
            + self.pair * work.pairs
        )
        return seconds + self._on_curve(work.decodes + work.prefill) if self.curve else seconds

    def _on_curve(self, tokens: int) -> float:
        """Returns the seconds of the curve; those of its first point for fewer tokens."""
        i = min(max(1, bisect_left(self.curve, (tokens, 0.0))), len(self.curve) - 1)
        (least, fewer), (most, more) = self.curve[i - 1 : i + 1]
        return max(0.0, fewer + (more - fewer) * max(0, tokens - least) / (most - least))

    def faster(self, factor: float) -> "StepCosts":
        """Returns the costs of a machine that is faster by a factor."""
        curve = tuple((tokens, seconds / factor) for tokens, seconds in self.curve)
        return StepCosts(**{name: getattr(self, name) / factor for name in LINEAR}, curve=curve)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "StepCosts":
        """Returns the costs in an object of these fields. Raises ValueError for another object."""
        times, points = {name: value for name, value in values.items() if name != "curve"}, values.get("curve", ())
        if set(times) != set(LINEAR) or not all(isinstance(value, int | float) for value in times.values()):
            raise ValueError(f"costs must be numbers named {', '.join(LINEAR)}, and may have a curve")
        if not isinstance(points, list | tuple) or len(points) > MOST_POINTS or not all(map(_is_point, points)):
            raise ValueError(f"costs.curve must be a list of at most {MOST_POINTS} pairs: tokens, seconds")
        return StepCosts(**times, curve=tuple((tokens, float(seconds)) for tokens, seconds in points))


def _is_point(value: Any) -> bool:
    """Whether a value of a file is a number of tokens with seconds."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    tokens, seconds = value
    return type(tokens) is int and tokens <= MOST_TOKENS and isinstance(seconds, int | float)
