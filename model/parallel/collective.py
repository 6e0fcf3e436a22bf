"""What ranks do together in the middle of a forward pass, and the parts of a model that need it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from model.parallel.shard import Shard

if TYPE_CHECKING:
    from model.kernels.buffer import Buffer
    from model.kernels.program import Call, Machine
    from model.parallel.cut import Exchange

Part = Callable[[Tensor], Tensor]


class Turns(Protocol):
    """What the ranks do together in a program of kernels, in the order in which it is written. Buffers are of float32,
    with as many rows as the largest step; rows: address of the cell with the number of those of a step.
    """

    def to_sum(self, rows: int, width: int) -> "Buffer":
        """Where this rank's part of the next sum goes."""

    def summed(self, rows: int, y: "Buffer", width: int, add: bool) -> "Call | Exchange":
        """The sum of what all have, into y or, with `add`, to what stands there. width: a multiple of 16."""

    def to_gather(self, rows: int, width: int) -> "Buffer":
        """Where this rank's part of what is gathered goes. width: of the widest part."""

    def gathered(self, rows: int, y: "Buffer", widths: Sequence[int]) -> "Call | Exchange":
        """Of parts of these widths, side by side into rank 0's y."""

    def program(self, machine: "Machine", calls: "Sequence[Call | Exchange]") -> "Runs":
        """Of calls among which are all that these turns have made. It raises RankLost."""


class Runs(Protocol):
    """A program, or several with something between them."""

    def run(self) -> None: ...


class Collective(Protocol):
    """All ranks call the same in the same order. A call raises RankLost where a rank does not come.

    The law of sums: parts are added in the order of ranks, in float32, so that the bits of a row depend neither on the
    rows beside it nor on its place.
    """

    name: str

    def sum(self, x: Tensor) -> Tensor:
        """x: [tokens, width], a part of each rank. The sum, in x's dtype, in all ranks."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x: [n, widths[rank]]. In rank 0 what all have, side by side; in others x."""

    def turns(self, *shapes: tuple[int, int]) -> Turns:
        """For a new program of kernels of a CPU, whose parts have these rows and columns at most."""

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

    def __call__(self, x: Tensor) -> Tensor:
        return self.collective.sum(self.part(x))


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """An output layer of which each rank has so many outputs. Only rank 0 gets all of them."""

    part: Part
    widths: Sequence[int]
    collective: Collective

    def __call__(self, x: Tensor) -> Tensor:
        return self.collective.gather(self.part(x), self.widths)


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
