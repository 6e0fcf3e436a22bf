"""A product with weights that lie as the kernels read them, see `model.cpu.kernels.linear`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import ELEMENTS, FLOAT
from model.cpu.kernels.experts import Routes, write_experts
from model.cpu.kernels.linear import Ending, pack, write_linear
from model.cpu.kernels.panels import PANEL, Int8, Panels, Plain
from model.cpu.kernels.program import Call, Machine
from model.forward import ForwardBatch
from model.quantization import quantized_blocks


class NotCompiled(Exception):
    """Why there are no kernels for a model."""


class KernelLinear:
    """`model.layers.Linear` for kernels, or `model.quantization.Int8Linear`. weights: [out, in] each, one below the
    other. gated: the first half of the outputs are gates of the second, and lie beside them; then only `call` is of
    use, with an activation. quantized: weights are kept in 8 bits.
    """

    def __init__(
        self,
        machine: Machine,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        dtype: torch.dtype,
        gated: bool = False,
        quantized: bool = False,
    ) -> None:
        self._machine, self._element, self.gated = machine, ELEMENTS[dtype], gated
        self.outputs, self.inputs = sum(map(len, weights)), weights[0].shape[1]
        if self.inputs % self._element.packed:
            raise NotCompiled(f"{self.inputs} inputs of a product are no multiple of {self._element.packed}")
        self._scales: Tensor | None = None
        if quantized:
            self._kind: Panels = Int8(self._element)
            whole, scales = quantized_blocks(weights, weights[0].device)
            self._scales = _beside(scales, gated)
        else:
            self._kind = Plain(self._element)
            whole = _joined([part.to(dtype) for part in weights])
        self._panels = pack(whole, self._kind, gated)
        self._bias = None if bias is None else _beside(bias.float(), gated)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def call(self, rows: int, x: Buffer, y: Buffer, add: bool = False, activation: str | None = None) -> Call:
        """rows: address of the cell with their number. x: of the element of the weights. add: y is added to."""
        bias, scales = self._bias, self._scales
        ending = Ending(y.element, bias is not None, add, self.gated, activation, scales is not None)
        panels, steps = self._panels.shape[:2]
        return Call(
            f"linear_{self._kind.name}_{ending.name}",
            write_linear(self._kind, ending),
            (
                rows, x.tensor, x.stride, self._panels, panels, steps, y.tensor, y.stride,
                0 if bias is None else bias, 0 if scales is None else scales,
            ),
        )  # fmt: skip

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """x: [rows, in] -> [rows, out], in x's dtype."""
        source, out = Buffer.copy_of(x, self._element), Buffer.of(len(x), self.outputs, FLOAT)
        count = torch.tensor([len(x)])
        self._machine.program([self.call(count.data_ptr(), source, out)]).run()
        return out.tensor[: len(x), : self.outputs].to(x.dtype)


def experts_call(
    products: Sequence[KernelLinear], routes: Routes, x: Buffer, y: Buffer, gather: bool, activation: str | None = None
) -> Call:
    """One product of each expert, all of the same shape and without biases, see `write_experts`."""
    shapes = {(product.outputs, product.inputs, product.gated, product._bias is None) for product in products}
    first = products[0]
    if len(shapes) > 1 or first._bias is not None:
        raise NotCompiled("its experts have biases or differ in shape")
    kind, scaled = first._kind, first._scales is not None
    ending = Ending(y.element, gated=first.gated, activation=activation, scaled=scaled)
    panels = torch.tensor([product._panels.data_ptr() for product in products])
    scales = torch.tensor([product._scales.data_ptr() for product in products if product._scales is not None])
    return Call(
        f"experts_{kind.name}_{ending.name}_{'gather' if gather else 'scatter'}",
        write_experts(kind, ending, gather),
        (
            routes.jobs, routes.count, routes.order, routes.used, x.tensor, x.stride, panels,
            first._panels.shape[0], first._panels.shape[1], y.tensor, y.stride, scales,
        ),
    )  # fmt: skip


def _beside(outputs: Tensor, gated: bool) -> Tensor:
    """[panels x 32], in the order in which the outputs of a product lie."""
    parts = outputs.chunk(2) if gated else (outputs,)
    width = PANEL // len(parts)
    padded = [F.pad(part, (0, -len(part) % width)).view(-1, width) for part in parts]
    return torch.stack(padded, 1).flatten().contiguous()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One under the other. Those without numbers are not joined by torch, whose way of doing that takes it 0.8 s to
    import.
    """
    if parts[0].is_meta:
        return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    return torch.cat(list(parts))
