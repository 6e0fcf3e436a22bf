"""Figures of runs, and the tables of a comparison."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.peers.workloads import Workload

if TYPE_CHECKING:
    from bench.peers.sides import PeerProcess


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Figures of one run of a workload on an engine.

    Attributes:
        engine: Name of the engine.
        workload: Name of the workload.
        tokens: Output tokens a second.
        floor: Speed as a share of the floor's.
        first: Median milliseconds from a request's arrival to its first token.
        late: 90th percentile of the same.
        between: Median milliseconds from one token to the next.
        read: GB a second that the machine reads; see `floor.MachineRates`.
        multiply: GFLOP a second of the machine; see `floor.MachineRates`.
        others: Share of the machine that other processes used.
        firsts: Id of each request's first token.
    """

    engine: str
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

    @staticmethod
    def of(
        engine: str, workload: Workload, answer: dict[str, Any], floor: float, rates: Any, others: float
    ) -> "PeerRun":  # fmt: skip
        """Computes the figures of a run from the worker's answer; see `worker.serve`."""
        seconds, times = answer["seconds"], answer["times"]
        first = [1e3 * (one[0] - asked.arrives) for one, asked in zip(times, workload.requests, strict=True)]
        between = [later - earlier for one in times for earlier, later in itertools.pairwise(one)]
        return PeerRun(
            engine, workload.name, sum(map(len, times)) / seconds, floor / seconds, statistics.median(first),
            sorted(first)[len(first) * 9 // 10], 1e3 * statistics.median(between), rates.read / 1e9,
            rates.multiply / 1e9, others, tuple(answer["firsts"]),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"{self.workload} {self.engine:24} {self.tokens:8.1f} tokens/s, {self.floor:4.0%} of the floor's, first "
            f"after {self.first:8.1f} ms, then every {self.between:6.2f} ms; others {self.others:.0%}"
        )


def report(rows: Sequence[PeerRun], sides: Sequence["PeerProcess"]) -> str:
    """Returns the comparison as Markdown.

    The first table has output tokens a second, and their share of the floor's. The second has times to the first token
    (median and 90th percentile), and the share of first tokens equal to the first engine's.
    """
    workloads = list(dict.fromkeys(row.workload for row in rows))
    lines = [f"| | {' | '.join(workloads)} | start s | memory MiB |", "|---" * (len(workloads) + 3) + "|"]
    for side in sides:
        cells = []
        for name in workloads:
            tokens, floor = (_median(rows, side.name, name, field) for field in ("tokens", "floor"))
            cells.append(f"{tokens:,.1f} ({floor:.0%})")
        lines.append(f"| {side.name} | {' | '.join(cells)} | {side.started:.1f} | {side.memory / 2**20:,.0f} |")
    lines += ["", f"| first token, ms | {' | '.join(workloads)} | alike |", "|---" * (len(workloads) + 2) + "|"]
    for side in sides:
        cells = []
        for name in workloads:
            first, late = (_median(rows, side.name, name, field) for field in ("first", "late"))
            cells.append(f"{first:,.0f} ({late:,.0f})")
        lines.append(f"| {side.name} | {' | '.join(cells)} | {_alike(rows, sides[0].name, side.name):.0%} |")
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
