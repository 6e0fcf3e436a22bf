"""A product with weights that lie as the kernels read them, see `model.kernels.linear`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.buffer import Buffer
from model.kernels.element import ELEMENTS, FLOAT
from model.kernels.linear import PANEL, Ending, pack, write_linear
from model.kernels.program import Call, Machine


class NotCompiled(Exception):
    """Why there are no kernels for a model."""


class KernelLinear:
    """`model.layers.Linear` for kernels. weights: [out, in] each, one below the other. gated: the first half of the
    outputs are gates of the second, and lie beside them; then only `call` is of use, with an activation.
    """

    def __init__(
        self, machine: Machine, weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, gated: bool = False
    ) -> None:
        self._machine, self._element, self.gated = machine, ELEMENTS[dtype], gated
        self.outputs, self.inputs = sum(map(len, weights)), weights[0].shape[1]
        if self.inputs % self._element.packed:
            raise NotCompiled(f"{self.inputs} inputs of a product are no multiple of {self._element.packed}")
        self._panels = pack(torch.cat([part.to(dtype) for part in weights]), self._element, gated)
        self._bias = None if bias is None else _beside(bias.float(), gated)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def call(self, rows: int, x: Buffer, y: Buffer, add: bool = False, activation: str | None = None) -> Call:
        """rows: address of the cell with their number. x: of the element of the weights. add: y is added to."""
        ending = Ending(y.element, self._bias is not None, add, self.gated, activation)
        bias = 0 if self._bias is None else self._bias
        panels, depth = self._panels.shape[:2]
        return Call(
            f"linear_{self._element.name}_{ending.name}",
            write_linear(self._element, ending),
            (rows, x.tensor, x.stride, self._panels, panels, depth, y.tensor, y.stride, bias),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out], in x's dtype."""
        source, out = Buffer.copy_of(x, self._element), Buffer.of(len(x), self.outputs, FLOAT)
        count = torch.tensor([len(x)])
        self._machine.program([self.call(count.data_ptr(), source, out)]).run()
        return out.tensor[: len(x), : self.outputs].to(x.dtype)


def _beside(bias: Tensor, gated: bool) -> Tensor:
    """[panels x 32], in the order in which the outputs of a product lie."""
    parts = bias.chunk(2) if gated else (bias,)
    width = PANEL // len(parts)
    padded = [F.pad(part, (0, -len(part) % width)).view(-1, width) for part in parts]
    return torch.stack(padded, 1).flatten().contiguous()
