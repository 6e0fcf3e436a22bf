"""The process of an engine: answers each line `WORKLOAD SEED` on its input with a line of JSON on its output.

The engine's own output goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.peers.workloads import PeerRequest, Workload, build


@dataclass(slots=True)
class Trace:
    """Output of one request.

    Attributes:
        times: Time of each token, in seconds of time.perf_counter.
        ids: Tokens. One that ends the output may be missing.
    """

    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, moment: float, ids: Sequence[int]) -> None:
        self.times += [moment] * len(ids)
        self.ids += map(int, ids)


class PeerEngine(Protocol):
    """An engine with its model loaded.

    If it has a method `prepare`, that is called with each workload before the measured time.
    """

    version: str

    def run(self, workload: Workload) -> Sequence[Trace]:
        """Runs a workload, each request not before its arrival; returns a trace for each."""


def serve(make: Any) -> None:
    """Makes an engine, and answers workloads. The first line, with its version, follows its first token.

    Args:
        make: () -> PeerEngine.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: PeerEngine = make()
    engine.run(Workload("first", "", [PeerRequest(list(range(400, 464)), 1)], 1))
    print(json.dumps({"version": engine.version}), file=answers)
    for line in sys.stdin:
        name, seed = line.split()
        workload = build(name, int(seed))
        if hasattr(engine, "prepare"):
            engine.prepare(workload)
        began = time.perf_counter()
        traces = engine.run(workload)
        ended = time.perf_counter()
        check(workload, traces)
        since = [[moment - began for moment in trace.times] for trace in traces]
        answer = {"seconds": ended - began, "times": since, "ids": [trace.ids for trace in traces]}
        print(json.dumps(answer), file=answers)


def check(workload: Workload, traces: Sequence[Trace]) -> None:
    """Raises RuntimeError unless each request has its tokens. One with a schema may have fewer, but has some."""
    came = [len(trace.times) for trace in traces]
    least = [1 if asked.schema else asked.tokens for asked in workload.requests]
    most = [asked.tokens for asked in workload.requests]
    if len(came) != len(most) or any(not a <= n <= b for a, n, b in zip(least, came, most, strict=True)):
        raise RuntimeError(f"{workload.name}: {came} tokens came, {most} were asked for")
