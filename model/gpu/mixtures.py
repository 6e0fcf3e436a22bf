"""Mixtures of experts as a few launches for all experts. They wait for nothing, so a CUDA graph can have them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import torch
import triton
from torch import Tensor

from model.blocks import MLP, Experts, GatedMLP, Norm
from model.forward import ForwardBatch
from model.gpu.expert_choice import add_places, arrange_places, choose_experts, count_places
from model.gpu.expert_weights import GROUP_ROWS, TILES, ExpertProduct, PlainExperts, RoutedPlaces, TileRows, product_of
from model.gpu.rows import gate_rows
from model.layers import Product, activated, gated, silu
from model.routing import AnyRouting, Routing

BLOCK = 1024
"""Elements, or places, that a program reads at once."""
MOST_PLACES = (8, 20, 40)
"""Places for each expert, on average, up to which tiles have the first, the second, and the third number of rows.

About half of the rows: most experts fit in one tile then, and their weights are read once.
"""
APART = 8
"""Experts for each place from which on places are no neighbours: then few experts have two of them."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelExperts:
    """`model.blocks.Experts` by kernels, whose bits depend on the number of tokens: see `model.gpu.expert_product`.

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
        rows: TileRows of a tile.
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
    rows: TileRows

    @classmethod
    def of(cls, mixture: Experts) -> Self | None:
        """Returns None for a mixture that there are no kernels for."""
        parts = [one for one in mixture.experts if isinstance(one, GatedMLP | MLP)]
        activate = _activation_of(parts) if len(parts) == len(mixture.experts) else None
        if activate is None:
            return None
        first = product_of([one.gate_up if isinstance(one, GatedMLP) else one.up for one in parts])
        down = product_of([one.down for one in parts])
        if first is None or down is None:
            return None
        plain = isinstance(first, PlainExperts) and isinstance(down, PlainExperts)
        rows = (TILES[0].rows, TILES[1].rows, TILES[2].rows, TILES[3].rows) if plain else GROUP_ROWS
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

    def _routes(self, logits: Tensor) -> RoutedPlaces:
        """Chooses the experts of tokens, by logits [tokens, experts]."""
        if isinstance(self.routing, Routing):
            weights, chosen = choose(self.routing, logits)
        else:
            weights, chosen = self.routing(logits.float())
            chosen = chosen.to(torch.int32)
        return arrange(weights, chosen, self.experts, self.rows)


def mixtures_of(part: object) -> Iterator[KernelExperts]:
    """Yields the mixtures of a model, or of a part of one."""
    if isinstance(part, KernelExperts):
        yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from mixtures_of(one)
    elif is_dataclass(part):
        for field in fields(part):
            yield from mixtures_of(getattr(part, field.name))


def run_all_tiles(model: object, dtype: torch.dtype, device: torch.device, most: int) -> None:
    """Runs each mixture of a model with tiles of all sizes, so that all kernels are compiled.

    Args:
        model: The model.
        dtype: Dtype of activations.
        device: Its device.
        most: Tokens of the largest step.
    """
    for mixture in mixtures_of(model):
        used, experts = mixture.routing.used, mixture.experts
        few = (1, experts // (APART * used) + 2)  # each place a tile, and in order
        for tokens in (*few, *(places * experts // used + 1 for places in MOST_PLACES)):
            if tokens <= most:
                mixture(torch.zeros((tokens, mixture.first.inputs), dtype=dtype, device=device))


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


def arrange(weights: Tensor, chosen: Tensor, experts: int, rows: TileRows) -> RoutedPlaces:
    """Divides places into tiles of one expert each.

    Args:
        weights: [tokens, used] float32.
        chosen: [tokens, used] int32.
        experts: The number of experts.
        rows: TileRows of a tile.
    """
    used, places = chosen.shape[1], chosen.numel()
    if len(chosen) == 1 or places * APART <= experts:
        return RoutedPlaces(used, weights, chosen, chosen, chosen, places, rows[0])
    size = rows[sum(places > most * experts for most in MOST_PLACES)]
    most = min(places, places // size + min(places, experts))
    counts, order, tiles = chosen.new_empty(experts), chosen.new_empty(places), chosen.new_empty((most, 3))
    count_places[(experts,)](counts, chosen, places, BLOCK=BLOCK)
    arrange_places[(experts,)](
        order, tiles, counts, chosen, places, most, ROWS=size, EXPERTS=triton.next_power_of_2(experts), BLOCK=BLOCK
    )
    return RoutedPlaces(used, weights, chosen, tiles, order, most, size)


def silu_gated(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) x up of [rows, 2 x width] by a kernel."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), width))
    gate_rows[(len(gate_up), triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


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
