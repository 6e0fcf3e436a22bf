"""Mixtures whose experts have weights in 4 and 8 bits, beside the same mixture in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.on_gpu.bench import Bench
from bench.on_gpu.drawn_weights import OF_EXPERTS, GroupKind, draw_weight, exact_weight, product_of
from bench.on_gpu.memory import free
from bench.on_gpu.mixtures import SHAPES, TOKENS, MixtureShape, by_kernels, layers_of, random_mixture
from bench.on_gpu.report import WRONG, Table
from bench.on_gpu.timing import Timing, Work, measure
from bench.on_gpu.truth import Error, Tolerance
from model.blocks import Experts, GatedMLP
from model.gpu.mixtures import KernelExperts
from model.layers import Linear, silu
from model.routing import Routing
from model.weight_formats.scratch import Scratch
from model.weight_formats.stored import StoredWeight

A_CASE = 2.0  # seconds of all kinds with one number of tokens
PLAIN = "16 bits"
CHECKED = 64  # tokens whose results are checked
FEW = 64  # tokens of a step that may not use all experts
INPUTS = 16
"""Steps that calls cycle over where tokens are few. Each uses other experts, so that caches do not keep them."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of the mixtures.

    Attributes:
        shape: The mixture.
        kinds: Names of kinds of its experts' weights.
        tokens: Tokens of a step.
        rotated: Bytes of weights that calls cycle over.
        rounds: Rounds of each measurement.
        dtype: Dtype of activations.
    """

    shape: MixtureShape = SHAPES["Qwen3-30B-A3B"]
    kinds: tuple[str, ...] = tuple(OF_EXPERTS)
    tokens: tuple[int, ...] = TOKENS
    rotated: int = 512 * 2**20
    rounds: int = 5
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """A mixture of one kind.

    Attributes:
        kind: Kind of its experts.
        plain: Its choice of experts.
        kernels: The mixture by kernels.
        weights: First and last weight of each expert.
        expert_bytes: Bytes of an expert.
    """

    kind: GroupKind
    plain: Experts
    kernels: KernelExperts
    weights: Sequence[tuple[StoredWeight, StoredWeight]]
    expert_bytes: float

    @staticmethod
    def of(kind: GroupKind, sizes: ExpertSizes, scratch: Scratch, random: torch.Generator) -> "QuantizedLayer":
        shape, dtype, parts, weights, total = sizes.shape, sizes.dtype, list[GatedMLP](), [], 0
        for _ in range(shape.experts):
            first = draw_weight(kind, 2 * shape.width, shape.hidden, random)
            down = draw_weight(kind, shape.hidden, shape.width, random)
            made = product_of(kind, [first], dtype, scratch), product_of(kind, [down], dtype, scratch)
            parts.append(GatedMLP(*made, silu))
            weights.append((first, down))
            total += sum(one.nbytes for one in made)
        router = torch.randn((shape.experts, shape.hidden), generator=random, device=random.device)
        routed = Linear((router * shape.hidden**-0.5).to(dtype))
        plain = Experts(routed, parts, Routing(shape.used, True))
        return QuantizedLayer(kind, plain, by_kernels(plain), weights, total / shape.experts)

    def experts_of(self, x: Tensor) -> int:
        """Returns how many experts some token uses."""
        return chosen_of(self.plain, x)[1].unique().numel()

    def error(self, x: Tensor) -> Error:
        """Returns the error of some tokens; `most` is a share of the largest magnitude."""
        some = slice(0, None, max(1, len(x) // CHECKED))
        found, x = self.kernels(x)[some], x[some]
        factors, chosen = chosen_of(self.plain, x)
        expected = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert, (first, down) in enumerate(self.weights):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[rows].double() @ exact_weight(self.kind, first).T).chunk(2, -1)
            made = (F.silu(gate) * up) @ exact_weight(self.kind, down).T
            expected.index_add_(0, rows, made * factors[rows, place, None].double())
        error = Error.of(found, expected)
        return Error(error.most / float(expected.abs().max()), error.norm)


def chosen_of(mixture: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights and experts of tokens, [tokens, used] each."""
    return mixture.routing(mixture.router(x).float())


def layers_of_kind(
    kind: GroupKind, sizes: ExpertSizes, scratch: Scratch, random: torch.Generator
) -> list[QuantizedLayer]:
    """Draws so many layers that caches do not keep their weights from one call to the next."""
    made = [QuantizedLayer.of(kind, sizes, scratch, random)]
    while len(made) * sizes.shape.experts * made[0].expert_bytes < sizes.rotated:
        made.append(QuantizedLayer.of(kind, sizes, scratch, random))
    return made


