"""Shape of attention in the layers of one group, as its kernels are compiled for it."""

from dataclasses import dataclass
from typing import Any

from cache_manager.layout import KVShape
from model.gpu.tuning import TileSizes, Tuning

MOST_DIM = 512  # elements of a value, and of a key where it is not latent
MOST_REST = 256  # elements of a latent key after those that are its value
MOST_TILE_HEADS = 16  # most query heads of a KV head in a tile; where more share one, several programs read it


@dataclass(frozen=True, slots=True)
class HeadsKind:
    """Heads of a layer.

    Attributes:
        heads: Query heads.
        shape: KV of a token.
        tuning: Tile sizes.
        scale: Factor of scores, in powers of 2; over the cap, where they have one.
    """

    heads: int
    shape: KVShape
    tuning: Tuning
    scale: float

    @property
    def tile_heads(self) -> int:
        """Query heads in a tile."""
        return min(power_of_two(self.heads // self.shape.heads), MOST_TILE_HEADS)

    @property
    def head_tiles(self) -> int:
        """Tiles that have all query heads of a KV head."""
        return -(-(self.heads // self.shape.heads) // self.tile_heads)

    @property
    def columns(self) -> int:
        """Programs for each piece of work."""
        return self.shape.heads * self.head_tiles

    @property
    def dim(self) -> int:
        """Elements of a value."""
        return self.shape.value_dim

    def to_write(self, page_size: int) -> dict[str, Any]:
        """Returns the constants of `write_slots`, but for the format of pages."""
        s = self.shape
        return {
            "HEADS": s.heads, "PADDED_HEADS": power_of_two(s.heads), "HEAD_DIM": s.key_dim,
            "PADDED_DIM": power_of_two(s.key_dim), "PAGE_SIZE": page_size, "KEYS_ALONE": s.latent,
        }  # fmt: skip

    def to_attend(self, page_size: int, sizes: TileSizes) -> dict[str, Any]:
        """Returns the constants of `attend_pieces` that depend on the heads and on the sizes of tiles."""
        s, rest = self.shape, self.shape.key_dim - self.shape.value_dim
        return {
            "HEADS_PER_KV": self.heads // s.heads, "HEAD_DIM": s.value_dim, "PADDED_DIM": power_of_two(s.value_dim),
            "REST": rest, "PADDED_REST": max(16, power_of_two(rest)), "PAGE_SIZE": page_size,
            "TILE_TOKENS": sizes.tokens(self.tile_heads), "TILE_HEADS": self.tile_heads, "HEAD_TILES": self.head_tiles,
            "TILE_KEYS": sizes.tile, "num_warps": sizes.warps, "num_stages": sizes.stages,
        }  # fmt: skip

    def to_join(self) -> dict[str, Any]:
        """Returns the constants of `join_parts` that depend on the heads."""
        return {"HEAD_DIM": self.dim, "PADDED_DIM": power_of_two(self.dim)}


def why_not(shape: KVShape) -> str | None:
    """Returns why the kernels cannot read pages with KV of this shape, None if they can."""
    rest = shape.key_dim - shape.value_dim
    if rest and not shape.latent:
        return "its keys and values differ in shape"
    if shape.value_dim % 16 or shape.value_dim > MOST_DIM:
        return f"a head has {shape.value_dim} elements, no multiple of 16 up to {MOST_DIM}"
    if rest % 16 or rest > MOST_REST:
        return f"a latent has {rest} rotated elements, no multiple of 16 up to {MOST_REST}"
    return None


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
