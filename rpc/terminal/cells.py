"""Draws figures with characters: a page map folded into cells, bars, and charts of one line."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from quire.v1 import admin_service_pb2 as pb

EIGHTHS = " ▁▂▃▄▅▆▇█"
HELD, CACHED, FREE, SET_ASIDE = "░▒▓█", "⠂⠆⠶⠿", "·", "!"


@dataclass(frozen=True, slots=True)
class Cell:
    """Adjacent pages that share one character.

    Attributes:
        held: Share of held pages, in [0, 1].
        cached: Share of cached pages, in [0, 1].
        set_aside: Whether one of them is set aside.
    """

    held: float
    cached: float
    set_aside: bool = False

    @property
    def kind(self) -> str:
        """State of most of the pages that are not free; "set aside" if one is."""
        if self.set_aside:
            return "set aside"
        if not self.held and not self.cached:
            return "free"
        return "held" if self.held >= self.cached else "cached"

    @property
    def glyph(self) -> str:
        """Character of the cell: darker if more of its pages are in use."""
        if self.kind in ("set aside", "free"):
            return SET_ASIDE if self.set_aside else FREE
        shades = HELD if self.kind == "held" else CACHED
        return shades[min(3, ceil(4 * (self.held + self.cached)) - 1)]


def folded(states: NDArray[np.uint8], most: int) -> tuple[int, list[Cell]]:
    """Folds a page map into at most `most` cells.

    Args:
        states: [pages] uint8 of pb.PageState.
        most: Largest number of cells, above 0.

    Returns:
        Pages in a cell, and the cells.
    """
    each = max(1, ceil(len(states) / most))
    starts = np.arange(0, len(states), each)
    if not len(starts):
        return each, []
    sizes = np.diff(np.append(starts, len(states)))
    held, cached, aside = (
        np.add.reduceat((states == state).astype(np.int64), starts)
        for state in (pb.PAGE_STATE_HELD, pb.PAGE_STATE_CACHED, pb.PAGE_STATE_SET_ASIDE)
    )
    shares = zip((held / sizes).tolist(), (cached / sizes).tolist(), (aside > 0).tolist(), strict=True)
    return each, [Cell(*share) for share in shares]


def spark(values: Sequence[float | None], width: int) -> str:
    """Draws the newest `width` values as columns, the highest of which is full; None leaves a gap."""
    shown = values[-width:] if width > 0 else []
    most = max((value for value in shown if value is not None), default=0.0)

    def column(value: float | None) -> str:
        if value is None or most <= 0:
            return " " if value is None else EIGHTHS[1]
        return EIGHTHS[max(1, round(8 * value / most))]

    return "".join(map(column, shown)).rjust(max(0, width))


def parts(shares: Sequence[float], width: int) -> list[int]:
    """Divides `width` characters among parts of a whole; every part above 0 gets at least one."""
    wanted = [0 if share <= 0 else max(1, round(share * width)) for share in shares]
    while sum(wanted) > width:
        wanted[wanted.index(max(wanted))] -= 1
    return wanted
