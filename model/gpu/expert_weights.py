"""Weights of the experts of a mixture, as one launch multiplies them: see `model.gpu.expert_product`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import triton
from torch import Tensor

from model.gpu.expert_product import multiply_expert_groups, multiply_experts
from model.gpu.group_linear import KINDS, WARPS, GroupProduct
from model.layers import Linear, Product


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


TILES = (
    ProductTiles(16, 64, 128, 4, 3),
    ProductTiles(32, 128, 128, 4, 2),
    ProductTiles(64, 128, 64, 4, 3),
    ProductTiles(128, 128, 64, 8, 3),
)
"""Sizes for weights in 16 bits, measured on an H200 by `bench.on_gpu.tune_mixtures`. All fit in 99 KB."""
WIDE, WIDE_BYTES = ProductTiles(128, 256, 64, 8, 3), 147_456
"""Sizes in place of the last ones where a program can have so much shared memory: 4 % faster there."""
GROUP_ROWS, GROUP_OUTPUTS, GROUP_STAGES = (16, 32, 64, 64), 32, 4
"""For weights in groups: rows of a tile, outputs of a program, Triton's num_stages."""
TileRows = tuple[int, int, int, int]
"""TileRows of a tile: the more places there are, the more."""


class RoutedPlaces(NamedTuple):
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

    @property
    def inputs(self) -> int: ...

    def __call__(self, x: Tensor, routes: RoutedPlaces, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
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
        """Whether the first one lies at a multiple of 16 bytes, and the others at multiples of 16 elements from it."""
        return self.first.data_ptr() % 16 == 0 and not bool((self.at % 16).any())


@dataclass(frozen=True, slots=True, eq=False)
class PlainExperts:
    """`ExpertProduct` of weights in the model's dtype.

    Attributes:
        weights: [outputs, inputs] each.
        biases: [outputs] each. None without.
        aligned: See `Scattered.aligned`.
        tiles: Sizes of programs.
        kept: The tensors, which must live as long as this.
    """

    weights: Scattered
    biases: Scattered | None
    aligned: bool
    tiles: Sequence[ProductTiles]
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
        if biased and biases is None:
            return None
        return cls(weights, biases, weights.aligned, tiles_for(weights.first.device), plain)

    @property
    def inputs(self) -> int:
        return self.weights.first.shape[1]

    def __call__(self, x: Tensor, routes: RoutedPlaces, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
        weight, bias = self.weights, self.biases
        outputs, width = weight.first.shape
        sizes = fitted(next(one for one in self.tiles if one.rows == routes.rows), width, x.dtype)
        out = x.new_empty((routes.weights.numel(), outputs))
        multiply_experts[(triton.cdiv(outputs, sizes.outputs), routes.most)](
            out, x, weight.first, weight.at, weight.first if bias is None else bias.first,
            weight.at if bias is None else bias.at, routes.weights, routes.tiles, routes.order, outputs, width,
            USED=used, DIRECT=routes.direct, WEIGH_INPUTS=weigh_inputs, WEIGH_OUTPUTS=weigh_outputs,
            BIAS=bias is not None, WHOLE=self.aligned and width % sizes.inputs == 0, ROWS=sizes.rows,
            OUTS=sizes.outputs, INNER=sizes.inputs, num_warps=sizes.warps, num_stages=sizes.stages,
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

    @property
    def inputs(self) -> int:
        return self.products[0].inputs

    def __call__(self, x: Tensor, routes: RoutedPlaces, used: int, weigh_inputs: bool, weigh_outputs: bool) -> Tensor:
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


def tiles_for(device: torch.device) -> Sequence[ProductTiles]:
    """Returns the sizes of programs for a device."""
    if device.type != "cuda":
        return TILES
    number = torch.cuda.current_device() if device.index is None else device.index
    room = triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"]
    return (*TILES[:-1], WIDE) if room >= WIDE_BYTES else TILES


def fitted(sizes: ProductTiles, width: int, dtype: torch.dtype) -> ProductTiles:
    """Returns the sizes for a product of `width` inputs in a dtype."""
    if dtype == torch.float32:  # no matrix units: a program's sums and inputs are in its registers
        sizes = sizes._replace(outputs=64, inputs=32, warps=8)
    inputs = sizes.inputs
    # Inputs that fill the last round need no masks: the 2,880 of gpt-oss are 45 x 64.
    fitting = (size for size in (inputs, inputs // 2, 32) if width % size == 0)
    return sizes._replace(inputs=next(fitting, inputs))


def product_of(products: Sequence[Product]) -> ExpertProduct | None:
    """Returns the product of all experts. None where one launch cannot compute it."""
    return PlainExperts.of(products) or GroupExperts.of(products)
