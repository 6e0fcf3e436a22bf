"""Measures the device's limits: bytes a second, operations a second, launches."""

from collections.abc import Iterator

import torch

from bench.on_gpu.bench import Bench, Ceilings
from bench.on_gpu.kernels import nothing, read_blocks
from bench.on_gpu.report import Table, say
from bench.on_gpu.sizes import RunSizes
from bench.on_gpu.timing import HostTimer, Timer, Timing, Work, seconds_of

BLOCK, EACH = 2048, 8  # numbers that a program reads at once, and its number of reads
LAUNCHES = 1000
TRIES = 9


def ceilings(bench: Bench) -> None:
    """Measures the limits. `Bench.ceilings` stays None if one of them fails."""
    timer, sizes, device = bench.timer, bench.sizes, bench.device
    table = Table("ceilings", {"of": "", "rate": ",.1f", "unit": "", "median": ",.1f", "best by": ""})
    found: dict[str, float] = {}
    for name, unit, scale, ways in (
        ("copy, read + written", "GB/s", 1e9, copies(sizes, device)),
        ("read", "GB/s", 1e9, reads(sizes, device)),
        ("bfloat16 product", "TFLOP/s", 1e12, products(sizes, device)),
    ):
        with table.attempt(name):
            rates = {way: (size, seconds_of(timer, work, TRIES)) for way, size, work in ways}
            best = max(rates, key=lambda way: _rate(*rates[way]))
            size, timing = rates[best]
            found[name] = _rate(size, timing)
            table.add(**{
                "of": name, "rate": found[name] / scale, "unit": unit, "median": size / timing.median / scale,
                "best by": best,
            })  # fmt: skip
            say(", ".join(f"{way} {_rate(*rates[way]) / scale:.1f}" for way in rates))
    if len(found) == 3:
        bench.ceilings = Ceilings(*found.values())
    bench.report.publish(table, launches(timer, device))


def _rate(size: float, timing: Timing) -> float:
    return size / timing.least


def copies(sizes: RunSizes, device: torch.device) -> Iterator[tuple[str, float, Work]]:
    source = torch.randn(sizes.copied // 4, device=device)
    target = torch.empty_like(source)
    yield "copy_", 2 * sizes.copied, lambda: target.copy_(source)


def reads(sizes: RunSizes, device: torch.device) -> Iterator[tuple[str, float, Work]]:
    numbers = torch.randn(sizes.copied // 4, device=device)
    yield "torch.sum of float32", sizes.copied, lambda: numbers.sum()
    if device.type == "cuda":
        bits = numbers.view(torch.int32)
        programs = len(bits) // (BLOCK * EACH)
        out = torch.empty(programs, dtype=torch.int32, device=device)
        yield "a kernel", sizes.copied, lambda: read_blocks[(programs,)](bits, out, BLOCK=BLOCK, EACH=EACH)


def products(sizes: RunSizes, device: torch.device) -> Iterator[tuple[str, float, Work]]:
    """Yields products of random numbers; zeros would be faster than any model's weights."""
    for rows, inner, columns in sizes.products:
        a = torch.randn((rows, inner), device=device).bfloat16()
        b = torch.randn((columns, inner), device=device).bfloat16()

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b) -> object:
            return torch.nn.functional.linear(a, b)

        yield f"{rows} x {inner} x {columns}", 2.0 * rows * inner * columns, multiply


def launches(timer: Timer, device: torch.device) -> Table:
    """Measures the launch of a kernel without work, one after the other from the host."""
    table = Table("launches", {"of": "", "microseconds": ".2f"})
    number = torch.zeros(1, dtype=torch.int32, device=device)
    ways: list[tuple[str, Work]] = [("an operation of torch", lambda: number.add_(1))]
    if device.type == "cuda":
        ways.append(("a kernel of Triton", lambda: nothing[(1,)](number)))
    for name, work in ways:
        with table.attempt(name):
            table.add(of=name, microseconds=1e6 * _each(work, device))
    if device.type == "cuda":
        with table.attempt("an operation within a CUDA graph"):
            table.add(
                of="an operation within a CUDA graph",
                microseconds=1e6 * seconds_of(timer, graph_of(ways[0][1], LAUNCHES).replay, 5).median / LAUNCHES,
            )
    return table


def _each(work: Work, device: torch.device) -> float:
    """Returns seconds of a launch that no other work hides."""

    def many() -> None:
        for _ in range(LAUNCHES):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return seconds_of(HostTimer(), many, 5).median / LAUNCHES


def graph_of(work: Work, calls: int) -> torch.cuda.CUDAGraph:
    """Returns a graph of `calls` calls of `work`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph
