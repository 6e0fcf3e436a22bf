"""Which sizes the attention kernel runs with on which GPU: a table, `tuning.json`, made beforehand. Nothing is tried
out while serving, so the first step is as quick as the next, and two starts compute the same.

A row holds for devices of its name, or of any where it names none, with its compute capability or a higher one, and for
heads up to its size. The row that fits most closely is taken; one without a name, for the lowest capability, is there
for every head size, so a device that nobody has measured works too.

What is guaranteed on a GPU: a row is chosen by the device and the model, never by the batch. By how many tokens a
sequence has in a step, its queries are few, some or many; its keys are divided at multiples of that kind's chunk,
counted from the start of the sequence. So within one kind the bits of a query's result depend on its own sequence
alone: not on who else is in the batch, on how they were cut into chunks, or on which pages they lie. They may differ
between kinds, whose products are other instructions and whose sums are grouped otherwise: a token that was computed
in a prefill and is computed again in a decode agrees within rounding. So does a decode whose first keys several
others read too, see `model.attention.sharing`: these chunks are then computed in larger tiles, a kind of its own. To
divide by how busy the device is would make bits depend on the batch; instead a chunk is small enough that one long
sequence fills a GPU, and its part of the result is a few percent of the keys and values that it reads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

SOME = 256
"""Tokens of a sequence in a step that fill a GPU without its keys being divided."""

ELEMENTS = ("float32", "half", "eight")
"""What a row is for: float32 products; 16 bits; 16 bits from pages in 8 bits."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """rows: queries x heads of a group in a tile, at least 16. tile: keys at a time. chunk: keys of a part, a multiple
    of the tile. warps, stages: as Triton has them.
    """

    rows: int
    tile: int
    chunk: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if self.rows < 16 or self.chunk % self.tile:
            raise ValueError(f"{self}: a tile has 16 rows or more, and a chunk is whole tiles")

    def tokens(self, room: int) -> int:
        """Of a piece. room: query heads of a KV head in a tile, 16 at most."""
        return self.rows // room


@dataclass(frozen=True, slots=True)
class Tuning:
    """few: for sequences with as many tokens in a step as fit in one piece, most of them with one. many: for others.
    shared: for chunks of keys that several sequences with one token each have in common; they are those of `few`.
    """

    few: Sizes
    many: Sizes
    shared: Sizes

    def __post_init__(self) -> None:
        if self.shared.chunk != self.few.chunk:
            raise ValueError(f"{self}: what is shared is divided as what is not")


@dataclass(frozen=True, slots=True)
class Row:
    """device: part of its name, or None. capability: the lowest. head_dim: the largest. elements: see ELEMENTS."""

    device: str | None
    capability: tuple[int, int]
    head_dim: int
    elements: str
    tuning: Tuning

    def fits(self, device: str, capability: tuple[int, int], head_dim: int, elements: str) -> bool:
        named = self.device is None or self.device in device
        return named and self.capability <= capability and head_dim <= self.head_dim and elements == self.elements


def tuning_for(
    device: str, capability: tuple[int, int], head_dim: int, elements: str, rows: Sequence[Row] | None = None
) -> Tuning:
    """device: its name. rows: those of the table. Raises ValueError where no row is for such heads."""
    fitting = [row for row in (table() if rows is None else rows) if row.fits(device, capability, head_dim, elements)]
    if not fitting:
        raise ValueError(f"there are no sizes for {elements} heads of {head_dim} on {device}")
    return min(fitting, key=lambda row: (row.device is None, row.head_dim, [-n for n in row.capability])).tuning


@cache
def table() -> tuple[Row, ...]:
    """The rows of `tuning.json`."""
    rows = json.loads(files("model.gpu").joinpath("tuning.json").read_text())
    return tuple(
        Row(
            row["device"],
            tuple(row["capability"]),
            row["head_dim"],
            row["elements"],
            Tuning(*(Sizes(**row[kind]) for kind in ("few", "many", "shared"))),
        )
        for row in rows
    )
