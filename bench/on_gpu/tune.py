"""Times the attention kernels with many tile sizes, for rows of `model/gpu/tuning.json`.

Markdown goes to standard output: for each kind of work the sizes of the table and the best ones, beside each other.

python -m bench.on_gpu.tune [--dims 64,128] [--elements half,eight] [--kinds few,many,shared] [--best 8]
"""

import argparse
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from bench.on_gpu.memory import free
from bench.on_gpu.pages import Book
from bench.on_gpu.timing import DeviceTimer, seconds_of
from cache_manager.layout import KVLayout
from model.gpu.attention_backend import TritonAttention
from model.gpu.tuning import TileSizes, Tuning, tuning_for

HEADS, KV_HEADS, PAGE = 32, 8, 16
ROTATED = 512 * 2**20  # bytes of KV that calls cycle over
WRITTEN = 2**15  # tokens written at once
MEGABYTES = {"few": ((64, 16), (256, 4), (256, 64), (1024, 64)), "shared": ((64, 32), (256, 128))}
"""Kind of decode to MiB of KV a layer, and sequences; of shared keys, those of all sequences if each had a copy."""
PREFILLS = (2048, 8192)
OWN = 128  # tokens that a sequence has beside the shared ones
ROUNDS = 5
TRIED = {
    "few": ((16,), (32, 64, 128), (2, 4, 8), (3, 4, 5, 6)),
    "many": ((64, 128), (64, 128), (4, 8), (2, 3, 4)),
    "shared": ((32, 64), (32, 64, 128), (4,), (2, 3, 4)),
}
"""Kind of work to rows, tiles, warps and stages."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and elements that a row of the table is for.

    Attributes:
        dim: Elements of a head.
        elements: "half" or "eight", see `model.gpu.tuning.ELEMENTS`.
    """

    dim: int
    elements: str

    @property
    def kv(self) -> str:
        return "fp8" if self.elements == "eight" else "bfloat16"

    def layout(self, layers: int) -> KVLayout:
        eight = self.elements == "eight"
        return KVLayout.uniform((tuple(range(layers)),), KV_HEADS, self.dim, 2 - eight, PAGE, 4 * eight)

    def attention(self, tuning: Tuning, layers: int, pages: int) -> TritonAttention:
        device = torch.device("cuda")
        return TritonAttention(
            self.layout(layers), pages, HEADS, self.kv, device, "bfloat16", tuning=tuning
        )  # fmt: skip


def candidates(kind: str, now: Tuning) -> Iterator[TileSizes]:
    """Yields sizes to try. Chunks stay as they are: results are grouped by them."""
    for size, tile, warps, stages in itertools.product(*TRIED[kind]):
        yield TileSizes(size, tile, getattr(now, kind).chunk, warps, stages)


def compiled(shape: Shape, kind: str, now: Tuning, sizes: TileSizes) -> str:
    """Compiles the kernels with these sizes in a process of its own; returns why they cannot be, or ''."""
    try:
        shape.attention(replace(now, **{kind: sizes}), 1, 1).prepare()
    except Exception as error:  # too much shared memory, or a fault of the compiler
        return f"{type(error).__name__}: {error}"[:80]
    return ""


def works(shape: Shape, kind: str, now: Tuning) -> "list[Case]":
    if kind == "many":
        return [Case(shape, now, tokens, 1, 0) for tokens in PREFILLS]
    found = []
    for megabytes, batch in MEGABYTES[kind]:
        tokens = megabytes * 2**20 // (batch * shape.layout(1).token_bytes)
        found.append(Case(shape, now, tokens, batch, tokens - OWN if kind == "shared" else 0))
    return found


