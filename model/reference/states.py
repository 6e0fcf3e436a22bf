"""States of recurrent layers in the pages of the reference back end's pool."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import NONE, Advance, StateSegments


class PagedStates:
    """Reads and writes states, unit by unit.

    Args:
        layout: Layout of the pool.
        pages: [pages, page_bytes] uint8. The pool's memory.
    """

    def __init__(self, layout: KVLayout, pages: Tensor) -> None:
        self._pages, self._places = pages, layout.states.places
        self._sizes = {one.layer: one.units for one in layout.recurrent}

    def recur(self, layer: int, segments: StateSegments, advance: Advance) -> None:
        """Runs a layer over the segments of a step, see `AttentionBackend.recur`."""
        state: Sequence[Tensor] | None = None
        for number, (offset, count) in enumerate(zip(segments.offsets.tolist(), segments.counts.tolist(), strict=True)):
            if not segments.follows[number]:
                state = self._read(layer, segments.sources[:, number])
            state = advance(state, slice(offset, offset + count))
            if segments.targets[0, number] != NONE:
                self._write(layer, segments.targets[:, number], state)

    def _units(self, layer: int, pages: NDArray[np.int32]) -> list[Tensor]:
        """Returns views of a state's units, float32."""
        return [
            self._pages[int(pages[place.page]), place.offset : place.offset + size].view(torch.float32)
            for place, size in zip(self._places[layer], self._sizes[layer], strict=True)
        ]

    def _read(self, layer: int, pages: NDArray[np.int32]) -> Sequence[Tensor] | None:
        if pages[0] == NONE:
            return None
        window, *matrices = self._units(layer, pages)
        return [window.clone(), *([torch.cat(matrices)] if matrices else [])]

    def _write(self, layer: int, pages: NDArray[np.int32], state: Sequence[Tensor]) -> None:
        window, *matrices = self._units(layer, pages)
        window.copy_(state[0])
        if matrices:
            for place, matrix in zip(matrices, state[1].view(len(matrices), -1), strict=True):
                place.copy_(matrix)
