"""Mixtures of experts as a few launches for all experts. They wait for nothing, so a CUDA graph can have them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
import triton
from torch import Tensor

from model.blocks import MLP, Experts, GatedMLP, Norm
from model.forward import ForwardBatch
from model.gpu.expert_choice import add_places, arrange_places, choose_experts, count_places
from model.gpu.expert_product import multiply_expert_groups, multiply_experts
from model.gpu.group_linear import KINDS, WARPS, GroupProduct
from model.gpu.rows import gate_rows
from model.layers import Linear, Product, activated, gated, silu
from model.routing import AnyRouting, Routing

BLOCK = 1024
"""Elements, or places, that a program reads at once."""
FEW, SOME = 16, 128
"""Places for each expert, on average, up to which tiles have few rows, and some."""
APART = 8
"""Experts for each place from which on places are no neighbours: then few experts have two of them."""


class ProductTiles(NamedTuple):
    """Sizes of a program of `model.gpu.expert_product`.

    Attributes:
        rows: Places of a tile.
        outputs: Outputs of a program.
        inputs: Inputs that are multiplied at once.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW_ROWS, SOME_ROWS, MANY_ROWS = (
    ProductTiles(16, 64, 128, 4, 4),
    ProductTiles(64, 128, 64, 4, 3),
    ProductTiles(128, 128, 64, 8, 3),
)
"""Sizes for weights in 16 bits."""
GROUP_ROWS, GROUP_OUTPUTS, GROUP_STAGES = (16, 64), 32, 4
"""Rows of a tile for weights in groups, few and more; outputs of a program."""


class Routes(NamedTuple):
    """Experts of a step's tokens. A place is a token with one of its experts.

    Attributes:
        used: Experts of a token.
        weights: [tokens, used] float32.
        chosen: [tokens, used] int32.
        tiles: [tiles, 3] int32, see `arrange_places`. `chosen` where each place is a tile.
        order: [places] int32, likewise.
        most: Tiles that there may be.
        rows: Places of a tile.
    """

    used: int
    weights: Tensor
    chosen: Tensor
    tiles: Tensor
    order: Tensor
    most: int
    rows: int

    @property
    def direct(self) -> bool:
        return self.order is self.chosen


