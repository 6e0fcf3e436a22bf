"""Runs, and the tables that they make."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.peers.workloads import Workload

if TYPE_CHECKING:
    from bench.peers.sides import Side


@dataclass(frozen=True, slots=True)
class Row:
    """One run. tokens: a second, of outputs. floor: the part of the floor's speed that this is. first, between:
    milliseconds to a request's first token and from one to the next, medians. read, multiply: see `floor.Rates`, in GB
    and GFLOP a second. others: share of the machine that others used.
    """

    engine: str
    workload: str
    tokens: float
    floor: float
    first: float
    between: float
    read: float
    multiply: float
    others: float

    @staticmethod
    def of(
        engine: str, workload: Workload, seconds: float, times: list[list[float]], floor: float, rates: Any,
        others: float,
    ) -> "Row":  # fmt: skip
        tokens = sum(map(len, times))
        between = [later - earlier for one in times for earlier, later in itertools.pairwise(one)]
        return Row(
            engine, workload.name, tokens / seconds, floor / seconds, 1e3 * statistics.median(one[0] for one in times),
            1e3 * statistics.median(between), rates.read / 1e9, rates.multiply / 1e9, others,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"{self.workload} {self.engine:24} {self.tokens:8.1f} tokens/s, {self.floor:4.0%} of the floor's, first "
            f"after {self.first:8.1f} ms, then every {self.between:6.2f} ms; others {self.others:.0%}"
        )


def report(rows: Sequence[Row], sides: Sequence["Side"]) -> str:
    """Markdown: output tokens a second (and the part of the floor's), then times to the first token."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    lines = [f"| | {' | '.join(workloads)} | start s | memory MiB |", "|---" * (len(workloads) + 3) + "|"]
    for side in sides:
        cells = []
        for name in workloads:
            tokens, floor = (_median(rows, side.name, name, field) for field in ("tokens", "floor"))
            cells.append(f"{tokens:,.1f} ({floor:.0%})")
        lines.append(f"| {side.name} | {' | '.join(cells)} | {side.started:.1f} | {side.memory / 2**20:,.0f} |")
    lines += ["", f"| first token, ms | {' | '.join(workloads)} |", "|---" * (len(workloads) + 1) + "|"]
    for side in sides:
        cells = [f"{_median(rows, side.name, name, 'first'):,.0f}" for name in workloads]
        lines.append(f"| {side.name} | {' | '.join(cells)} |")
    shares = sorted(row.others for row in rows)
    lines += ["", f"others' share of the machine: median {shares[len(shares) // 2]:.0%}, most {shares[-1]:.0%}; "
              f"memory {min(r.read for r in rows):.0f}-{max(r.read for r in rows):.0f} GB/s, "
              f"products {min(r.multiply for r in rows):.0f}-{max(r.multiply for r in rows):.0f} GFLOP/s"]  # fmt: skip
    return "\n".join(lines)


def _median(rows: Sequence[Row], engine: str, workload: str, field: str) -> float:
    return statistics.median(getattr(row, field) for row in rows if (row.engine, row.workload) == (engine, workload))
