"""Measures mixtures of experts beside the device's limits and torch's product of groups, and checks them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.on_gpu.bench import Bench
from bench.on_gpu.memory import free
from bench.on_gpu.report import Table
from bench.on_gpu.timing import Timing, Work, measure
from bench.on_gpu.truth import Error, Tolerance
from model.blocks import Experts, GatedMLP
from model.gpu.mixtures import KernelExperts
from model.layers import Linear, silu
from model.routing import Routing

A_CASE = 6.0  # seconds
ROTATED = 512 * 2**20  # bytes of weights that calls cycle over
ROUNDS = 7


class MixtureShape(NamedTuple):
    """Sizes of a mixture.

    Attributes:
        experts: The number of experts.
        used: Experts of a token.
        hidden: Width of the residual stream.
        width: Width of an expert.
    """

    experts: int
    used: int
    hidden: int
    width: int

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.width


SHAPES = {
    "Qwen3-30B-A3B": MixtureShape(128, 8, 2048, 768),
    "Mixtral 8x7B": MixtureShape(8, 2, 4096, 14336),
}
TOKENS = (1, 8, 64, 256, 2048, 8192)
CHECKED = ((MixtureShape(128, 8, 1024, 256), (1, 40, 1500)), (MixtureShape(6, 2, 192, 80), (1, 40, 1500)))
CHECKED_ON_HOST = ((MixtureShape(6, 2, 48, 40), (1, 20)),)
"""Mixtures whose results are checked, and the tokens of their steps."""


def mixtures(bench: Bench) -> None:
    table = Table("mixtures of experts, one layer", {
        "mixture, tokens": "", "experts": ",.0f", "ms": ".4f", "spread": ".0%", "of the floor": ".0%",
        "torch ms": ".4f", "of torch": ".2f",
    })  # fmt: skip
    table.notes.append(
        "bfloat16, random tokens: choice of experts, order, both products, gate, sum. Floor: the weights of the "
        "experts that some token uses at the rate of a copy, or the products at theirs, if that is longer. torch: "
        "torch._grouped_mm for both products with the gate between them, of rows that are in order already."
    )
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            for tokens in TOKENS:
                case = f"{name}, {tokens:,}"
                if not bench.budget.allows(A_CASE):
                    table.skip(case, bench.budget.why_not(A_CASE))
                    continue
                with table.attempt(case):
                    table.add(**{"mixture, tokens": case}, **measured(bench, shape, tokens))
                free()
    bench.report.publish(table)


def measured(bench: Bench, shape: MixtureShape, tokens: int) -> dict[str, Any]:
    layers = [random_mixture(bench.device, shape, seed) for seed in range(layers_of(shape))]
    kernels = [by_kernels(layer) for layer in layers]
    x = torch.randn((tokens, shape.hidden), dtype=torch.bfloat16, device=bench.device)
    turn, other = cycle(kernels), cycle([grouped(layer, shape, x) for layer in layers])
    found = measure(bench.timer, {"quire": lambda: next(turn)(x), "torch": lambda: next(other)()}, ROUNDS)
    own, theirs = found["quire"], found["torch"]
    if not isinstance(own, Timing):
        raise RuntimeError(own)
    chosen = [layer.routing(layer.router(x).float())[1].unique().numel() for layer in layers]
    experts = sum(chosen) / len(chosen)
    row = {"experts": experts, "ms": 1e3 * own.median, "spread": own.spread}
    if isinstance(theirs, Timing):
        row |= {"torch ms": 1e3 * theirs.median, "of torch": theirs.median / own.median}
    if bench.ceilings is not None:
        operations = 6 * tokens * shape.used * shape.hidden * shape.width
        floor = max(experts * shape.expert_bytes / bench.ceilings.memory, operations / bench.ceilings.multiply)
        row["of the floor"] = floor / own.median
    return row


def by_kernels(layer: Experts) -> KernelExperts:
    made = KernelExperts.of(layer)
    if made is None:
        raise RuntimeError("there are no kernels for this mixture")
    return made


def layers_of(shape: MixtureShape) -> int:
    """Returns so many layers that caches do not keep their weights from one call to the next."""
    return max(1, -(-ROTATED // (shape.experts * shape.expert_bytes)))


def random_mixture(
    device: torch.device, shape: MixtureShape, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Experts:
    made = torch.Generator(device).manual_seed(seed)

    def linear(inputs: int, outputs: int) -> Linear:
        weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        return Linear(weight.normal_(0.0, inputs**-0.5, generator=made))

    parts = [
        GatedMLP(linear(shape.hidden, 2 * shape.width), linear(shape.width, shape.hidden), silu)
        for _ in range(shape.experts)
    ]
    return Experts(linear(shape.hidden, shape.experts), parts, Routing(shape.used, True))


def grouped(layer: Experts, shape: MixtureShape, x: Tensor) -> Work:
    """Returns torch's products of a mixture, for rows in order of their experts, without the choice and the sum."""
    chosen = layer.routing(layer.router(x).float())[1].flatten()
    order = chosen.argsort(stable=True) // shape.used
    ends = torch.bincount(chosen, minlength=shape.experts).cumsum(0).int()
    first, down = (torch.stack([weight(part).T.contiguous() for part in layer.experts]) for weight in (_first, _down))

    def work() -> Tensor:
        made = torch._grouped_mm(x[order], first, offs=ends)
        gate, up = made.chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, down, offs=ends)

    return work


def _first(part: Any) -> Tensor:
    return part.gate_up.weight


def _down(part: Any) -> Tensor:
    return part.down.weight


def mixture_checks(device: torch.device, name: str) -> Iterator[tuple[str, Callable[[], Error], Tolerance]]:
    """Yields checks of mixtures beside float64."""
    dtype = getattr(torch, name)
    rounding = torch.finfo(dtype).eps
    allowed = Tolerance(4 * rounding + 1e-5, 2 * rounding + 1e-6)
    for shape, steps in CHECKED if device.type == "cuda" else CHECKED_ON_HOST:
        for tokens in steps:
            what = f"{tokens} tokens, {shape.used} of {shape.experts} experts, {name}"
            yield what, partial(_error, device, shape, tokens, dtype), allowed


def _error(device: torch.device, shape: MixtureShape, tokens: int, dtype: torch.dtype) -> Error:
    """Returns the error of a mixture, as a share of the largest result."""
    layer = random_mixture(device, shape, tokens, dtype)
    x = torch.randn((tokens, shape.hidden), dtype=dtype, device=device)
    found = by_kernels(layer)(x).double()
    weights, chosen = layer.routing(layer.router(x).float())
    expected = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for expert, part in enumerate(layer.experts):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].double() @ _first(part).double().T).chunk(2, -1)
        made_of = (F.silu(gate) * up).to(dtype).double() @ _down(part).double().T
        expected.index_add_(0, rows, made_of * weights[rows, place, None].double())
    error = Error.of(found, expected)
    return Error(error.most / float(expected.abs().max()), error.norm)