class ExpertProduct(Protocol):
    """One product of each expert."""

    def __call__(self, x: Tensor, routes: Routes, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
        """Multiplies each place's row with the weights of its expert.

        Args:
            x: [places / used, inputs].
            routes: The step's routes.
            used: Places that have one row of x.
            weigh_inputs: Whether weights of experts multiply x.
            weigh_outputs: Whether weights of experts multiply the result.

        Returns:
            [places, outputs].
        """


class Scattered(NamedTuple):
    """Tensors of one shape and dtype, each in memory of its own.

    Attributes:
        first: The first one.
        at: [count] int64. Elements from the first one to each.
    """

    first: Tensor
    at: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Self | None:
        """Returns None where one is missing, or they are not alike, or not contiguous."""
        there = [one for one in tensors if one is not None]
        if len(there) < len(tensors) or len({(one.shape, one.stride(), one.dtype) for one in there}) > 1:
            return None
        first = there[0]
        if not first.is_contiguous():
            return None
        distances = [one.data_ptr() - first.data_ptr() for one in there]
        if any(distance % first.itemsize for distance in distances):
            return None
        at = torch.tensor([distance // first.itemsize for distance in distances], device=first.device)
        return cls(first, at)

    @property
    def aligned(self) -> bool:
        """Whether all lie at multiples of 16 elements."""
        return self.first.data_ptr() % 16 == 0 and not bool((self.at % 16).any())


@dataclass(frozen=True, slots=True, eq=False)
class PlainExperts:
    """`ExpertProduct` of weights in the model's dtype.

    Attributes:
        weights: [outputs, inputs] each.
        biases: [outputs] each. None without.
        aligned: See `Scattered.aligned`.
        kept: The tensors, which must live as long as this.
    """

    weights: Scattered
    biases: Scattered | None
    aligned: bool
    kept: Sequence[Linear]

    @classmethod
    def of(cls, products: Sequence[Product]) -> Self | None:
        """Returns None where products have other weights."""
        plain = [one for one in products if type(one) is Linear]
        weights = Scattered.of([one.weight for one in plain]) if plain and len(plain) == len(products) else None
        if weights is None:
            return None
        biased = any(one.bias is not None for one in plain)
        biases = Scattered.of([one.bias for one in plain]) if biased else None
        return None if biased and biases is None else cls(weights, biases, weights.aligned, plain)

    def __call__(self, x: Tensor, routes: Routes, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
        weight, bias = self.weights, self.biases
        outputs, width = weight.first.shape
        sizes = tiles_of(routes.rows, width, x.dtype)
        out = x.new_empty((routes.weights.numel(), outputs))
        multiply_experts[(triton.cdiv(outputs, sizes.outputs), routes.most)](
            out, x, weight.first, weight.at, weight.first if bias is None else bias.first,
            weight.at if bias is None else bias.at, routes.weights, routes.tiles, routes.order, outputs, width,
            USED=used, DIRECT=routes.direct, WEIGH_INPUTS=weigh_inputs, WEIGH_OUTPUTS=weigh_outputs,
            BIAS=bias is not None, WHOLE=self.aligned and width % sizes.inputs == 0, ROWS=sizes.rows, OUTS=sizes.outputs, INNER=sizes.inputs,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True, eq=False)
class GroupExperts:
    """`ExpertProduct` of weights in groups, see `model.gpu.group_linear`."""

    values: Scattered
    scales: Scattered
    offsets: Scattered | None
    biases: Scattered | None
    products: Sequence[GroupProduct]

    @classmethod
    def of(cls, products: Sequence[Product]) -> Self | None:
        """Returns None where products have other weights, or unlike ones."""
        grouped = [one for one in products if isinstance(one, GroupProduct) and len(one.parts) == 1]
        if not grouped or len(grouped) < len(products):
            return None
        parts = [one.parts[0] for one in grouped]
        kinds = {(one.levels, one.step, one.size, one.scales.dtype, one.scales.groups) for one in parts}
        of_offsets = {None if one.offsets is None else one.offsets.dtype for one in parts}
        if len(kinds) > 1 or len(of_offsets) > 1 or any(one.index is not None for one in parts):
            return None
        values = Scattered.of([one.values for one in parts])
        scales = Scattered.of([one.scales.stored for one in parts])
        offsets = Scattered.of([one.offsets.stored for one in parts if one.offsets is not None] or [None])
        biased = any(one.bias is not None for one in grouped)
        biases = Scattered.of([one.bias for one in grouped]) if biased else None
        if values is None or scales is None or not values.aligned or (biased and biases is None):
            return None
        return None if None not in of_offsets and offsets is None else cls(values, scales, offsets, biases, grouped)

    def __call__(self, x: Tensor, routes: Routes, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
        first, bias = self.products[0], self.biases
        part, offsets = first.parts[0], self.offsets if self.offsets is not None else self.scales
        if weigh_inputs:
            x, used = (x.repeat_interleave(used, 0) * routes.weights.flatten()[:, None]).to(x.dtype), 1
        out = x.new_empty((routes.weights.numel(), first.outputs))
        multiply_expert_groups[(triton.cdiv(first.outputs, GROUP_OUTPUTS), routes.most)](
            out, x, self.values.first, self.values.at, self.scales.first, self.scales.at, offsets.first, offsets.at,
            part.values if first.table is None else first.table, x if bias is None else bias.first,
            self.values.at if bias is None else bias.at, routes.weights, routes.tiles, routes.order, first.outputs,
            first.inputs, part.scales.groups, USED=used, DIRECT=routes.direct, WEIGH_OUTPUTS=weigh_outputs,
            BIAS=bias is not None, FORMAT=first.stored_format, BITS=part.levels.bits, FIRST=part.levels.numbers[0],
            SIZE=0 if part.scales.groups == 1 else part.size, RUN=part.run, STEP=part.step,
            SCALES=KINDS[part.scales.dtype],
            OFFSETS=None if part.offsets is None else KINDS[part.offsets.dtype], ROWS=routes.rows,
            OUTS=GROUP_OUTPUTS, num_warps=WARPS, num_stages=GROUP_STAGES,
        )  # fmt: skip
        return out


def tiles_of(rows: int, width: int, dtype: torch.dtype) -> ProductTiles:
    """Returns the sizes of a product with tiles of so many rows, and `width` inputs."""
    sizes = next(one for one in (FEW_ROWS, SOME_ROWS, MANY_ROWS) if one.rows >= rows)
    if dtype == torch.float32:  # no matrix units: a program's sums and inputs are in its registers
        sizes = sizes._replace(outputs=64, inputs=32, warps=8)
    inputs = sizes.inputs
    # Inputs that fill the last round need no masks: the 2,880 of gpt-oss are 45 x 64.
    fitting = (size for size in (inputs, inputs // 2, 32) if width % size == 0)
    return sizes._replace(inputs=next(fitting, inputs))


@dataclass(frozen=True, slots=True, eq=False)
class KernelExperts:
    """`model.blocks.Experts` by kernels.

    Attributes:
        router: See `Experts`.
        routing: See `Experts`.
        router_norm: See `Experts`.
        norm: See `Experts`.
        weighs_inputs: See `Experts`.
        experts: The number of experts.
        first: First product of each expert.
        down: Last product of each expert.
        activate: Maps results of the first to inputs of the last: [places, outputs] to [places, inputs].
        rows: Rows of a tile: for few places, for some, for many.
    """

    router: Product
    routing: AnyRouting
    router_norm: Norm | None
    norm: Norm | None
    weighs_inputs: bool
    experts: int
    first: ExpertProduct
    down: ExpertProduct
    activate: Callable[[Tensor], Tensor]
    rows: tuple[int, int, int]

    @classmethod
    def of(cls, mixture: Experts) -> Self | None:
        """Returns None for a mixture that there are no kernels for."""
        parts = [one for one in mixture.experts if isinstance(one, GatedMLP | MLP)]
        activate = _activation_of(parts) if len(parts) == len(mixture.experts) else None
        if activate is None:
            return None
        first = _product_of([one.gate_up if isinstance(one, GatedMLP) else one.up for one in parts])
        down = _product_of([one.down for one in parts])
        if first is None or down is None:
            return None
        plain = isinstance(first, PlainExperts) and isinstance(down, PlainExperts)
        rows = (FEW_ROWS.rows, SOME_ROWS.rows, MANY_ROWS.rows) if plain else (*GROUP_ROWS, GROUP_ROWS[-1])
        return cls(
            mixture.router, mixture.routing, mixture.router_norm, mixture.norm, mixture.weighs_inputs, len(parts),
            first, down, activate, rows,
        )  # fmt: skip

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        seen = x if self.router_norm is None else self.router_norm(x)
        x = (x if self.norm is None else self.norm(x)).contiguous()
        routes = self._routes(self.router(seen, batch).contiguous())
        made = self.activate(self.first(x, routes, routes.used, self.weighs_inputs, False))
        made = self.down(made, routes, 1, False, not self.weighs_inputs)
        out, width = torch.empty_like(x), x.shape[1]
        add_places[(len(x), triton.cdiv(width, BLOCK))](out, made, width, USED=routes.used, BLOCK=BLOCK)
        return out

    def _routes(self, logits: Tensor) -> Routes:
        """Chooses the experts of tokens, by logits [tokens, experts]."""
        if isinstance(self.routing, Routing):
            weights, chosen = choose(self.routing, logits)
        else:
            weights, chosen = self.routing(logits.float())
            chosen = chosen.to(torch.int32)
        return arrange(weights, chosen, self.experts, self.rows)


def choose(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `Routing` by a kernel.

    Args:
        routing: The routing.
        logits: [tokens, experts], contiguous.

    Returns:
        Weights [tokens, used] float32, and experts [tokens, used] int32.
    """
    (tokens, experts), used, groups = logits.shape, routing.used, routing.groups
    weights = torch.empty((tokens, used), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, used), dtype=torch.int32, device=logits.device)
    bias, scales = routing.bias, routing.scales
    choose_experts[(tokens,)](
        chosen, weights, logits, weights if bias is None else bias, weights if scales is None else scales, experts,
        routing.factor, routing.least, EXPERTS=triton.next_power_of_2(experts), USED=used,
        PLACES=triton.next_power_of_2(used), GROUPS=1 if groups is None else groups.count,
        GROUPS_USED=1 if groups is None else groups.used, BEST=1 if groups is None else groups.best,
        BIAS=bias is not None, SCALES=scales is not None, BY_SIGMOID=routing.by_sigmoid, NORMALISED=routing.normalised,
    )  # fmt: skip
    return weights, chosen


def arrange(weights: Tensor, chosen: Tensor, experts: int, rows: tuple[int, int, int]) -> Routes:
    """Divides places into tiles of one expert each.

    Args:
        weights: [tokens, used] float32.
        chosen: [tokens, used] int32.
        experts: The number of experts.
        rows: Rows of a tile: for few places, for some, for many.
    """
    used, places = chosen.shape[1], chosen.numel()
    if len(chosen) == 1 or places * APART <= experts:
        return Routes(used, weights, chosen, chosen, chosen, places, rows[0])
    size = rows[(places > FEW * experts) + (places > SOME * experts)]
    most = min(places, places // size + min(places, experts))
    counts, order, tiles = chosen.new_empty(experts), chosen.new_empty(places), chosen.new_empty((most, 3))
    count_places[(experts,)](counts, chosen, places, BLOCK=BLOCK)
    arrange_places[(experts,)](
        order, tiles, counts, chosen, places, most, ROWS=size, EXPERTS=triton.next_power_of_2(experts), BLOCK=BLOCK
    )
    return Routes(used, weights, chosen, tiles, order, most, size)


def silu_gated(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) x up of [rows, 2 x width] by a kernel."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), width))
    gate_rows[(len(gate_up), triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


def _product_of(products: Sequence[Product]) -> ExpertProduct | None:
    return PlainExperts.of(products) or GroupExperts.of(products)


def _activation_of(parts: Sequence[GatedMLP | MLP]) -> Callable[[Tensor], Tensor] | None:
    """Returns what stands between the products of experts. None where they differ."""
    first: Any = parts[0]
    limit = first.limit if isinstance(first, GatedMLP) else None
    for part in parts:
        own = part.limit if isinstance(part, GatedMLP) else None
        if type(part) is not type(first) or part.activation is not first.activation or own != limit:
            return None
    if isinstance(first, MLP):
        return lambda x: activated(x, first.activation)
    if first.activation is silu and limit is None:
        return silu_gated
    return lambda x: gated(x, first.activation, limit)
