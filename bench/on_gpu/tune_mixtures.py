"""Times the products of mixtures of experts with many tile sizes, for the sizes in `model.gpu.expert_weights`.

Markdown goes to standard output: for each mixture and number of tokens the best sizes.

python -m bench.on_gpu.tune_mixtures [--tokens 64,2048] [--best 6]
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from bench.on_gpu.memory import free
from bench.on_gpu.mixtures import SHAPES, TOKENS, MixtureShape, layers_of, random_mixture
from bench.on_gpu.timing import DeviceTimer, seconds_of
from model.gpu.expert_weights import ExpertProduct, PlainExperts, ProductTiles
from model.gpu.mixtures import KernelExperts, arrange, choose

SHARED = 227 * 1024  # bytes that a program can have
ROUNDS = 5
TRIED = ((16, 32, 64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5))
"""TileRows, outputs, inputs, warps and stages."""
MOST_SUMS = 2**15  # elements of a tile of results


class MixtureCase(NamedTuple):
    """A mixture's layers, and rows to multiply.

    Attributes:
        layers: Layers that calls cycle over.
        x: [tokens, hidden].
        weights: [tokens, used], see `model.gpu.mixtures.choose`.
        chosen: [tokens, used], likewise.
    """

    layers: list[KernelExperts]
    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor

    def run(self, layer: KernelExperts, rows: int) -> None:
        """Puts places in order, and computes both products and the gate."""
        routes = arrange(self.weights, self.chosen, layer.experts, (rows, rows, rows, rows))
        made = layer.activate(layer.first(self.x, routes, routes.used, False, False))
        layer.down(made, routes, 1, False, True)


def candidates() -> Iterator[ProductTiles]:
    for sizes in (ProductTiles(*of) for of in itertools.product(*TRIED)):
        fits = sizes.stages * (sizes.rows + sizes.outputs) * sizes.inputs * 2 <= SHARED
        if (
            fits
            and sizes.rows * sizes.outputs <= MOST_SUMS
            and (sizes.warps == 4 or sizes.rows * sizes.outputs >= 4096)
        ):
            yield sizes


def case_of(shape: MixtureShape, tokens: int, layers: int) -> MixtureCase:
    device = torch.device("cuda")
    made = [random_mixture(device, shape, seed) for seed in range(layers)]
    kernels = [found for layer in made if (found := KernelExperts.of(layer)) is not None]
    x = torch.randn((tokens, shape.hidden), dtype=torch.bfloat16, device=device)
    return MixtureCase(kernels, x, *choose(made[0].routing, made[0].router(x)))  # type: ignore[arg-type] # a plain routing


def use(sizes: ProductTiles, layers: Sequence[KernelExperts]) -> list[KernelExperts]:
    """Returns the layers with these sizes."""

    def changed(product: ExpertProduct) -> ExpertProduct:
        return replace(product, tiles=(sizes,)) if isinstance(product, PlainExperts) else product

    return [replace(layer, first=changed(layer.first), down=changed(layer.down)) for layer in layers]


def compiled(sizes: ProductTiles) -> str:
    """Compiles kernels with these sizes in a process of its own; returns why they cannot be, or ''."""
    try:
        for shape in SHAPES.values():
            few = shape._replace(experts=4, used=min(shape.used, 4))
            case = case_of(few, 8, 1)
            case.run(use(sizes, case.layers)[0], sizes.rows)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, or a fault of the compiler
        return f"{type(error).__name__}: {error}"[:80]
    return ""


def run_next(case: MixtureCase, turn: Iterator[KernelExperts], rows: int) -> None:
    case.run(next(turn), rows)


def tune(timer: DeviceTimer, tried: Sequence[ProductTiles], shape: MixtureShape, tokens: int, best: int) -> None:
    """Prints the best sizes for a mixture, and for each number of rows the best ones."""
    case, found = case_of(shape, tokens, layers_of(shape)), dict[ProductTiles, float]()
    for sizes in tried:
        turn = cycle(use(sizes, case.layers))
        try:
            found[sizes] = seconds_of(timer, partial(run_next, case, turn, sizes.rows), ROUNDS).median
        except Exception as error:
            print(f"{sizes}: {type(error).__name__}: {error}"[:160], file=sys.stderr)
    ordered = sorted(found, key=lambda sizes: found[sizes])
    of_rows = [next((one for one in ordered if one.rows == rows), None) for rows in TRIED[0]]
    for sizes in dict.fromkeys([*ordered[:best], *(one for one in of_rows if one is not None)]):
        print(f"| {' | '.join(map(str, sizes))} | {1e3 * found[sizes]:.4f} | {found[sizes] / found[ordered[0]]:.3f} |")
    print(flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a step (default %(default)s)")
    parser.add_argument("--best", type=int, default=6, help="sizes that are printed (default %(default)s)")
    args = parser.parse_args(arguments)
    tried, context = list(candidates()), multiprocessing.get_context("spawn")
    with torch.inference_mode():
        with ProcessPoolExecutor(os.cpu_count(), context) as pool:
            failed = list(pool.map(compiled, tried))
        good = [sizes for sizes, why in zip(tried, failed, strict=True) if not why]
        print(f"{len(good)} of {len(tried)} sizes\n")
        timer = DeviceTimer()
        for name, shape in SHAPES.items():
            for tokens in map(int, args.tokens.split(",")):
                print(
                    f"### {name}, {tokens:,} tokens\n\n| rows | outputs | inputs | warps | stages | ms | of the best |"
                )
                print("|---" * 7 + "|")
                tune(timer, good, shape, tokens, args.best)
                free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
