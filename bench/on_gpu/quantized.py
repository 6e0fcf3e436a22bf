"""The section on weights in 4 and 8 bits: products of dense layers, then mixtures, beside those in 16 bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.on_gpu.ahead import Job, compile_ahead
from bench.on_gpu.bench import Bench
from bench.on_gpu.drawn_weights import DENSE, DrawnProduct, GroupKind, draw_weight, exact_rows, exact_weight, product_of
from bench.on_gpu.memory import free
from bench.on_gpu.quantized_experts import ExpertSizes, compile_experts, expert_table
from bench.on_gpu.report import WRONG, Table
from bench.on_gpu.timing import Timing, Work, measure
from bench.on_gpu.truth import Error, Tolerance
from model.gpu.group_linear import MOST_ROWS
from model.weight_formats.scratch import Scratch
from model.weight_formats.stored import StoredWeight

A_CASE = 2.0  # seconds of all kinds with one number of rows
TORCH = "torch"
CHECKED = 64  # rows whose results are checked


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """Sizes of the section.

    Attributes:
        products: Name to inputs and outputs.
        rows: Rows of a call.
        rotated: Bytes of weights that calls cycle over, like a model's layers.
        rounds: Rounds of each measurement.
        dtype: Dtype of activations and of torch's product.
        kinds: Names of kinds of weights.
        experts: Sizes of the mixtures.
    """

    products: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"gate and up": (4096, 28672), "down": (14336, 4096), "qkv": (4096, 6144)}
    )
    rows: tuple[int, ...] = (1, 16, 64, 256, 2048, 8192)
    rotated: int = 512 * 2**20
    rounds: int = 5
    dtype: torch.dtype = torch.bfloat16
    kinds: tuple[str, ...] = tuple(DENSE)
    experts: ExpertSizes = field(default_factory=ExpertSizes)


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Layers of one kind.

    Attributes:
        kind: Their kind.
        products: A product of each layer.
        first: Weight of the first one.
    """

    kind: GroupKind
    products: list[DrawnProduct]
    first: StoredWeight

    @staticmethod
    def of(
        kind: GroupKind, inputs: int, outputs: int, sizes: DenseSizes, scratch: Scratch, random: torch.Generator
    ) -> "Layers":  # fmt: skip
        """Draws so many layers that caches do not keep their weights from one call to the next."""
        first = draw_weight(kind, outputs, inputs, random)
        products = [product_of(kind, [first], sizes.dtype, scratch)]
        while len(products) * products[0].nbytes < sizes.rotated:
            products.append(product_of(kind, [draw_weight(kind, outputs, inputs, random)], sizes.dtype, scratch))
        return Layers(kind, products, first)

    def work(self, x: Tensor) -> Work:
        turn = cycle(self.products)
        return lambda: next(turn)(x)

    def error(self, x: Tensor) -> Error:
        """Returns the error of some rows of the first layer's result; `most` is a share of the largest magnitude."""
        some = slice(0, None, max(1, len(x) // CHECKED))
        expected = exact_rows(self.kind, x[some]) @ exact_weight(self.kind, self.first).T
        error = Error.of(self.products[0](x)[some], expected)
        return Error(error.most / float(expected.abs().max()), error.norm)


def quantized(bench: Bench, sizes: DenseSizes | None = None) -> None:
    """Measures and checks all kinds. Without `sizes` they are those of an 8B Llama, and of a Qwen3 30B-A3B."""
    sizes = DenseSizes() if sizes is None else sizes
    dense: list[Job] = [(compile_dense, sizes, kind) for kind in sizes.kinds]
    of_experts: list[Job] = [(compile_experts, sizes.experts, kind) for kind in sizes.experts.kinds]
    compile_ahead(bench.device, of_experts + dense)
    with torch.inference_mode():
        scratch = Scratch(sizes.dtype, bench.device)
        for name in sizes.products:
            bench.report.publish(product_table(bench, sizes, name, scratch))
            free()
        bench.report.publish(expert_table(bench, sizes.experts, scratch))


def compile_dense(sizes: DenseSizes, name: str) -> None:
    """Runs the kernels of a kind, with few rows and with many."""
    device, kind = torch.device("cuda"), DENSE[name]
    scratch, random = Scratch(sizes.dtype, device), torch.Generator(device)
    for inputs, outputs in sizes.products.values():
        product = product_of(kind, [draw_weight(kind, outputs, inputs, random)], sizes.dtype, scratch)
        for rows in (1, MOST_ROWS + 16):
            product(torch.zeros((rows, inputs), dtype=sizes.dtype, device=device))


def product_table(bench: Bench, sizes: DenseSizes, name: str, scratch: Scratch) -> Table:
    """Measures one product with weights of all kinds."""
    inputs, outputs = sizes.products[name]
    table = Table(f"weights in 4 and 8 bits: {name}, {inputs:,} inputs, {outputs:,} outputs", {
        "kind, rows": "", "MB": ",.1f", "ms": ".4f", "spread": ".0%", "of the floor": ".0%", "torch ms": ".4f",
        "times torch": ".2f", "error": ".1e", "of the norm": ".1e", "verdict": "",
    })  # fmt: skip
    table.notes.append(
        f"MB: the weights of a layer; layers take turns over {sizes.rotated // 2**20} MiB and more. Floor: weights, "
        "rows and results at the rate of memory, or the products at that of 16 bits, if that is longer. torch: the "
        f"product of as many weights in {str(sizes.dtype).removeprefix('torch.')}, interleaved. error: beside float64 "
        f"of the stored numbers, of up to {2 * CHECKED} rows, as a share of the largest magnitude."
    )
    layers, random = dict[str, Layers](), torch.Generator(bench.device).manual_seed(0)
    for kind in sizes.kinds:
        with table.attempt(kind):
            layers[kind] = Layers.of(DENSE[kind], inputs, outputs, sizes, scratch, random)
    count = max(2, -(-sizes.rotated // (2 * inputs * outputs)))
    plain = torch.randn((count, outputs, inputs), dtype=sizes.dtype, device=bench.device) * inputs**-0.5
    for rows in sizes.rows:
        if not bench.budget.allows(A_CASE):
            table.skip(f"{rows:,} rows", bench.budget.why_not(A_CASE))
            continue
        x = torch.randn((rows, inputs), dtype=sizes.dtype, device=bench.device)
        works = {TORCH: plain_work(x, plain)} | {kind: of.work(x) for kind, of in layers.items()}
        times = measure(bench.timer, works, sizes.rounds)
        for kind, of in layers.items():
            case = f"{kind}, {rows:,}"
            with table.attempt(case):
                table.add(**{"kind, rows": case}, **row_of(bench, of, x, outputs, times[kind], times[TORCH]))
    return table


def plain_work(x: Tensor, weights: Tensor) -> Work:
    turn = cycle(weights.unbind())
    return lambda: F.linear(x, next(turn))


def row_of(
    bench: Bench, layers: Layers, x: Tensor, outputs: int, own: Timing | str, torch_s: Timing | str
) -> dict[str, Any]:  # fmt: skip
    """Returns the columns of a kind. Raises RuntimeError with the error of its product."""
    if isinstance(own, str):
        raise RuntimeError(own)
    size, error, rounding = layers.products[0].nbytes, layers.error(x), torch.finfo(x.dtype).eps
    right = error.within(Tolerance(2 * rounding, rounding))
    row = {
        "MB": size / 1e6, "ms": 1e3 * own.median, "spread": own.spread, "error": error.most, "of the norm": error.norm,
        "verdict": "right" if right else WRONG,
    }  # fmt: skip
    if isinstance(torch_s, Timing):
        row |= {"torch ms": 1e3 * torch_s.median, "times torch": torch_s.median / own.median}
    if bench.ceilings is not None:
        moved = size + x.nbytes + len(x) * outputs * x.itemsize
        floor = max(moved / bench.ceilings.memory, 2 * x.numel() * outputs / bench.ceilings.multiply)
        row["of the floor"] = floor / own.median
    return row
