"""Which part of a model a rank has: some of the heads, of the inner columns of MLPs, of the rows of the output layer.

The division of Megatron-LM (Shoeybi et al., 2019): products that widen have a part of their outputs, those that narrow
again a part of their inputs, so that what the ranks make needs adding up once for each attention and each MLP.
"""

from dataclasses import dataclass, replace

from model.config import ModelConfig

GRAINS = (32, 16, 2, 1)  # columns that stay together where there are enough: kernels read them by vectors and panels


@dataclass(frozen=True, slots=True)
class Shard:
    """rank: 0 .. size - 1."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError where the heads of a model cannot be divided among so many ranks."""
        can = [size for size in range(1, config.heads + 1) if _divides(config, size)]
        if self.size not in can:
            degrees = " or ".join([", ".join(map(str, can[:-1])), str(can[-1])]) if len(can) > 1 else "1"
            raise ValueError(
                f"--tensor-parallel is {self.size}: the model has {config.heads} heads over {config.kv_heads} of keys "
                f"and values; {degrees} can be"
            )

    def of(self, config: ModelConfig) -> ModelConfig:
        """What the rank's attention is made of: its heads, and those of keys and values that they read."""
        return replace(config, heads=config.heads // self.size, kv_heads=max(1, config.kv_heads // self.size))

    def queries(self, config: ModelConfig) -> slice:
        """Of the elements of all heads, those of the rank's."""
        width = config.heads // self.size * config.head_dim
        return slice(self.rank * width, (self.rank + 1) * width)

    def keys(self, config: ModelConfig) -> slice:
        """Of the elements of all heads of keys. Where there are more ranks than heads, several have the same one."""
        heads = max(1, config.kv_heads // self.size)
        first = self.rank * config.kv_heads // self.size
        return slice(first * config.head_dim, (first + heads) * config.head_dim)

    def qkv(self, config: ModelConfig) -> list[slice]:
        """Of the outputs of a product for queries, keys and values, in this order."""
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        mine = self.keys(config)
        return [self.queries(config), _moved(mine, queries), _moved(mine, queries + keys)]

    def part(self, count: int) -> slice:
        """Of so many columns. Raises ValueError where there are fewer than ranks."""
        if count < self.size:
            raise ValueError(f"--tensor-parallel is {self.size}: {count} columns cannot be divided among so many")
        grain = next(grain for grain in GRAINS if -(-count // grain) >= self.size)
        blocks = -(-count // grain)
        first, last = (blocks * rank // self.size * grain for rank in (self.rank, self.rank + 1))
        return slice(first, min(last, count))

    def gated(self, width: int) -> list[slice]:
        """Of the outputs of a product for gates and what they open, `width` each."""
        mine = self.part(width)
        return [mine, _moved(mine, width)]


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _divides(config: ModelConfig, size: int) -> bool:
    shared = config.kv_heads % size == 0 or size % config.kv_heads == 0
    return config.heads % size == 0 and shared
