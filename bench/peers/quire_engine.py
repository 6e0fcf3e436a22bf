"""Quire without its frontend: events in, steps' outputs out. python -m bench.peers.quire_engine MODEL [QUANTIZATION]"""

import importlib.metadata
import queue
import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.peers.worker import serve
from bench.peers.workloads import Workload
from model.settings import ModelSettings
from rpc.assembly import assemble
from rpc.settings import EngineConfig
from scheduler.controls import Controls
from scheduler.events import StepOutputs, Submit
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings


class Quire:
    def __init__(self, model: str, quantization: str | None = None) -> None:
        self.version = importlib.metadata.version("quire")
        self._outputs = queue.SimpleQueue[tuple[float, StepOutputs]]()
        config = EngineConfig(
            model=ModelSettings(model, quantization=quantization),
            scheduler=SchedulerSettings(max_batched_tokens=2048, max_sequences=32),
            queue=NO_QUEUE_LIMITS,
        )
        self._engine = assemble(config).engine(lambda outputs: self._outputs.put((time.perf_counter(), outputs)))
        self._engine.start()
        self._attempts = 0

    def run(self, workload: Workload) -> Sequence[Sequence[float]]:
        greedy = Controls(0.0, 1.0, 0, 0.0, 0)
        first, self._attempts = self._attempts, self._attempts + len(workload.requests)
        self._engine.send(
            [
                Submit(i, Request(np.array(asked.prompt, np.int32), asked.tokens, (), greedy))
                for i, asked in enumerate(workload.requests, first)
            ]
        )
        times: list[list[float]] = [[] for _ in workload.requests]
        left = len(times)
        while left:
            moment, outputs = self._outputs.get()
            for attempt in outputs.attempts.tolist():
                times[attempt - first].append(moment)
            left -= len(outputs.ends)
        return times


if __name__ == "__main__":
    serve(lambda: Quire(*sys.argv[1:]))
