"""Runs the sections in order. Each is imported when its turn comes, so a failing import fails one section alone."""

from collections.abc import Callable, Sequence
from importlib import import_module

from bench.on_gpu.bench import Bench
from bench.on_gpu.memory import free
from bench.on_gpu.report import Table, say

SECTIONS = {
    "ceilings": ("bench.on_gpu.ceilings", "ceilings", 10.0),
    "correctness": ("bench.on_gpu.correctness", "correctness", 20.0),
    "attention": ("bench.on_gpu.attention_speed", "attention_speed", 20.0),
    "parts": ("bench.on_gpu.parts_speed", "parts_speed", 10.0),
    "mixtures": ("bench.on_gpu.mixtures", "mixtures", 10.0),
    "engine": ("bench.on_gpu.serving", "serving", 20.0),
    "peers": ("bench.on_gpu.peers", "peers", 30.0),
    "draws": ("bench.on_gpu.draws_speed", "draws_speed", 5.0),
    "moves": ("bench.on_gpu.page_moves", "page_moves", 5.0),
    "quantized": ("bench.on_gpu.quantized", "quantized", 40.0),
}
"""Name to module, its function of a `Bench`, and the seconds that it needs at least."""
ON_HOST = ("ceilings", "engine", "peers")
"""Sections that devices other than GPUs can run."""


def run_sections(bench: Bench, names: Sequence[str]) -> None:
    for name in SECTIONS:
        if name not in names:
            continue
        module, function, needed = SECTIONS[name]
        table = Table(f"section {name}", {"what": ""})
        if not bench.budget.allows(needed):
            table.skip(name, bench.budget.why_not(needed))
        else:
            say(f"--- {name}, {bench.budget.left:.0f} s left")
            with table.attempt(name):
                run: Callable[[Bench], None] = getattr(import_module(module), function)
                run(bench)
        if table.rows:
            bench.report.publish(table)
        free()
