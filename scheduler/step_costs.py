"""Costs of a step: how long it takes, by what it computes.

seconds = fixed + a x decodes + b x their context + c x prefilled tokens + d x pairs of a prefilled token and one that
it sees. Decodes read their context from memory, and prefill computes on it: so these have costs of their own.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from scheduler.rows import Index

MOST_SECONDS = 1e6


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
    """

    fixed: float
    decode: float
    context: float
    prefill: float
    pair: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value <= MOST_SECONDS:
                raise ValueError(f"costs.{name} is {value!r:.30}, must be in [0, {MOST_SECONDS:g}] seconds")

    def seconds(self, slices: Index) -> float:
        """Returns the seconds of a planned step. slices: [n, 3] int32, as in its plan."""
        return self.seconds_of(StepWork.of(slices))

    def seconds_of(self, work: StepWork) -> float:
        """Returns the seconds of a step with this work."""
        return (
            self.fixed
            + self.decode * work.decodes
            + self.context * work.context
            + self.prefill * work.prefill
            + self.pair * work.pairs
        )

    def faster(self, factor: float) -> "StepCosts":
        """Returns the costs of a machine that is faster by a factor."""
        return StepCosts(*(value / factor for value in asdict(self).values()))

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "StepCosts":
        """Returns the costs in an object of these fields. Raises ValueError for another object."""
        names = [one.name for one in fields(StepCosts)]
        if set(values) != set(names) or not all(isinstance(value, int | float) for value in values.values()):
            raise ValueError(f"costs must be numbers named {', '.join(names)}")
        return StepCosts(**values)
