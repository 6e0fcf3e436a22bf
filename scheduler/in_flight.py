"""A step that was launched and whose results are not in yet."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.drafts import Drafted
from scheduler.rows import Index, Places


@dataclass(slots=True, eq=False)  # not frozen, see `scheduler.events.EngineStats`
class InFlight:
    """A launched step, as the scheduler needs it once its result comes.

    Attributes:
        step: Number of the step.
        launched: Seconds on the engine's clock.
        slices: [n, 3] int32, as in the plan.
        computed: Tokens that the step computes.
        drawing: [m] intp. Row of each draw.
        serials: [rows] int64. Serial of every row when the step was planned.
        departures: Rows that had been removed by then, over the engine's life.
        swapped: Pages that the step swaps or fills in.
        drafted: Draft tokens by draw; None where no row has any.
        filling: Indices of the slices that may fill a page; None for all of them.
    """

    step: int
    launched: float
    slices: Index
    computed: int
    drawing: Places
    serials: NDArray[np.int64]
    departures: int
    swapped: int = 0
    drafted: Drafted | None = None
    filling: NDArray[np.intp] | None = None
