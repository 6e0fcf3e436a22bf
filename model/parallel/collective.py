"""What ranks do together in the middle of a forward pass, and the parts of a model that need it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from model.forward import ForwardBatch
from model.parallel.shard import Shard


class Part(Protocol):
    """A product, or a part of a layer, whose rows are the tokens of a step."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor: ...


class Collective(Protocol):
    """All ranks call the same in the same order. A call raises RankLost where a rank does not come.

    The law of sums: parts are added in the order of ranks, in float32, so that the bits of a row depend neither on the
    rows beside it nor on its place.
    """

    name: str
    shard: Shard

    def sum(self, x: Tensor) -> Tensor:
        """x: [tokens, width], a part of each rank. The sum, in x's dtype, in all ranks."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x: [n, widths[rank]]. In rank 0 what all have, side by side; in others x."""

    def fail(self, why: str) -> None:
        """From any thread: whatever waits, now or later, raises RankLost with this."""

    def lives(self) -> list[int]:
        """Of each rank a number that changes while it lives, 0 before; called often, which is this rank's sign of life.
        Empty where there are no signs, and a wait ends by itself.
        """

    def close(self) -> None:
        """Lets go of memory and connections."""


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """A part of a layer of which each rank has a part: what all make, added up."""

    part: Part
    collective: Collective

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.collective.sum(self.part(x, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """An output layer of which each rank has so many outputs. Only rank 0 gets all of them."""

    part: Part
    widths: Sequence[int]
    collective: Collective

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.collective.gather(self.part(x, batch), self.widths)


def _told_nobody(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [said]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """A rank and what connects it with the others. collective: None for one alone. exchange: tells all ranks something
    and gives what each has told, in their order; all of them call it. Raises RankLost.
    """

    shard: Shard = field(default_factory=Shard)
    collective: Collective | None = None
    exchange: Callable[[Mapping[str, Any]], list[Mapping[str, Any]]] = _told_nobody

    def summed(self, part: Part) -> Part:
        return part if self.collective is None else Summed(part, self.collective)

    def gathered(self, part: Part, outputs: int) -> Part:
        if self.collective is None:
            return part
        places = [Shard(rank, self.shard.size).part(outputs) for rank in range(self.shard.size)]
        return Gathered(part, [place.stop - place.start for place in places], self.collective)


ALONE = Ranks()