class Case:
    """Sequences in a pool, and their attention."""

    def __init__(self, shape: Shape, now: Tuning, tokens: int, batch: int, shared: int) -> None:
        prefill = batch == 1
        size = batch * tokens * shape.layout(1).token_bytes
        self._layers = 1 if shared or prefill else max(1, ROTATED // size)
        book = Book.of([tokens] * batch, PAGE)
        self._attention = shape.attention(now, self._layers, book.pages)
        at_once = max(1, WRITTEN // tokens)
        for first in range(0, batch, at_once):
            slices = [(i, 0, tokens) for i in range(first, min(first + at_once, batch))]
            plan = self._attention.plan(book.shape(slices))
            for layer in range(self._layers):
                size_of = (2, len(slices) * tokens, KV_HEADS, shape.dim)
                keys, values = torch.randn(size_of, dtype=torch.bfloat16, device="cuda")
                self._attention.write(layer, keys, values, plan)
        if shared:
            book = book.sharing(range(batch), shared // PAGE)
        self._shape = book.shape([(0, 0, tokens)] if prefill else [(i, tokens - 1, 1) for i in range(batch)])
        count = tokens if prefill else batch
        self._queries = torch.randn((count, HEADS, shape.dim), dtype=torch.bfloat16, device="cuda")
        self.name = f"{tokens:,}" if prefill else f"{batch} x {tokens:,}"

    def seconds(self, timer: DeviceTimer, tuning: Tuning) -> float:
        """Times the attention of a layer with these sizes."""
        attention = self._attention
        attention._kinds = [replace(kind, tuning=tuning) for kind in attention._kinds]
        plan, layer = attention.plan(self._shape), cycle(range(self._layers))
        return seconds_of(timer, lambda: attention.attend(next(layer), self._queries, plan), ROUNDS).median


def tune(timer: DeviceTimer, pool: ProcessPoolExecutor, shape: Shape, kind: str, best: int) -> None:
    """Prints the best sizes for one kind of work."""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    now = tuning_for(name, capability, shape.dim, shape.elements)
    tried = list(dict.fromkeys((getattr(now, kind), *candidates(kind, now))))
    failed = list(pool.map(compiled, *zip(*((shape, kind, now, sizes) for sizes in tried), strict=True)))
    cases = works(shape, kind, now)
    found = dict[TileSizes, list[float]]()
    for sizes, why in zip(tried, failed, strict=True):
        if not why:
            try:
                found[sizes] = [case.seconds(timer, replace(now, **{kind: sizes})) for case in cases]
            except Exception as error:  # too much shared memory is known when a kernel is loaded
                print(f"{sizes}: {type(error).__name__}: {error}"[:160], file=sys.stderr)
    least = [min(times) for times in zip(*found.values(), strict=True)]
    score = {
        sizes: math.prod(map(float.__truediv__, times, least)) ** (1 / len(least)) for sizes, times in found.items()
    }
    print(f"### {shape.elements}, heads of {shape.dim}, {kind}: {len(found)} of {len(tried)} sizes\n")
    print(f"| rows | tile | warps | stages | {' | '.join(case.name for case in cases)} | beside the best |")
    print("|---" * (5 + len(cases)) + "|")
    for sizes in dict.fromkeys((getattr(now, kind), *sorted(score, key=lambda one: score[one])[:best])):
        times = " | ".join(f"{1e3 * seconds:.4f}" for seconds in found[sizes])
        print(f"| {sizes.rows} | {sizes.tile} | {sizes.warps} | {sizes.stages} | {times} | {score[sizes]:.3f} |")
    print(flush=True)
    del cases
    free()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,128", help="elements of a head (default %(default)s)")
    parser.add_argument("--elements", default="half,eight", help="kinds of elements (default %(default)s)")
    parser.add_argument("--kinds", default="few,many,shared", help="kinds of work (default %(default)s)")
    parser.add_argument("--best", type=int, default=8, help="sizes that are printed (default %(default)s)")
    args = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with torch.inference_mode(), ProcessPoolExecutor(os.cpu_count(), context) as pool:
        timer = DeviceTimer()
        for dim, elements, kind in itertools.product(
            map(int, args.dims.split(",")), args.elements.split(","), args.kinds.split(",")
        ):
            tune(timer, pool, Shape(dim, elements), kind, args.best)
    return 0


if __name__ == "__main__":
    sys.exit(main())