def compile_experts(sizes: ExpertSizes, name: str) -> None:
    """Runs a mixture of a kind with all numbers of tokens."""
    device, kind = torch.device("cuda"), OF_EXPERTS[name]
    layer = QuantizedLayer.of(kind, sizes, Scratch(sizes.dtype, device), torch.Generator(device)).kernels
    for tokens in sizes.tokens:
        layer(torch.zeros((tokens, sizes.shape.hidden), dtype=sizes.dtype, device=device))


def expert_table(bench: Bench, sizes: ExpertSizes, scratch: Scratch) -> Table:
    """Measures a mixture with experts of all kinds."""
    table = Table("mixtures with weights in 4 and 8 bits, one layer", {
        "kind, tokens": "", "experts": ",.0f", "ms": ".4f", "spread": ".0%", "of the floor": ".0%",
        f"{PLAIN} ms": ".4f", f"times {PLAIN}": ".2f", "error": ".1e", "of the norm": ".1e", "verdict": "",
    })  # fmt: skip
    shape = sizes.shape
    table.notes.append(
        f"{shape.experts} experts of {shape.width}, {shape.used} of a token, hidden size {shape.hidden:,} (Qwen3 "
        "30B-A3B): choice of experts, order, both products, gate, sum. Calls cycle over layers and tokens. Floor: the "
        "weights of the experts that some token uses at the rate of memory, or the products at that of 16 bits, if "
        f"that is longer. {PLAIN}: the same mixture of such weights, interleaved."
    )
    layers, random = dict[str, list[QuantizedLayer]](), torch.Generator(bench.device).manual_seed(0)
    for kind in sizes.kinds:
        with table.attempt(kind):
            layers[kind] = layers_of_kind(OF_EXPERTS[kind], sizes, scratch, random)
    plain = [by_kernels(random_mixture(bench.device, shape, seed, sizes.dtype)) for seed in range(layers_of(shape))]
    for tokens in sizes.tokens:
        if not bench.budget.allows(A_CASE):
            table.skip(f"{tokens:,} tokens", bench.budget.why_not(A_CASE))
            continue
        steps = INPUTS if tokens <= FEW else 2
        xs = torch.randn((steps, tokens, shape.hidden), dtype=sizes.dtype, device=bench.device)
        works = {PLAIN: work_of(plain, xs)}
        works |= {kind: work_of([one.kernels for one in of], xs) for kind, of in layers.items()}
        times = measure(bench.timer, works, sizes.rounds)
        for kind, of in layers.items():
            case = f"{kind}, {tokens:,}"
            with table.attempt(case):
                table.add(**{"kind, tokens": case}, **row_of(bench, sizes, of[0], xs, times[kind], times[PLAIN]))
        del works, xs
        free()
    return table


def work_of(layers: Sequence[KernelExperts], xs: Tensor) -> Work:
    turn = cycle(product(layers, xs.unbind()))

    def work() -> Tensor:
        layer, x = next(turn)
        return layer(x)

    return work


def row_of(
    bench: Bench, sizes: ExpertSizes, layer: QuantizedLayer, xs: Tensor, own: Timing | str, plain: Timing | str
) -> dict[str, Any]:  # fmt: skip
    """Returns the columns of a kind. Raises RuntimeError with the error of its mixture."""
    if isinstance(own, str):
        raise RuntimeError(own)
    experts = sum(layer.experts_of(x) for x in xs) / len(xs)
    error, rounding = layer.error(xs[0]), torch.finfo(xs.dtype).eps
    right = error.within(Tolerance(4 * rounding, 2 * rounding))
    row = {
        "experts": experts, "ms": 1e3 * own.median, "spread": own.spread, "error": error.most,
        "of the norm": error.norm, "verdict": "right" if right else WRONG,
    }  # fmt: skip
    if isinstance(plain, Timing):
        row |= {f"{PLAIN} ms": 1e3 * plain.median, f"times {PLAIN}": plain.median / own.median}
    if bench.ceilings is not None:
        operations = 6 * xs.shape[1] * sizes.shape.used * sizes.shape.hidden * sizes.shape.width
        floor = max(experts * layer.expert_bytes / bench.ceilings.memory, operations / bench.ceilings.multiply)
        row["of the floor"] = floor / own.median
    return row
