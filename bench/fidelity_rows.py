"""Rows of `bench.fidelity`: the cases, simulated beside measured latencies, and the file that has them so far."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import keep
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.traces import Arrival, read_trace
from rpc.simulation.served import Serving

LATENCIES = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
PERCENTS = (50, 99)


@dataclass(frozen=True, slots=True)
class Case:
    """A trace that is measured and simulated.

    Attributes:
        trace: A name of `KNOWN`.
        longest: Tokens of the longest request that is taken; None takes all.
        calibrating: First requests, on which the simulation is calibrated.
    """

    trace: str
    longest: int | None
    calibrating: int

    def parts(self, measured: int) -> tuple[list[Arrival], list[Arrival]]:
        """Returns the requests that calibrate, and the `measured` ones behind them.

        Raises:
            ValueError: The trace has too few.
        """
        some = [
            one for one in read_trace(self.trace) if self.longest is None or one.prompt + one.output <= self.longest
        ]
        if (most := len(some) - self.calibrating) < measured:
            raise ValueError(f"--requests is {measured}, must be at most {most}: {self.trace} has no more")
        behind = some[self.calibrating : self.calibrating + measured]
        return some[: self.calibrating], [replace(one, at=one.at - behind[0].at) for one in behind]


CASES = (Case("azure-conv", None, 40), Case("mooncake", 4096, 60))
"""Mooncake's longest prompts are left out: shrunk to a small context, all others would have an output of a token."""


def write_arrivals(path: Path, arrivals: Iterable[Arrival]) -> Path:
    """Writes requests in the format of Mooncake's traces. Returns the path."""
    rows = (
        {"timestamp": 1000 * a.at, "input_length": a.prompt, "output_length": a.output, "hash_ids": a.blocks}
        for a in arrivals
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@dataclass(frozen=True, slots=True)
class Compared:
    """A latency in milliseconds, measured and simulated."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Percent by which the simulated latency differs from the measured one."""
        return 100 * (self.simulated / self.measured - 1)

    def __str__(self) -> str:
        return f"{self.simulated:,.1f} / {self.measured:,.1f} ({self.error:+.1f} %)"


@dataclass(frozen=True, slots=True)
class Row:
    """One trace at one load.

    Attributes:
        trace: Name of the trace.
        load: Rate, as a part of what the engine can take.
        context: Tokens of the longest request.
        requests: Requests sent.
        failed: Requests that failed.
        failed_simulated: Requests that were refused in the simulation.
        seconds: Time of the measured load.
        latencies: By name, `LATENCIES`.
        slowness: Factor of the calibrated costs of steps, in the simulation.
    """

    trace: str
    load: float
    context: int
    requests: int
    failed: int
    failed_simulated: int
    seconds: float
    latencies: Mapping[str, Compared]
    slowness: float = 1.0

    @staticmethod
    def of(trace: str, load: float, context: int, run: LoadRun, served: Serving, slowness: float = 1.0) -> "Row":
        """Compares a measured load with the same load simulated. Raises ValueError if a latency is of no request."""
        done = [one for one in run.seen if one.complete]
        pairs = {
            "TTFT": ([one.first for one in done if one.first is not None], served.firsts),
            "TPOT": ([one.other for one in done if one.other is not None], served.others),
        }
        latencies = dict[str, Compared]()
        for name, (seen, expected) in pairs.items():
            if not len(seen) or not len(expected):
                raise ValueError(f"{trace}, load {load:g}: no request has a {name}")
            for percent in PERCENTS:
                real, guess = (1000 * float(np.percentile(each, percent)) for each in (seen, expected))
                latencies[f"{name} p{percent}"] = Compared(real, guess)
        failed, refused = len(run.seen) - len(done), int(served.figures()["refused"])
        return Row(trace, load, context, len(run.seen), failed, refused, run.end - run.begin, latencies, slowness)

    def markdown(self) -> str:
        """Returns the row of a table with `header`."""
        cells = [
            self.trace,
            f"{self.load:g}",
            str(self.context),
            str(self.requests),
            f"{self.slowness:.3g}",
            f"{self.failed_simulated} / {self.failed}",
        ]
        return f"| {' | '.join([*cells, *(str(self.latencies[name]) for name in LATENCIES)])} |"


def header() -> str:
    """Returns the head of the table."""
    names = ("trace", "load", "context", "requests", "cost of steps", "failed", *(f"{name}, ms" for name in LATENCIES))
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


@dataclass(slots=True)
class Report:
    """Rows that are known so far, in a file as well.

    Attributes:
        file: File to keep up to date; None for none.
        facts: What was measured, and with what.
        rows: One for each trace and load.
        whole: Whether all rows are there.
    """

    file: Path | None
    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    whole: bool = False

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def calibrated(self, trace: str, requests: int, fit: str) -> None:
        """Notes how well the simulation fits the requests that it was calibrated on."""
        self.facts.setdefault("calibrations", {})[trace] = {"requests": requests, "fit": fit}
        self.save()

    def save(self) -> None:
        """Brings the file up to date."""
        rows = [asdict(row) | {"errors_percent": errors_of(row)} for row in self.rows]
        keep(self.file, self.facts | {"whole": self.whole, "rows": rows})

    def summary(self) -> str:
        """Returns the largest errors at the median and at the 99th percentile, with each cost of steps."""
        sides = {
            "costs as calibrated": [row for row in self.rows if row.slowness == 1],
            "costs as the load itself had them": [row for row in self.rows if row.slowness != 1],
        }
        return "\n".join(f"{side}: {_largest(rows)}" for side, rows in sides.items() if rows)


def _largest(rows: Sequence[Row]) -> str:
    parts = []
    for percent in PERCENTS:
        found = [
            (abs(one.error), f"{name}, {row.trace} at load {row.load:g}")
            for row in rows
            for name, one in row.latencies.items()
            if name.endswith(f"p{percent}")
        ]
        parts.append("largest error of a p{}: {:.1f} % ({})".format(percent, *max(found)))
    return "; ".join(parts)


def errors_of(row: Row) -> dict[str, float]:
    """Returns the error of each latency in percent."""
    return {name: one.error for name, one in row.latencies.items()}
