"""A rank's part of a model without the other ranks: a step of it takes the memory that it takes with them."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from model.parallel.collective import Gathered, Summed
from model.parallel.norms import SharedGroup
from model.parallel.shard import Shard
from model.parallel.sums import LEAST_SAVED, Adder, add_in_order, sum_of_ranks

Part = TypeVar("Part")


@dataclass(slots=True, eq=False)
class Unconnected:
    """`Collective` that waits for no rank. The others' parts are zeros, and take the memory that they really take.

    Attributes:
        least_saved: As in `sum_of_ranks`.
    """

    shard: Shard
    runs_ahead: bool = False
    least_saved: int = LEAST_SAVED["nccl"]
    name: str = "none"

    def sum(self, x: Tensor, add: Adder = add_in_order) -> Tensor:
        return sum_of_ranks(x, self.shard.size, self, add, self.least_saved)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_zeros((self.shard.size, *x.shape))
        parts[self.shard.rank] = x
        return parts

    def all_to_all(self, x: Tensor) -> Tensor:
        parts = torch.zeros_like(x)
        parts[self.shard.rank] = x[self.shard.rank]
        return parts

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        parts = x.new_zeros((self.shard.size, len(x), max(widths)))
        parts[self.shard.rank, :, : x.shape[1]] = x
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def started(self) -> None: ...

    def fail(self, why: str) -> None: ...

    def lives(self) -> list[int]:
        return []

    def close(self) -> None: ...


def unconnected(part: Part) -> Part:
    """Returns a model, or a part of one, whose collectives are `Unconnected`. It has the same weights.

    Parts without collectives stay as they are.
    """
    return cast(Part, _changed(part))


def _changed(part: Any) -> Any:
    if isinstance(part, list | tuple):
        made = [_changed(one) for one in part]
        return part if all(map(operator.is_, made, part)) else made
    if not is_dataclass(part) or isinstance(part, type):
        return part
    before = {field.name: getattr(part, field.name) for field in fields(part)}
    after = {name: _changed(one) for name, one in before.items()}
    if isinstance(part, Summed | Gathered | SharedGroup):
        after["collective"] = Unconnected(part.collective.shard, part.collective.runs_ahead)
    return part if all(map(operator.is_, after.values(), before.values())) else type(part)(**after)
