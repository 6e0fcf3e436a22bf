"""Cuts the states of recurrent layers into pages.

A state has units: pieces that lie in one page, as the matrix of one head. A page holds whole units, so a page is at
least as large as the largest unit. All pages of a state come and go together, each by a page table of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes; a unit begins at a multiple


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """State of one recurrent layer.

    Attributes:
        layer: Number of the layer.
        units: Bytes of each unit: first the window of its convolution, then the matrix of each head.
    """

    layer: int
    units: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Bytes of the largest unit."""
        return max(map(aligned, self.units))


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Place of a unit.

    Attributes:
        page: Which of the state's pages.
        offset: Bytes from the beginning of the page.
    """

    page: int
    offset: int


@dataclass(frozen=True, slots=True)
class StateCut:
    """Places of all units.

    Attributes:
        pages: Pages of a state.
        places: By layer number, the place of each unit.
        bytes: Bytes of all units.
    """

    pages: int
    places: dict[int, tuple[UnitPlace, ...]]
    bytes: int


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def cut_states(layers: Sequence[RecurrentLayer], page_bytes: int) -> StateCut:
    """Places the units of all layers one after the other, in as many pages as they take.

    Args:
        layers: The recurrent layers.
        page_bytes: Bytes of a page, at least those of the largest unit.
    """
    page, offset, places = 0, 0, dict[int, tuple[UnitPlace, ...]]()
    for one in layers:
        own = []
        for unit in map(aligned, one.units):
            if offset + unit > page_bytes:
                page, offset = page + 1, 0
            own.append(UnitPlace(page, offset))
            offset += unit
        places[one.layer] = tuple(own)
    return StateCut(page + 1 if layers else 0, places, sum(sum(map(aligned, one.units)) for one in layers))
