"""Activations between kernels."""

from dataclasses import dataclass

from torch import Tensor

from model.cpu.kernels.element import Element
from model.cpu.kernels.memory import huge_zeros
from model.cpu.kernels.panels import PANEL


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Activations between kernels.

    Attributes:
        tensor: [rows, width], wide enough for products of whole panels.
    """

    tensor: Tensor
    element: Element

    @staticmethod
    def of(rows: int, width: int, element: Element) -> "Buffer":
        padded = -(-width // PANEL) * PANEL
        room = huge_zeros(rows * padded * element.size)
        return Buffer(room.view(element.dtype).view(rows, padded), element)

    @staticmethod
    def copy_of(x: Tensor, element: Element) -> "Buffer":
        """Copies x [rows, width]."""
        made = Buffer.of(len(x), x.shape[1], element)
        made.tensor[: len(x), : x.shape[1]] = x
        return made

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        return self.tensor.stride(0) * self.element.size
