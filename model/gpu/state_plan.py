"""Plan of a step's recurrent layers on the GPU: runs of tokens, their segments, the pages of their states."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from model.attention.backend import StateSegments
from model.gpu.packer import Ints, Packer

TILE_TOKENS = 8  # tokens of a piece of a convolution


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Plan of a step's recurrent layers, on the device. All arrays are int32.

    Attributes:
        runs: [runs, 2]. First segment of each run, and the one after its last.
        segments: [segments, 2]. Packed offset of each segment's first token, and its tokens.
        sources: [pages of a state, segments]. Pages before each segment, as in `StateSegments`.
        targets: Likewise, pages after each segment.
        pieces: [pieces, 4]. Tokens that a convolution computes at once, as in `convolve_pieces`.
    """

    runs: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    pieces: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStates:
    """Places of the arrays of a plan, and their content."""

    arrays: tuple[Ints, ...]
    places: tuple[int, ...]

    def on(self, packed: Tensor) -> StatePlan:
        """Returns the plan on the device, where `packed` is."""
        return StatePlan(
            *(
                packed[at : at + array.size].view(array.shape)
                for at, array in zip(self.places, self.arrays, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class StateWork:
    """Content of a plan on the host: the arrays of `StatePlan`, in their order."""

    arrays: tuple[Ints, ...]

    @staticmethod
    def of(segments: StateSegments) -> "StateWork":
        """Returns the work of a step with these segments."""
        first = np.flatnonzero(~segments.follows)
        after = np.append(first[1:], len(segments.follows))
        begin = segments.offsets[first]
        tokens = np.add.reduceat(segments.counts, first)
        parts = -(-tokens // TILE_TOKENS)
        run = np.repeat(np.arange(len(first)), parts)
        done = (np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)) * TILE_TOKENS
        count = np.minimum(tokens[run] - done, TILE_TOKENS)
        return StateWork(
            (
                np.stack((first, after), axis=1),
                np.stack((segments.offsets, segments.counts), axis=1),
                segments.sources,
                segments.targets,
                np.stack((first[run], begin[run], begin[run] + done, count), axis=1),
            )
        )

    @staticmethod
    def nothing(pages: int, rows: int) -> "StateWork":
        """Returns the work of `rows` runs without a segment, whose states have `pages` pages."""
        sizes = (rows, 2), (rows, 2), (pages, rows), (pages, rows), (rows, 4)
        return StateWork(tuple(np.zeros(size, np.int32) for size in sizes))

    def filled_up(self, rows: int) -> "StateWork":
        """Returns the work of a step of one token a sequence with `rows` runs. Those that are added have no segment."""
        filled = StateWork.nothing(len(self.arrays[2]), rows)
        for whole, array in zip(filled.arrays, self.arrays, strict=True):
            whole[: array.shape[0], : array.shape[1]] = array
        return filled

    def put(self, packer: Packer, room: int = 0) -> PlacedStates:
        """Packs the arrays, each with room for as many rows, of a step of one token a sequence."""
        widths = 2, 2, len(self.arrays[2]), len(self.arrays[2]), 4
        places = (packer.put(array, room * width) for array, width in zip(self.arrays, widths, strict=True))
        return PlacedStates(self.arrays, tuple(places))
