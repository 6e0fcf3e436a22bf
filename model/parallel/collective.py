"""Collectives of a rank group in a forward pass, and the parts of a model that need them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from model.forward import ForwardBatch
from model.parallel.shard import Shard
from model.parallel.sums import Adder, add_in_order


class ShardedPart(Protocol):
    """A product, or a part of a layer, whose input rows are the tokens of a step."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor: ...


class Collective(Protocol):
    """Collectives of a rank group. All ranks make the same calls in the same order.

    A call raises RankLost where a rank does not come. The law of sums: parts are added in the order of ranks, in
    float32. So the bits of a row depend neither on the rows beside it nor on its place.

    Attributes:
        name: What exchanges tensors.
        shard: This rank's shard.
        runs_ahead: Whether a call returns before its exchange is done, which is put on the stream of the device. So
            steps can be launched ahead, and recorded as CUDA graphs.
    """

    name: str
    shard: Shard
    runs_ahead: bool

    def sum(self, x: Tensor, add: Adder = add_in_order) -> Tensor:
        """Returns the sum of all ranks' x [tokens, width], in x's dtype, on all ranks.

        Args:
            x: This rank's part.
            add: Adds parts by the law, where the collective has no sum of its own.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x [tokens, width] as [ranks, tokens, width], on all ranks."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns all ranks' x [n, widths[rank]] side by side on rank 0, and x on the others."""

    def started(self) -> None:
        """Ends the time in which exchanges wait long, since ranks compile: all have done a step. Also called again."""

    def fail(self, why: str) -> None:
        """Makes all calls that wait, now or later, raise RankLost with this reason. From any thread."""

    def lives(self) -> list[int]:
        """Returns for each rank a number that changes while it lives, 0 before.

        Called often: the call is this rank's own sign of life. Empty where there are none and a wait ends by itself.
        """

    def close(self) -> None:
        """Releases memory and connections."""


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """A part of a layer that is divided among ranks; their results are added up."""

    part: ShardedPart
    collective: Collective

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.collective.sum(self.part(x, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """An output layer whose outputs are divided among ranks. Only rank 0 gets all of them."""

    part: ShardedPart
    widths: Sequence[int]
    collective: Collective

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.collective.gather(self.part(x, batch), self.widths)


def _only_own(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [said]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """A rank and its connection with the others.

    Attributes:
        collective: None for a single rank.
        exchange: Sends a value to all ranks and returns what each has sent, in their order; all of them call it. Raises
            RankLost.
    """

    shard: Shard = field(default_factory=Shard)
    collective: Collective | None = None
    exchange: Callable[[Mapping[str, Any]], list[Mapping[str, Any]]] = _only_own

    def summed(self, part: ShardedPart) -> ShardedPart:
        return part if self.collective is None else Summed(part, self.collective)

    def gathered(self, part: ShardedPart, places: Sequence[slice]) -> ShardedPart:
        """Returns the output layer whose outputs the ranks have at these `places`."""
        if self.collective is None:
            return part
        return Gathered(part, [place.stop - place.start for place in places], self.collective)


ONE_RANK = Ranks()
