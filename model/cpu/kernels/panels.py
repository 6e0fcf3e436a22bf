"""Layout of a product's weights: panels of 32 outputs, each a run of memory in the order in which it is read.

A step of a panel is multiplied at once: one input of all its outputs in float32, a pair of inputs in bfloat16.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import Element
from model.cpu.kernels.values import INT8, INTS, LANES, Value

PANEL = 2 * LANES

BYTES = ir.VectorType(INT8, LANES)


class Layout(Protocol):
    """Layout of weights in panels.

    Attributes:
        element: Type that weights are multiplied in.
        name: Covers everything that a kernel for it depends on.
    """

    @property
    def element(self) -> Element: ...

    @property
    def name(self) -> str: ...

    def panel_bytes(self, steps: Value) -> Value:
        """Returns the bytes of a panel of so many steps."""


class Panels(Layout, Protocol):
    """Layout of weights one by one.

    Attributes:
        dtype: Type of a stored weight.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def step(self) -> int:
        """Bytes of a step."""

    def halves(self, code: Code, address: Value) -> list[Value]:
        """Loads a step as two vectors of 16 outputs, with 32 bits of the element each."""

    def laid(self, rows: Tensor) -> Tensor:
        """Lays weights out.

        Args:
            rows: [panels, 32, in] of the dtype.

        Returns:
            [panels, in / packed, bytes or elements of a step].
        """


@dataclass(frozen=True, slots=True)
class PlainPanels:
    """Panels of weights of the element itself: [panels, in / packed, 32, packed]."""

    element: Element

    @property
    def name(self) -> str:
        return self.element.name

    @property
    def dtype(self) -> torch.dtype:
        return self.element.dtype

    @property
    def step(self) -> int:
        return PANEL * 4

    def panel_bytes(self, steps: Value) -> Value:
        return steps * self.step

    def halves(self, code: Code, address: Value) -> list[Value]:
        return [code.load(address, INTS, LANES * 4 * half) for half in range(2)]

    def laid(self, rows: Tensor) -> Tensor:
        panels, _, width = rows.shape
        packed = self.element.packed
        return rows.view(panels, PANEL, width // packed, packed).transpose(1, 2).reshape(panels, width // packed, -1)


@dataclass(frozen=True, slots=True)
class Int8Panels:
    """Panels of integers -127 .. 127, which the element holds exactly: [panels, in, 32].

    Two look-ups in tables of 128 bytes (AVX512-VBMI) make pairs of bfloat16 with half the instructions. But a product
    of 1 to 8 rows waits for memory in both cases. One of 64 rows takes only 1 % more time this way.
    """

    element: Element

    @property
    def name(self) -> str:
        return f"int8_{self.element.name}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def step(self) -> int:
        return PANEL * self.element.packed

    def panel_bytes(self, steps: Value) -> Value:
        return steps * self.step

    def halves(self, code: Code, address: Value) -> list[Value]:
        made = []
        for half in range(2):
            inputs = [
                code.cast(code.to_float(code.widened(code.load(address, BYTES, i * PANEL + half * LANES), INTS)), INTS)
                for i in range(self.element.packed)
            ]
            # The lower half of a float32 that holds such a small integer is 0.
            made.append(inputs[0] >> 16 | inputs[1] if self.element.packed == 2 else inputs[0])
        return made

    def laid(self, rows: Tensor) -> Tensor:
        panels, _, width = rows.shape
        return rows.transpose(1, 2).reshape(panels, width // self.element.packed, -1)
