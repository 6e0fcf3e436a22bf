"""A product with weights that lie as the kernels read them, see `model.cpu.kernels.linear`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT, OCTET, Element
from model.cpu.kernels.experts import Routes, write_experts
from model.cpu.kernels.group_panels import GroupPanels, PanelGroups
from model.cpu.kernels.linear import Epilogue, activation_of, in_panels, pack, write_linear
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.prepared import ZERO, Preparation
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import write_gated
from model.cpu.kernels.sums import sums_kernel
from model.forward import ForwardBatch
from model.weight_formats.groups import GroupWeights


class NotCompiled(Exception):
    """Reports why there are no kernels for a model."""


class PackedWeights(Protocol):
    """Weights of a product, before they are laid as the kernels read them.

    Attributes:
        panels: Layout that they are to get.
        shape: Outputs, and inputs that the weights are multiplied with.
        inputs: Inputs that the product is given.
        element: Their element.
        scales: [out] float32, of the sums. None for none.
        zeros: [out] int32. Sums of inputs that are all 0, where inputs and weights are octets. None elsewhere.
        preparation: Makes the inputs that the weights are multiplied with. None for the inputs as they are.
    """

    @property
    def panels(self) -> Panels | GroupPanels: ...

    @property
    def preparation(self) -> Preparation | None: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def inputs(self) -> int: ...

    @property
    def element(self) -> Element: ...

    @property
    def scales(self) -> Tensor | None: ...

    @property
    def zeros(self) -> Tensor | None: ...

    def packed(self, gated: bool) -> Tensor:
        """Lays the weights out, see `pack`. Returns [panels, ...]."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelWeights:
    """`PackedWeights` that are stored one by one.

    Attributes:
        rows: [out, in] of any dtype that the panels hold.
        given: Element of the inputs that the product is given, where there is a preparation. None for the panels'.
    """

    panels: Panels
    rows: Tensor
    scales: Tensor | None = None
    preparation: Preparation | None = None
    given: Element | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.rows.shape[1]

    @property
    def inputs(self) -> int:
        return self.rows.shape[1]

    @property
    def element(self) -> Element:
        return self.given or self.panels.element

    @property
    def zeros(self) -> Tensor | None:
        if self.panels.element != OCTET:
            return None
        return ZERO * self.rows.sum(1, dtype=torch.int32)

    def packed(self, gated: bool) -> Tensor:
        return pack(self.rows, self.panels, gated)


@dataclass(frozen=True, slots=True, eq=False)
class KernelGroups:
    """`PackedWeights` in groups.

    Attributes:
        groups: The weights; `panels` fit them.
        given: Inputs that the product is given, where there is a preparation. 0 for those of the weights.
    """

    panels: GroupPanels
    groups: GroupWeights
    preparation: Preparation | None = None
    given: int = 0
    scales: None = None
    zeros: None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.groups.values), self.groups.values.shape[1]

    @property
    def inputs(self) -> int:
        return self.given or self.groups.values.shape[1]

    @property
    def element(self) -> Element:
        return self.panels.element

    def packed(self, gated: bool) -> Tensor:
        groups, blocks = self.groups, self.groups.blocks

        def put(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else in_panels(numbers, gated)

        values, scales = in_panels(groups.values, gated), in_panels(groups.scales, gated)
        of_blocks = (None, None) if blocks is None else (put(blocks.scales), put(blocks.offsets))
        return self.panels.laid(PanelGroups(values, scales, put(groups.offsets), *of_blocks, groups.size))


class KernelPart:
    """Some outputs of a product, whose weights lie in one layout.

    Attributes:
        outputs: The number of outputs.
        preparation: See `PackedWeights`.
        sums: The kernel of its sums.
    """

    def __init__(self, weights: PackedWeights, bias: Tensor | None, gated: bool, has_tiles: bool) -> None:
        """Lays the weights out. Raises NotCompiled where there are no kernels for their inputs."""
        self.kind, self.preparation = weights.panels, weights.preparation
        self.outputs, inputs = weights.shape
        element = self.kind.element
        if inputs % element.packed:
            raise NotCompiled(f"{inputs} inputs of a product are no multiple of {element.packed}")
        self.scales = None if weights.scales is None else _beside(weights.scales, gated)
        self.zeros = None if weights.zeros is None else _beside(weights.zeros, gated)
        self.panels = weights.packed(gated)
        self.steps = inputs // element.packed
        self.sums = sums_kernel(self.kind, self.steps, has_tiles)
        self.bias = None if bias is None else _beside(bias.float(), gated)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.panels, self.scales, self.zeros) if one is not None)

    def call(self, rows: int, x: Buffer, y: Tensor, y_stride: int, ending: Epilogue) -> Call:
        """Makes the call of the product; `y` begins with its first output."""
        return Call(
            f"linear_{self.kind.name}_{ending.name}",
            write_linear(self.kind, ending),
            (
                rows, x.tensor, x.stride, self.panels, len(self.panels), self.steps, y, y_stride,
                *(0 if one is None else one for one in (self.bias, self.scales, self.zeros)), self.sums,
            ),
        )  # fmt: skip


