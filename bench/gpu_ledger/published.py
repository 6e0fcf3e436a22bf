"""Measured figures of H200s (`bench/results/h200`): rates of predictions, and steps that these are held against."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_ledger.cases import H200, MEASURED, LedgerModel, Regime
from bench.on_gpu.mixtures import SHAPES as MIXTURES

RESULTS = Path(__file__).parents[1] / "results/h200"
PRODUCTS_OF_READ = 0.82
"""Share of the rate of reading that products of one row reach, as docs/benchmarks.md has it of the first run."""
LEAST = 0.16e-3 / 65
"""Least seconds of a launch: those of a norm of one row in that run, 0.16 ms for 65."""
KERNELS = {
    "norm_rows": "norm of a sum",
    "rotate_rows": "rotation of queries and keys",
    "write_slots": "KV write, bfloat16",
    "gate_rows": "gate",
}
"""Kernel to its row in the table of kernels."""


@dataclass(frozen=True, slots=True)
class Line:
    """Time of a part of a layer: a start, bytes and operations, one after the other.

    Attributes:
        start: Seconds.
        memory: Share of the data sheet's rate of memory.
        multiply: Share of the data sheet's rate of products.
    """

    start: float
    memory: float
    multiply: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates, as shares of the data sheet's.

    Attributes:
        product_memory: Reading of weights by products of few rows.
        product_multiply: Products of many rows.
        rows: Memory, by kernel.
        copy: Memory, by torch's operations.
        sampler: Memory, by the sampler.
        decode: Attention of decodes.
        prefill: Attention of prompts.
        mixture: A mixture of experts.
    """

    product_memory: float
    product_multiply: float
    rows: dict[str, float]
    copy: float
    sampler: float
    decode: Line
    prefill: Line
    mixture: Line


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step of an engine.

    Attributes:
        case: Name of the case.
        seconds: Its time.
        host: Seconds of the host's work for it, as the engine reports it. 0 where it does not.
    """

    case: str
    model: LedgerModel
    regime: Regime
    seconds: float
    host: float


@cache
def rates() -> Rates:
    """Reads the rates. Lines are least squares of relative errors."""
    ceilings = {row["of"]: row["rate"] for row in rows("engine", "ceilings")}
    kernels = {row["kernel"]: row["GB/s"] * 1e9 / H200.memory for row in rows("mixture", "other kernels, speed")}
    return Rates(
        PRODUCTS_OF_READ * ceilings["read"] * 1e9 / H200.memory,
        ceilings["bfloat16 product"] * 1e12 / H200.multiply,
        {kernel: kernels[row] for kernel, row in KERNELS.items()},
        ceilings["copy, read + written"] * 1e9 / H200.memory,
        kernels["sampler: summary"],
        _decode_line(),
        _prefill_line(),
        _mixture_line(),
    )


def steps() -> list[MeasuredStep]:
    """Returns the measured steps of engines: decodes in the middle of a run, and prompts."""
    found = []
    for file in ("engine", "mixture"):
        for row in rows(file, "engine, decode"):
            name, sequences = row["model, batch"].rsplit(", ", 1)
            regime = Regime(int(sequences), round(row["context"]) - 1, 1)
            found.append(_step(name, regime, row["ms a step"], row["host ms"]))
        for row in rows(file, "engine, prefill of one prompt"):
            name, tokens = row["model, tokens"].split(", ", 1)
            found.append(_step(name, Regime(1, 0, int(tokens.replace(",", ""))), row["ms"], 0.0))
    return found


def launch_seconds() -> tuple[float, float]:
    """Returns the host's seconds for a launch of Triton and for an operation of torch, means of three machines."""
    found: dict[str, list[float]] = {}
    for file in ("engine", "attention", "mixtures"):
        for row in rows(file, "launches"):
            found.setdefault(row["of"], []).append(row["microseconds"] * 1e-6)
    return float(np.mean(found["a kernel of Triton"])), float(np.mean(found["an operation of torch"]))


def rows(file: str, title: str) -> list[dict[str, Any]]:
    """Returns the measured rows of a table; those that were skipped are left out."""
    tables = json.loads((RESULTS / f"{file}.json").read_text())["tables"]
    (table,) = (one for one in tables if one["title"] == title)
    return [row for row in table["rows"] if "skipped" not in row and "failed" not in row]


def _step(name: str, regime: Regime, milliseconds: float, host: float) -> MeasuredStep:
    model = MEASURED[name]
    return MeasuredStep(f"{model.name}: {regime}", model, regime, milliseconds * 1e-3, host * 1e-3)


def _decode_line() -> Line:
    """KV of one layer, the parts that are joined included in the time and not in the bytes."""
    measured = rows("attention", "decode attention, KV in bfloat16")
    seconds = np.array([row["ms"] for row in measured]) * 1e-3
    moved = seconds * np.array([row["GB/s"] for row in measured]) * 1e9
    start, each = _fitted(seconds, moved)
    return Line(start, 1 / each / H200.memory, 1.0)


def _prefill_line() -> Line:
    measured = rows("attention", "prefill attention, bfloat16")
    seconds = np.array([row["ms"] for row in measured]) * 1e-3
    operations = seconds * np.array([row["TFLOP/s"] for row in measured]) * 1e12
    start, each = _fitted(seconds, operations)
    return Line(start, 1.0, 1 / each / H200.multiply)


def _mixture_line() -> Line:
    shape = MIXTURES["Qwen3-30B-A3B"]
    measured = [
        row for row in rows("mixtures", "mixtures of experts, one layer") if row["mixture, tokens"].startswith("Qwen3")
    ]
    seconds = np.array([row["ms"] for row in measured]) * 1e-3
    moved = np.array([row["experts"] for row in measured]) * shape.expert_bytes
    tokens = np.array([int(row["mixture, tokens"].split(", ")[1].replace(",", "")) for row in measured])
    start, a_byte, an_operation = _fitted(seconds, moved, 6 * tokens * shape.used * shape.hidden * shape.width)
    return Line(start, 1 / a_byte / H200.memory, 1 / an_operation / H200.multiply)


def _fitted(seconds: Any, *sizes: Any) -> list[float]:
    """Returns a start and seconds of each unit of the sizes."""
    columns = np.stack([np.ones_like(seconds), *sizes], 1) / seconds[:, None]
    scale = columns.max(0)
    found = np.linalg.lstsq(columns / scale, np.ones_like(seconds), rcond=None)[0] / scale
    return [float(one) for one in found]
