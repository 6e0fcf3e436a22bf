"""The side of an engine: answers each line `WORKLOAD SEED` on its input with a line of JSON on its output.

Whatever the engine itself prints goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.peers.workloads import Asked, Workload, build


@dataclass(slots=True)
class Trace:
    """Of one request: when each of its tokens was there, as `time.perf_counter` tells it, and the first one's id."""

    times: list[float] = field(default_factory=list)
    first: int = -1

    def add(self, moment: float, ids: Sequence[int]) -> None:
        if not self.times and ids:
            self.first = int(ids[0])
        self.times += [moment] * len(ids)


class Engine(Protocol):
    """Made with its model loaded. One that has a `prepare` is told of each workload before its time runs."""

    version: str

    def run(self, workload: Workload) -> Sequence[Trace]:
        """By request, none before it has arrived."""


def serve(make: Any) -> None:
    """make: () -> Engine. The first line that goes out says that a first token has come, and what the engine is."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine = make()
    engine.run(Workload("first", "", [Asked(list(range(400, 464)), 1)], 1))
    print(json.dumps({"version": engine.version}), file=answers)
    for line in sys.stdin:
        name, seed = line.split()
        workload = build(name, int(seed))
        if hasattr(engine, "prepare"):
            engine.prepare(workload)
        began = time.perf_counter()
        traces = engine.run(workload)
        ended = time.perf_counter()
        wanted = [asked.tokens for asked in workload.requests]
        came = [len(trace.times) for trace in traces]
        if came != wanted:
            raise RuntimeError(f"{name}: {came} tokens came, {wanted} were asked for")
        since = [[moment - began for moment in trace.times] for trace in traces]
        firsts = [trace.first for trace in traces]
        print(json.dumps({"seconds": ended - began, "times": since, "firsts": firsts}), file=answers)
