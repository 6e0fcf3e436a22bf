"""Rows of `bench.overload`: how a load was served, and what share of a policy's peak it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rpc.loadgen.drive import LoadRun
from rpc.loadgen.observation import Observation

REFUSED = "RESOURCE_EXHAUSTED"
REFUSED_AT_ONCE = f"{REFUSED} QUEUE_FULL"
LATE = "DEADLINE_EXCEEDED"
MIB = 2**20
COLUMNS = (
    "policy", "load", "requests a second", "in time a second", "of its peak", "requests", "in time",
    "refused at once", "refused in the queue", "late", "other failures", "refusal p50, ms", "p99, ms", "most, ms",
    "memory, MiB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A load that one policy served.

    A client ends its call at the deadline, so a complete answer is one in time.

    Attributes:
        policy: Scheduling policy.
        load: Rate of requests, as a factor of the capacity.
        rate: Requests a second.
        goodput: Requests a second that were complete in time, after the start of the load.
        requests: Requests of the whole load.
        in_time: Those that were complete in time.
        refused_at_once: Those that were refused when they came.
        refused_waiting: Those that were refused in the queue, when their last moment to start had passed.
        late: Those whose client left at the deadline.
        other: Those that ended otherwise.
        refusals_ms: Time from sending a request to its refusal when it came: p50, p99 and most; None without any.
        memory_mib: Most resident memory of the server's processes.
    """

    policy: str
    load: float
    rate: float
    goodput: float
    requests: int
    in_time: int
    refused_at_once: int
    refused_waiting: int
    late: int
    other: int
    refusals_ms: tuple[float, float, float] | None
    memory_mib: float

    @staticmethod
    def of(policy: str, load: float, run: LoadRun, window: tuple[float, float], rate: float, memory: int) -> "Row":
        """Counts how requests ended.

        Args:
            policy: Scheduling policy.
            load: Factor of the capacity.
            run: The load.
            window: Seconds after its begin between which ends count as goodput.
            rate: Requests a second.
            memory: Most bytes of the server.
        """
        whole = [one for one in run.seen if is_whole(one)]
        at_once = [one for one in run.seen if one.code == REFUSED_AT_ONCE]
        refused = sum(one.code.startswith(REFUSED) for one in run.seen)
        late = sum(one.code.startswith(LATE) for one in run.seen)
        return Row(
            policy, load, rate, ends_a_second(run, window), len(run.seen), len(whole), len(at_once),
            refused - len(at_once), late, len(run.seen) - len(whole) - refused - late,
            spread([1000 * (one.ended - one.sent) for one in at_once]), memory / MIB,
        )  # fmt: skip


def is_whole(seen: Observation) -> bool:
    """Returns whether a request ended with all its tokens."""
    return seen.complete and not seen.short


def ends_a_second(run: LoadRun, window: tuple[float, float]) -> float:
    """Returns whole requests that ended in a part of a load, a second. window: its seconds after the load's begin."""
    first, last = (run.begin + at for at in window)
    return sum(is_whole(one) and first <= one.ended < last for one in run.seen) / (last - first)


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Returns p50, p99 and the most; None of no value."""
    if not values:
        return None
    return float(np.percentile(values, 50)), float(np.percentile(values, 99)), max(values)


def shares(rows: Sequence[Row]) -> list[float]:
    """Returns each row's goodput as a share of the most that its policy had; 0 where it had none."""
    peaks = {policy: max(row.goodput for row in rows if row.policy == policy) for policy in {r.policy for r in rows}}
    return [row.goodput / peaks[row.policy] if peaks[row.policy] else 0.0 for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Returns rows as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row, share in zip(rows, shares(rows), strict=True):
        counts = (row.requests, row.in_time, row.refused_at_once, row.refused_waiting, row.late, row.other)
        cells = [row.policy, f"{row.load:g}", f"{row.rate:.1f}", f"{row.goodput:.1f}", f"{100 * share:.0f} %"]
        cells += [str(count) for count in counts]
        cells += [f"{value:.1f}" for value in row.refusals_ms] if row.refusals_ms else [""] * 3
        lines.append(f"| {' | '.join([*cells, f'{row.memory_mib:.0f}'])} |")
    return "\n".join(lines)
