"""Runs Quire's engine without its frontend: events in, steps' outputs out.

Requests that are drawn pass through the frontend's checks, as a schema needs them.

python -m bench.peers.quire_engine MODEL KV_TOKENS [QUANTIZATION]

MODEL is a directory or a GGUF file.
"""

import queue
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from bench.peers.worker import Trace, serve
from bench.peers.workloads import PeerRequest, Workload
from model.config import read_config
from model.settings import ModelSettings
from rpc.distribution import own_version
from rpc.engines.assembly import assemble
from rpc.frontend.prepare import Preparer, load_preparer
from rpc.settings import EngineConfig
from scheduler.controls import Controls
from scheduler.events import StepOutputs, Submit
from scheduler.parameters import Sampling, Stopping
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.spec import Spec
from scheduler.structured import Structured

SEQUENCES = 32  # as many as any workload has at once


def kv_memory(model: str, tokens: int) -> int:
    """Returns the bytes of a KV cache for `tokens` tokens, and of the recurrent states of all sequences at once.

    Each sequence needs two states: the current one and one checkpoint. llama.cpp has memory of its own for states.
    """
    config = read_config(Path(model))
    layout = config.kv_layout(16, config.dtype)
    return tokens * layout.token_bytes + SEQUENCES * 2 * layout.states.pages * layout.page_bytes


class QuireEngine:
    """Quire's engine as a `PeerEngine`."""

    def __init__(self, model: str, kv_tokens: str, quantization: str | None = None) -> None:
        self.version = own_version()
        self._outputs = queue.SimpleQueue[tuple[float, StepOutputs]]()
        self._config = EngineConfig(
            model=ModelSettings(model, quantization=quantization, kv_cache_memory=kv_memory(model, int(kv_tokens))),
            scheduler=SchedulerSettings(max_batched_tokens=2048, max_sequences=SEQUENCES),
            queue=NO_QUEUE_LIMITS,
        )
        self._engine = assemble(self._config).engine(lambda outputs: self._outputs.put((time.perf_counter(), outputs)))
        self._engine.start()
        self._attempts = 0

    def run(self, workload: Workload) -> Sequence[Trace]:
        began = time.perf_counter()
        first, self._attempts = self._attempts, self._attempts + len(workload.requests)
        waiting = [(asked.arrives, Submit(i, self._request(asked))) for i, asked in enumerate(workload.requests, first)]
        traces = [Trace() for _ in workload.requests]
        left = len(traces)
        while left:
            now = time.perf_counter() - began
            here = [submit for arrives, submit in waiting if arrives <= now]
            if here:
                self._engine.send(here)
                waiting = waiting[len(here) :]
            try:
                moment, outputs = self._outputs.get(timeout=waiting[0][0] - now if waiting else None)
            except queue.Empty:
                continue
            for attempt, token in zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True):
                traces[attempt - first].add(moment, (token,))
            left -= len(outputs.ends)
        return traces

    @cached_property
    def _preparer(self) -> Preparer:
        return load_preparer(self._config.model)

    def _request(self, asked: PeerRequest) -> Request:
        if asked.seed is None:
            return Request(np.array(asked.prompt, np.int32), asked.tokens, (), Controls(0.0, 1.0, 0, 0.0, 0))
        spec = Spec(
            tuple(asked.prompt),
            sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=asked.seed),
            stopping=Stopping(asked.tokens, ignore_eos=not asked.schema),
            structured=Structured.json_schema(asked.schema) if asked.schema else None,
        )
        return self._preparer.prepare(spec, self._engine.info.limits)


if __name__ == "__main__":
    serve(lambda: QuireEngine(*sys.argv[1:]))