def gated_call(rows: int, x: Buffer, y: Buffer, width: int, activation: str | None) -> Call:
    """Makes the call that multiplies `width` columns with the activated ones before them."""
    name = f"gated_{activation or 'linear'}_{y.element.name}"
    arguments = rows, x.tensor, x.stride, width, y.tensor, y.stride
    function = None if activation is None else activation_of(activation)
    return Call(name, write_gated(function, y.element), arguments)


Room = Callable[[str, int, Element], Buffer]
"""Returns a buffer of this name, width and element, for as many rows as a product may have."""


class KernelLinear:
    """`model.layers.Linear` for kernels, of weights in any format that they know.

    With `gated` the first half of the outputs are gates of the second half, and lie beside them where both are stored
    alike; then only `calls` is of use, with an activation.

    Attributes:
        outputs: Outputs.
        inputs: Inputs.
        columns: Columns of a result: those that fill the last panel of a part up are written too.
    """

    def __init__(
        self, machine: Machine, weights: Sequence[PackedWeights], bias: Tensor | None = None, gated: bool = False
    ) -> None:
        """Lays the weights out.

        Args:
            machine: Machine that runs the kernels.
            weights: Weights whose outputs follow each other, and whose inputs are the same.
            bias: Bias of all outputs.
            gated: Whether the first half of the outputs are gates.

        Raises:
            NotCompiled: There are no kernels for these widths.
        """
        self._machine, self.gated = machine, gated
        starts = [0, *accumulate(one.shape[0] for one in weights)]
        # Gates that are stored in another way than what they multiply do not lie beside it.
        self._gated_apart = gated and len(weights) > 1
        self._parts = [
            KernelPart(
                one, None if bias is None else bias[start : start + one.shape[0]], gated and len(weights) == 1,
                machine.compiler.has_tiles,
            )
            for one, start in zip(weights, starts, strict=False)
        ]  # fmt: skip
        self.outputs = starts[-1]
        self.columns = max(
            start + -(-part.outputs // PANEL) * PANEL for start, part in zip(starts, self._parts, strict=False)
        )
        self.inputs, self._element = weights[0].inputs, weights[0].element

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def only(self) -> KernelPart:
        """The part of a product that has one, and reads its inputs as they are. Raises NotCompiled for others."""
        if len(self._parts) > 1 or self._parts[0].preparation is not None:
            raise NotCompiled("there are none for experts whose inputs are ordered or rounded")
        return self._parts[0]

    def calls(
        self, rows: int, x: Buffer, y: Buffer, room: Room, add: bool = False, activation: str | None = None
    ) -> list[Call]:
        """Makes the calls of the product.

        Args:
            rows: Address of the cell with the number of rows.
            x: Input, of the element of the weights.
            y: Buffer of the result.
            room: Makes buffers between two calls.
            add: Whether the result is added to y.
            activation: Activation of the gates, for a gated product.
        """
        made, start, out = list[Call](), 0, y
        if self._gated_apart:
            y, activation, gates = room("gates", self.columns, FLOAT), None, activation
        if y.tensor.shape[1] < self.columns and len(self._parts) > 1:
            raise NotCompiled(f"a product in {len(self._parts)} parts needs {self.columns} columns")
        for part in self._parts:
            source, prepared = x, part.preparation
            if prepared is not None:
                source = room("prepared", prepared.width, prepared.element)
                made.append(prepared.call(rows, x, source))
            ending = Epilogue(
                y.element, part.bias is not None, add, self.gated and not self._gated_apart, activation,
                part.scales is not None, part.zeros is not None,
            )  # fmt: skip
            made.append(part.call(rows, source, y.tensor[:, start:], y.stride, ending))
            start += part.outputs
        if self._gated_apart:
            made.append(gated_call(rows, y, out, self.outputs // 2, gates))
        return made

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        source, out = Buffer.copy_of(x, self._element), Buffer.of(len(x), self.columns, FLOAT)
        count = torch.tensor([len(x)])

        def room(_: str, width: int, element: Element) -> Buffer:
            return Buffer.of(len(x), width, element)

        self._machine.program(self.calls(count.data_ptr(), source, out, room)).run()
        return out.tensor[: len(x), : self.outputs].to(x.dtype)


def experts_call(
    products: Sequence[KernelLinear],
    routes: Routes,
    x: Buffer,
    y: Buffer,
    gather: bool,
    activation: str | None = None,
    limit: float | None = None,
    by_place: bool = False,
) -> Call:
    """Makes the call of each expert's product, see `write_experts`.

    Args:
        products: The products, by expert. They must outlive the call.
        routes: Rows and experts of a step.
        x: Input.
        y: Buffer of the result.
        gather: See `write_experts`.
        activation: Activation of the gates, for gated products.
        limit: See `Epilogue`.
        by_place: With `gather`: whether the input has a row for each place, and not one for all experts of a row.

    Raises:
        NotCompiled: The experts differ in shape or in the layout of their weights.
    """
    parts = [product.only for product in products]
    first = parts[0]
    if len({(part.outputs, part.steps, part.bias is None) for part in parts}) > 1:
        raise NotCompiled("its experts differ in shape, or some have biases")
    kind, gated = first.kind, products[0].gated
    if any(part.kind != kind for part in parts):  # one kernel reads the panels of all of them
        raise NotCompiled("its experts are in several weight formats")
    if any(product.gated != gated for product in products):
        raise NotCompiled("some of its experts are gated")
    ending = Epilogue(
        y.element, first.bias is not None, gated=gated, activation=activation, scaled=first.scales is not None,
        limit=limit,
    )  # fmt: skip
    panels = torch.tensor([part.panels.data_ptr() for part in parts])
    scales = torch.tensor([part.scales.data_ptr() for part in parts if part.scales is not None])
    biases = torch.tensor([part.bias.data_ptr() for part in parts if part.bias is not None])
    return Call(
        f"experts_{kind.name}_{ending.name}_{'gather' if gather else 'scatter'}",
        write_experts(kind, ending, gather),
        (
            routes.jobs, routes.count, routes.order, 1 if by_place else routes.used, x.tensor, x.stride, panels,
            len(first.panels), first.steps, y.tensor, y.stride, scales, biases, first.sums,
        ),
    )  # fmt: skip


def _beside(outputs: Tensor, gated: bool) -> Tensor:
    """Returns values [panels x 32] in the order in which the outputs of a product lie."""
    parts = outputs.chunk(2) if gated else (outputs,)
    width = PANEL // len(parts)
    padded = [F.pad(part, (0, -len(part) % width)).view(-1, width) for part in parts]
    return torch.stack(padded, 1).flatten().contiguous()
