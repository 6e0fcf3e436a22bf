"""Values of one step that a compiled decoder reads: its numbers, rotary angles, and further depths of features."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.values import LANES
from model.forward import ForwardBatch, ImageFeatures
from model.rope import Rope


class Cells:
    """Cells in which kernels find the numbers of one step."""

    FIELDS = ("rows", "tokens", "positions", "wanted", "wanteds", "order")

    def __init__(self, tokens: int) -> None:
        self._numbers, self._order = np.zeros(len(self.FIELDS), np.int64), torch.arange(tokens)

    def at(self, name: str) -> int:
        """Returns the address of a cell."""
        return int(self._numbers.ctypes.data + 8 * self.FIELDS.index(name))

    def set(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> None:
        """Fills the cells.

        All tensors are int64 and contiguous. The caller keeps them alive until the program has run: kernels read their
        memory.
        """
        addresses = (tensor.data_ptr() for tensor in (tokens, positions, wanted))
        self._numbers[:] = len(tokens), *addresses, len(wanted), self._order.data_ptr()


@dataclass(frozen=True, slots=True, eq=False)
class StepAngles:
    """Angles of a step's tokens, in their order, for a rotary embedding that no table by position holds.

    Attributes:
        rope: The rotary embedding, which looks the angles up by all axes.
        cosines: [tokens + LANES, pairs] float32. Kernels read whole vectors, past the end of the last row.
        sines: Likewise.
    """

    rope: Rope
    cosines: Tensor
    sines: Tensor

    @staticmethod
    def of(rope: Rope, tokens: int) -> "StepAngles":
        pairs = rope.tables[0].shape[1]
        return StepAngles(rope, torch.zeros(tokens + LANES, pairs), torch.zeros(tokens + LANES, pairs))

    def fill(self, batch: ForwardBatch) -> None:
        for place, angles in zip((self.cosines, self.sines), batch.cos_sin(self.rope), strict=True):
            place[: len(angles)] = angles[:, 0]


class Rotations:
    """Tables of rotary angles, as kernels read them.

    Attributes:
        of_steps: Angles that are filled in for each step, by rotary embedding.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.of_steps: dict[int, StepAngles] = {}

    def of(self, rope: Rope | None) -> tuple[str, int, int, Tensor | int, Tensor | int]:
        """Returns the cell with each token's row of the tables, the rotated pairs, how far apart, and both tables.

        The tables are padded, since kernels read whole vectors, past the end of the last row. The tables of an
        embedding of several axes are a step's own angles, in the order of the tokens.
        """
        if rope is None:
            return "positions", 0, 0, 0, 0
        if rope.axes:
            if id(rope) not in self.of_steps:
                self.of_steps[id(rope)] = StepAngles.of(rope, self._tokens)
            own = self.of_steps[id(rope)]
            return "order", own.cosines.shape[1], rope.apart, own.cosines, own.sines
        if id(rope) not in self._tables:
            cosines, sines = (F.pad(table.float(), (0, 0, 0, LANES)) for table in rope.tables)
            self._tables[id(rope)] = cosines, sines
        cosines, sines = self._tables[id(rope)]
        return "positions", cosines.shape[1], rope.apart, cosines, sines


@dataclass(frozen=True, slots=True, eq=False)
class StepDepths:
    """Features that are added after layers, one row a token, zeros where no image stands.

    Attributes:
        hidden: The width of a feature.
        parts: [tokens, hidden] float32 of each depth from 1 on.
        ones: [tokens] float32. Weights with which the kernel for experts adds a part to the stream.
    """

    hidden: int
    parts: Sequence[Buffer]
    ones: Tensor

    @staticmethod
    def of(depths: int, tokens: int, hidden: int) -> "StepDepths":
        return StepDepths(hidden, [Buffer.of(tokens, hidden, FLOAT) for _ in range(depths)], torch.ones(tokens))

    def fill(self, tokens: int, images: ImageFeatures) -> None:
        for part, features in zip(self.parts, images.features[1:], strict=True):
            part.tensor[:tokens].zero_()
            part.tensor[images.places, : self.hidden] = features.float()
