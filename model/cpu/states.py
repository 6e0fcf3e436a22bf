"""States of recurrent layers in the pool that kernels read and write."""

import numpy as np
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StateSegments
from model.cpu.kernels.states import CELLS


class CpuStates:
    """States of recurrent layers in the pages of a pool, and the cells with a step's segments.

    Args:
        layout: Layout of the pool.
        pool: All pages, one after the other, as bytes.
    """

    def __init__(self, layout: KVLayout, pool: Tensor) -> None:
        self.pool, self.page_bytes, self._places = pool, layout.page_bytes, layout.states.places
        self._numbers = np.zeros(len(CELLS), np.int64)
        self._arrays: tuple[np.ndarray, ...] = ()

    def cells(self) -> list[int]:
        """Returns the addresses of the cells, in the order of `CELLS`."""
        return [int(self._numbers.ctypes.data + 8 * i) for i in range(len(CELLS))]

    def begin(self, segments: StateSegments | None) -> None:
        """Sets the cells of a step, and keeps its arrays alive until the next one."""
        if segments is None:
            return
        self._arrays = (
            np.ascontiguousarray(segments.offsets, np.int64),
            np.ascontiguousarray(segments.counts, np.int64),
            np.ascontiguousarray(segments.follows, np.int64),
            np.ascontiguousarray(segments.sources, np.int32),
            np.ascontiguousarray(segments.targets, np.int32),
        )
        self._numbers[:] = len(segments.counts), *(array.ctypes.data for array in self._arrays)

    def places(self, layer: int) -> np.ndarray:
        """Returns [2, units] int64 of a layer: which page of a state has each unit, and at which byte."""
        places = self._places[layer]
        return np.array([[one.page for one in places], [one.offset for one in places]], np.int64)
