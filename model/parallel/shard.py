"""The part of a model that a rank has: heads, inner columns of MLPs, rows of the output layer.

The division is that of Megatron-LM (Shoeybi et al., 2019). Products that widen are divided by outputs, those that
narrow again by inputs. So the ranks' results are added up once for each attention and each MLP.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import TypeVar

from model.config import ModelConfig
from model.recurrent import RecurrentShape

Recurrence = TypeVar("Recurrence", bound=RecurrentShape)

MOST_RANKS = 64  # that an error names
GRAINS = (32, 16, 2, 1)  # columns that stay together where there are enough: kernels read them by vectors and panels


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank.

    Attributes:
        rank: 0 .. size - 1.
        size: The number of ranks.
        grain: Columns that stay together in `part`, as the blocks of a weight format.
    """

    rank: int = 0
    size: int = 1
    grain: int = 1

    def check(self, config: ModelConfig, queries: int = 1, keys: int = 1, why: str = "") -> None:
        """Checks that the heads of a model can be divided among the ranks.

        Args:
            config: Configuration of the model, undivided.
            queries: The elements of a rank's heads are a multiple of this.
            keys: The elements of its KV heads are a multiple of this.
            why: Reason for these multiples, appended to the error.

        Raises:
            ValueError: They cannot. The message names the degrees that can be.
        """
        most = config.heads if _attends(config) else MOST_RANKS
        can = [size for size in range(1, most + 1) if _divides(config, size, queries, keys)]
        if self.size not in can:
            degrees = " or ".join([", ".join(map(str, can[:-1])), str(can[-1])]) if len(can) > 1 else "1"
            raise ValueError(
                f"--tensor-parallel is {self.size}: the model has {config.heads} heads over {_counts(config)} of keys "
                f"and values{why}{_recurrences(config)}; {degrees} can be"
            )

    def of(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration of the rank's attention: its heads, and the KV heads that they read."""
        shapes = tuple(replace(shape, heads=self._kv_heads(shape.heads)) for shape in config.kv_shapes)
        kv_heads = self._kv_heads(config.kv_heads)
        heads = max(1, config.heads // self.size)
        slopes = config.slopes[self.rank * heads : (self.rank + 1) * heads]
        recurrent = tuple(None if one is None else self.of_recurrence(one) for one in config.recurrent)
        return replace(config, heads=heads, kv_heads=kv_heads, kv_shapes=shapes, slopes=slopes, recurrent=recurrent)

    def of_recurrence(self, shape: Recurrence) -> Recurrence:
        """Returns the shape of the rank's part of a recurrent layer. Raises ValueError where there is none."""
        mine = shape.of_rank(self.size)
        if mine is None:
            raise ValueError(f"--tensor-parallel is {self.size}: ranks cannot have equal parts of {shape}")
        return mine

    def even(self, *widths: int) -> list[slice]:
        """Returns the rank's parts of outputs of several kinds, one kind after the other, each divided evenly."""
        made, first = [], 0
        for width in widths:
            mine = width // self.size
            made.append(slice(first + self.rank * mine, first + (self.rank + 1) * mine))
            first += width
        return made

    def _kv_heads(self, heads: int) -> int:
        """Returns how many of a layer's KV heads the rank has."""
        return max(1, heads // self.size)

    def queries(self, config: ModelConfig) -> slice:
        """Returns the rank's elements among those of all query heads."""
        width = config.heads // self.size * config.head_dim
        return slice(self.rank * width, (self.rank + 1) * width)

    def keys(self, config: ModelConfig) -> slice:
        """Returns the rank's elements among those of all KV heads.

        With more ranks than heads, several have the same.
        """
        heads = self._kv_heads(config.kv_heads)
        first = self.rank * config.kv_heads // self.size
        return slice(first * config.head_dim, (first + heads) * config.head_dim)

    def qkv(self, config: ModelConfig) -> list[slice]:
        """Returns the rank's outputs of a product for queries, keys and values, in this order."""
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        mine = self.keys(config)
        return [self.queries(config), moved(mine, queries), moved(mine, queries + keys)]

    def part(self, count: int) -> slice:
        """Returns the rank's part of `count` columns.

        Raises ValueError where there are fewer blocks of them than ranks.
        """
        if -(-count // self.grain) < self.size:
            together = f" in blocks of {self.grain}" if self.grain > 1 else ""
            raise ValueError(
                f"--tensor-parallel is {self.size}: {count} columns{together} cannot be divided among them"
            )
        grains = [lcm(grain, self.grain) for grain in GRAINS]
        grain = next(grain for grain in grains if -(-count // grain) >= self.size)
        blocks = -(-count // grain)
        first, last = (blocks * rank // self.size * grain for rank in (self.rank, self.rank + 1))
        return slice(first, min(last, count))

    def parts(self, count: int) -> list[slice]:
        """Returns `part` of every rank, by rank."""
        return [replace(self, rank=rank).part(count) for rank in range(self.size)]

    def gated(self, width: int) -> list[slice]:
        """Returns the rank's outputs of a product for gates and the `width` outputs that they multiply."""
        mine = self.part(width)
        return [mine, moved(mine, width)]


def _counts(config: ModelConfig) -> str:
    return " or ".join(map(str, sorted({shape.heads for shape in config.layer_shapes})))


def moved(part: slice, by: int) -> slice:
    """Returns the slice `by` places further on."""
    return slice(part.start + by, part.stop + by)


def _attends(config: ModelConfig) -> bool:
    return not config.attends or any(config.attends)


def _recurrences(config: ModelConfig) -> str:
    """Names the recurrent layers in an error, "" where there are none."""
    shapes = {one for one in config.recurrent if one is not None}
    return "".join(f", and recurrent layers of {shape}" for shape in sorted(shapes, key=str))


def _divides(config: ModelConfig, size: int, queries: int, keys: int) -> bool:
    if size == 1:
        return True  # nothing is cut
    if not all(one is None or one.of_rank(size) for one in config.recurrent):
        return False
    if not _attends(config):
        return True
    alike = [config.of_layer(config.kv_shapes.index(shape)) for shape in set(config.kv_shapes)] or [config]
    return config.heads % size == 0 and all(_divides_layer(one, size, queries, keys) for one in alike)


def _divides_layer(config: ModelConfig, size: int, queries: int, keys: int) -> bool:
    """Whether the KV heads of a layer with this configuration can be divided, into whole multiples."""
    shared = config.kv_heads % size == 0 or size % config.kv_heads == 0
    own = Shard(0, size).of(config)
    return shared and own.heads * own.head_dim % queries == 0 and own.kv_heads * own.head_dim % keys == 0
