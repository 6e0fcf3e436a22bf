"""Tile sizes of the attention kernel by GPU: a table, `tuning.json`, measured beforehand.

Nothing is tried out while serving, so the first step is as quick as the next, and two starts compute the same.

A row holds from its compute capability on, and for heads up to its size. It holds for devices of its name, or for any
device if it has none. The closest row is taken, by the size of heads first. A row without a name, for the lowest
capability, exists for every head size. So a device that was never measured works too.

Guarantee on a GPU: a row is chosen by the device and the model, never by the batch. A sequence's queries are few, some
or many, by its number of tokens in the step. Its keys are divided at multiples of that kind's chunk, counted from the
start of the sequence. So within one kind the bits of a query's result depend on its own sequence alone: not on the
batch, the chunks of a prefill, or the pages.

Bits may differ between kinds, whose products are other instructions and whose sums are grouped otherwise. A token that
was computed in a prefill, and is computed again in a decode, agrees within rounding. So does a decode whose first keys
several others share, see `model.attention.sharing`: these chunks are computed in larger tiles, a kind of its own.

Dividing by the load of the device would make bits depend on the batch. Instead a chunk is small enough that one long
sequence fills a GPU. Its partial result is a few percent of the keys and values that it reads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FILLING = 256
"""Tokens of a sequence in a step that fill a GPU without dividing its keys."""

ELEMENTS = ("float32", "half", "eight")
"""Element kinds of a row: float32 products; 16-bit products; 16-bit products from pages in 8 bits."""


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes of a kernel's tiles.

    Attributes:
        rows: Queries x heads of a group in a tile, at least 16.
        tile: Keys at a time.
        chunk: Keys of a partial result, a multiple of the tile.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    rows: int
    tile: int
    chunk: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if self.rows < 16 or self.chunk % self.tile:
            raise ValueError(f"{self}: a tile has 16 rows or more, and a chunk is whole tiles")

    def tokens(self, tile_heads: int) -> int:
        """Returns the tokens of a piece; `tile_heads`: query heads of a KV head in a tile, at most 16."""
        return self.rows // tile_heads


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes for each kind of work.

    Attributes:
        few: Sizes for sequences whose tokens in a step fit in one piece; most have one token.
        many: Sizes for sequences with more tokens.
        shared: Sizes for chunks of keys that several sequences with one token each share. Chunks are those of `few`.
    """

    few: TileSizes
    many: TileSizes
    shared: TileSizes

    def __post_init__(self) -> None:
        if self.shared.chunk != self.few.chunk:
            raise ValueError(f"{self}: what is shared is divided as what is not")


@dataclass(frozen=True, slots=True)
class TuningRow:
    """A row of the table.

    Attributes:
        device: Part of the device's name. None: any device.
        capability: Lowest compute capability.
        head_dim: Largest number of elements of a head.
        elements: See ELEMENTS.
    """

    device: str | None
    capability: tuple[int, int]
    head_dim: int
    elements: str
    tuning: Tuning

    def fits(self, device: str, capability: tuple[int, int], head_dim: int, elements: str) -> bool:
        named = self.device is None or self.device in device
        return named and self.capability <= capability and head_dim <= self.head_dim and elements == self.elements


def tuning_for(
    device: str, capability: tuple[int, int], head_dim: int, elements: str, rows: Sequence[TuningRow] | None = None
) -> Tuning:
    """Returns the tile sizes for a device and a model.

    Args:
        device: Name of the device.
        capability: Compute capability.
        head_dim: Elements of a head.
        elements: See ELEMENTS.
        rows: The table. None: `tuning.json`.

    Raises:
        ValueError: No row is for such heads.
    """
    fitting = [row for row in (table() if rows is None else rows) if row.fits(device, capability, head_dim, elements)]
    if not fitting:
        raise ValueError(f"there are no sizes for {elements} heads of {head_dim} on {device}")
    return min(fitting, key=lambda row: (row.head_dim, row.device is None, [-n for n in row.capability])).tuning


@cache
def table() -> tuple[TuningRow, ...]:
    """Reads the rows of `tuning.json`."""
    rows = json.loads(files("model.gpu").joinpath("tuning.json").read_text())
    return tuple(
        TuningRow(
            row["device"],
            tuple(row["capability"]),
            row["head_dim"],
            row["elements"],
            Tuning(*(TileSizes(**row[kind]) for kind in ("few", "many", "shared"))),
        )
        for row in rows
    )
