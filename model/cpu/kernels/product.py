"""A product with weights that lie as the kernels read them, see `model.cpu.kernels.linear`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.experts import Routes, write_experts
from model.cpu.kernels.group_panels import GroupPanels, PanelGroups
from model.cpu.kernels.linear import Epilogue, in_panels, pack, write_linear
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.program import Call, Machine
from model.forward import ForwardBatch
from model.weight_formats.groups import GroupWeights


class NotCompiled(Exception):
    """Reports why there are no kernels for a model."""


class PackedWeights(Protocol):
    """Weights of a product, before they are laid as the kernels read them.

    Attributes:
        panels: Layout that they are to get.
        shape: Outputs and inputs.
        scales: [out] float32, of the sums. None for none.
    """

    @property
    def panels(self) -> Panels | GroupPanels: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def scales(self) -> Tensor | None: ...

    def packed(self, gated: bool) -> Tensor:
        """Lays the weights out, see `pack`. Returns [panels, ...]."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelWeights:
    """`PackedWeights` that are stored one by one.

    Attributes:
        rows: [out, in] of any dtype that the panels hold.
    """

    panels: Panels
    rows: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.rows.shape[1]

    def packed(self, gated: bool) -> Tensor:
        return pack(self.rows, self.panels, gated)


@dataclass(frozen=True, slots=True, eq=False)
class KernelGroups:
    """`PackedWeights` in groups.

    Attributes:
        groups: The weights; `panels` fit them.
    """

    panels: GroupPanels
    groups: GroupWeights
    scales: None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.groups.values), self.groups.values.shape[1]

    def packed(self, gated: bool) -> Tensor:
        groups = self.groups
        offsets = None if groups.offsets is None else in_panels(groups.offsets, gated)
        values, scales = in_panels(groups.values, gated), in_panels(groups.scales, gated)
        return self.panels.laid(PanelGroups(values, scales, offsets, groups.size))


class KernelLinear:
    """`model.layers.Linear` for kernels, of weights in any format that they know.

    With `gated` the first half of the outputs are gates of the second half and lie beside them; then only `call` is of
    use, with an activation.
    """

    def __init__(
        self, machine: Machine, weights: PackedWeights, bias: Tensor | None = None, gated: bool = False
    ) -> None:
        self._machine, self._kind, self.gated = machine, weights.panels, gated
        self._element = weights.panels.element
        self.outputs, self.inputs = weights.shape
        if self.inputs % self._element.packed:
            raise NotCompiled(f"{self.inputs} inputs of a product are no multiple of {self._element.packed}")
        self._scales = None if weights.scales is None else _beside(weights.scales, gated)
        self._panels = weights.packed(gated)
        self._steps = self.inputs // self._element.packed
        self._bias = None if bias is None else _beside(bias.float(), gated)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def call(self, rows: int, x: Buffer, y: Buffer, add: bool = False, activation: str | None = None) -> Call:
        """Makes the call of the product.

        Args:
            rows: Address of the cell with the number of rows.
            x: Input, of the element of the weights.
            y: Buffer of the result.
            add: Whether the result is added to y.
            activation: Activation of the gates, for a gated product.
        """
        bias, scales = self._bias, self._scales
        ending = Epilogue(y.element, bias is not None, add, self.gated, activation, scales is not None)
        return Call(
            f"linear_{self._kind.name}_{ending.name}",
            write_linear(self._kind, ending),
            (
                rows, x.tensor, x.stride, self._panels, len(self._panels), self._steps, y.tensor, y.stride,
                0 if bias is None else bias, 0 if scales is None else scales,
            ),
        )  # fmt: skip

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        source, out = Buffer.copy_of(x, self._element), Buffer.of(len(x), self.outputs, FLOAT)
        count = torch.tensor([len(x)])
        self._machine.program([self.call(count.data_ptr(), source, out)]).run()
        return out.tensor[: len(x), : self.outputs].to(x.dtype)


def experts_call(
    products: Sequence[KernelLinear], routes: Routes, x: Buffer, y: Buffer, gather: bool, activation: str | None = None
) -> Call:
    """Makes the call of each expert's product, see `write_experts`.

    Raises:
        NotCompiled: The experts have biases, or differ in shape or in the layout of their weights.
    """
    shapes = {(product.outputs, product.inputs, product.gated, product._bias is None) for product in products}
    first = products[0]
    if len(shapes) > 1 or first._bias is not None:
        raise NotCompiled("its experts have biases or differ in shape")
    kind, scaled = first._kind, first._scales is not None
    if any(product._kind != kind for product in products):  # one kernel reads the panels of all of them
        raise NotCompiled("its experts are in several weight formats")
    ending = Epilogue(y.element, gated=first.gated, activation=activation, scaled=scaled)
    panels = torch.tensor([product._panels.data_ptr() for product in products])
    scales = torch.tensor([product._scales.data_ptr() for product in products if product._scales is not None])
    return Call(
        f"experts_{kind.name}_{ending.name}_{'gather' if gather else 'scatter'}",
        write_experts(kind, ending, gather),
        (
            routes.jobs, routes.count, routes.order, routes.used, x.tensor, x.stride, panels,
            len(first._panels), first._steps, y.tensor, y.stride, scales,
        ),
    )  # fmt: skip


def _beside(outputs: Tensor, gated: bool) -> Tensor:
    """Returns values [panels x 32] in the order in which the outputs of a product lie."""
    parts = outputs.chunk(2) if gated else (outputs,)
    width = PANEL // len(parts)
    padded = [F.pad(part, (0, -len(part) % width)).view(-1, width) for part in parts]
    return torch.stack(padded, 1).flatten().contiguous()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Joins weights, one below the other.

    Weights without numbers are not joined by torch: its way of doing that takes 0.8 s to import.
    """
    if parts[0].is_meta:
        return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    return torch.cat(list(parts))
