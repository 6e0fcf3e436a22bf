"""The side of an engine: answers each line `WORKLOAD SEED` on its input with a line of JSON on its output.

Whatever the engine itself prints goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from bench.peers.workloads import Asked, Workload, build


class Engine(Protocol):
    """Made with its model loaded. One that has a `prepare` is told of each workload before its time runs."""

    version: str

    def run(self, workload: Workload) -> Sequence[Sequence[float]]:
        """By request, when each of its tokens was there, as `time.perf_counter` tells it."""


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
        times = engine.run(workload)
        ended = time.perf_counter()
        wanted = [asked.tokens for asked in workload.requests]
        if [len(one) for one in times] != wanted:
            raise RuntimeError(f"{name}: {[len(one) for one in times]} tokens came, {wanted} were asked for")
        since = [[moment - began for moment in one] for one in times]
        print(json.dumps({"seconds": ended - began, "times": since}), file=answers)
