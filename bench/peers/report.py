"""Figures of runs, and the tables of a comparison.

python -m bench.peers.report FILE ...

prints the tables of all runs in the files that `python -m bench.peers --json FILE` wrote.
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.peers.workloads import Workload


class MeasuredSide(Protocol):
    """The side of a report, beside its runs; see `sides.PeerProcess`."""

    name: str
    weights: int
    started: float
    memory: int


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Figures of one run of a workload on an engine.

    Attributes:
        engine: Name of the engine.
        model: Name of the model.
        workload: Name of the workload.
        tokens: Tokens a second, see `Workload.counted`.
        floor: Speed as a share of the floor's.
        first: Median milliseconds from a request's arrival to its first token.
        late: 90th percentile of the same.
        between: Median milliseconds from one token to the next; NaN where each request gets one.
        read: GB a second that the machine reads; see `floor.MachineRates`.
        multiply: GFLOP a second of the machine; see `floor.MachineRates`.
        others: Share of the machine that other processes used.
        firsts: Id of each request's first token.
        weights: Bytes of weights that the floor reads in a step.
        started: Seconds from the start of the engine's process to its first token.
        memory: Bytes of the engine's processes, see `PeerProcess`.
    """

    engine: str
    model: str
    workload: str
    tokens: float
    floor: float
    first: float
    late: float
    between: float
    read: float
    multiply: float
    others: float
    firsts: tuple[int, ...]
    weights: int
    started: float
    memory: int

    @staticmethod
    def of(
        side: MeasuredSide,
        model: str,
        workload: Workload,
        answer: dict[str, Any],
        floor: float,
        rates: Any,
        others: float,
    ) -> "PeerRun":
        """Computes the figures of a run from the worker's answer; see `worker.serve`."""
        seconds, times = answer["seconds"], answer["times"]
        first = [1e3 * (one[0] - asked.arrives) for one, asked in zip(times, workload.requests, strict=True)]
        between = [later - earlier for one in times for earlier, later in itertools.pairwise(one)]
        return PeerRun(
            side.name, model, workload.name, workload.counted / seconds, floor / seconds, statistics.median(first),
            sorted(first)[len(first) * 9 // 10], 1e3 * statistics.median(between or [math.nan]), rates.read / 1e9,
            rates.multiply / 1e9, others, tuple(ids[0] for ids in answer["ids"]), side.weights, side.started,
            side.memory,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"{self.workload} {self.engine:24} {self.tokens:8.1f} tokens/s, {self.floor:4.0%} of the floor's, first "
            f"after {self.first:8.1f} ms, then every {self.between:6.2f} ms; others {self.others:.0%}"
        )


def report(rows: Sequence[PeerRun]) -> str:
    """Returns the comparison as Markdown: for each model two tables, and how the machine was.

    The first table has tokens a second, and their share of the floor's; the floor reads the weights of the next column.
    The second has times to the first token (median and 90th percentile), and the share of first tokens equal to the
    first engine's.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    return "\n\n".join(_of_model([row for row in rows if row.model == model]) for model in models)


def _of_model(rows: Sequence[PeerRun]) -> str:
    workloads, engines = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("workload", "engine"))
    head = f"{' | '.join(workloads)} | weights MiB | start s | memory MiB"
    lines = [f"| {rows[0].model} | {head} |", "|---" * (len(workloads) + 4) + "|"]
    for engine in engines:
        cells = []
        for name in workloads:
            tokens, floor = (_median(rows, engine, name, field) for field in ("tokens", "floor"))
            cells.append(f"{tokens:,.1f} ({floor:.0%})")
        own = [row for row in rows if row.engine == engine]
        started, memory = statistics.median(row.started for row in own), max(row.memory for row in own)
        about = f"{own[0].weights / 2**20:,.1f} | {started:.1f} | {memory / 2**20:,.0f}"
        lines.append(f"| {engine} | {' | '.join(cells)} | {about} |")
    lines += ["", f"| first token, ms | {' | '.join(workloads)} | alike |", "|---" * (len(workloads) + 2) + "|"]
    for engine in engines:
        cells = []
        for name in workloads:
            first, late = (_median(rows, engine, name, field) for field in ("first", "late"))
            cells.append(f"{first:,.0f} ({late:,.0f})")
        lines.append(f"| {engine} | {' | '.join(cells)} | {_alike(rows, engines[0], engine):.0%} |")
    shares = sorted(row.others for row in rows)
    lines += ["", f"others' share of the machine: median {shares[len(shares) // 2]:.0%}, most {shares[-1]:.0%}; "
              f"memory {min(r.read for r in rows):.0f}-{max(r.read for r in rows):.0f} GB/s, "
              f"products {min(r.multiply for r in rows):.0f}-{max(r.multiply for r in rows):.0f} GFLOP/s"]  # fmt: skip
    return "\n".join(lines)


def _alike(rows: Sequence[PeerRun], one: str, other: str) -> float:
    """Returns the share of equal first tokens of two engines; runs of a workload are in the order of their seeds."""
    pairs = [
        pair
        for name in {row.workload for row in rows}
        for ours, theirs in zip(_runs(rows, one, name), _runs(rows, other, name), strict=False)
        for pair in zip(ours.firsts, theirs.firsts, strict=True)
    ]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def _runs(rows: Sequence[PeerRun], engine: str, workload: str) -> list[PeerRun]:
    return [row for row in rows if (row.engine, row.workload) == (engine, workload)]


def _median(rows: Sequence[PeerRun], engine: str, workload: str, field: str) -> float:
    return statistics.median([getattr(row, field) for row in _runs(rows, engine, workload)] or [math.nan])


def main() -> None:
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(report([PeerRun(**json.loads(line)) for line in lines]))


if __name__ == "__main__":
    main()
