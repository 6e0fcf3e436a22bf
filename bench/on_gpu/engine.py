"""The engine as a server runs it, without the frontend: events in, outputs of steps out, timed as they come."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bench.on_gpu.loads import Asked
from bench.on_gpu.memory import free
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.settings import EngineConfig
from scheduler.controls import Controls
from scheduler.events import EndReason, Finish, StepOutputs, Submit
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings

GREEDY = Controls(0.0, 1.0, 0, 0.0, 0)
PATIENCE = 120.0  # seconds until an engine from which nothing comes is taken for stuck


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A step's outputs. at: when they came. attempts: that got a token. overhead: seconds of the host beside it."""

    at: float
    attempts: NDArray[np.int64]
    overhead: float


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """sent, times: by request, when it was sent and when its tokens came. firsts: each one's first token."""

    began: float
    ended: float
    moments: list[Moment]
    sent: list[float]
    times: list[list[float]]
    firsts: list[int]

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Engine:
    """A context: at its end the engine is stopped, and its memory free."""

    def __init__(self, directory: Path, device: str, backend: str, kv_memory: int, sequences: int, step: int) -> None:
        """kv_memory: bytes. sequences: that run at once. step: tokens of one."""
        self._outputs = queue.SimpleQueue[tuple[float, StepOutputs]]()
        config = EngineConfig(
            model=ModelSettings(str(directory), device=device, backend=backend, kv_cache_memory=kv_memory),
            scheduler=SchedulerSettings(max_batched_tokens=step, max_sequences=sequences, steps_in_flight=2),
            queue=NO_QUEUE_LIMITS,
        )
        self._engine = assemble(config).engine(lambda outputs: self._outputs.put((time.perf_counter(), outputs)))
        self._engine.start()
        self._attempts = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(TimeoutError):  # then what went wrong before says more
            self._engine.stop()
        for thread in threading.enumerate():
            if thread.name == "quire-step":
                thread.join(10)
        del self._engine
        free()

    def run(self, asked: Sequence[Asked], together: int | None = None) -> Run:
        """together: so many at a time, the next one is sent where one ends; None sends all at once. Raises RuntimeError
        where one ends before its last token, or nothing comes any more.
        """
        first = self._attempts
        self._attempts += len(asked)
        try:
            return self._run(asked, len(asked) if together is None else together, first)
        except RuntimeError:
            self._engine.send([Finish(attempt) for attempt in range(first, self._attempts)])
            raise

    def _run(self, asked: Sequence[Asked], together: int, first: int) -> Run:
        """first: attempt."""
        began = time.perf_counter()
        waiting = iter(enumerate(asked, first))
        sent: list[float] = []
        self._send(waiting, together, sent)
        moments: list[Moment] = []
        times: list[list[float]] = [[] for _ in asked]
        firsts, left, at = [-1] * len(asked), len(asked), began
        while left:
            at, outputs = self._next()
            moments.append(Moment(at, outputs.attempts, sum(outputs.overheads)))
            for attempt, token in zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True):
                if attempt < first:
                    continue  # of a run that was given up
                if not times[attempt - first]:
                    firsts[attempt - first] = token
                times[attempt - first].append(at)
            ends = [end for end in outputs.ends if end.attempt >= first]
            for end in ends:
                if end.reason is not EndReason.LENGTH:
                    raise RuntimeError(f"request {end.attempt - first} ended: {end.reason.value} {end.message}".strip())
            left -= len(ends)
            self._send(waiting, len(ends), sent)
        return Run(began, at, moments, sent, times, firsts)

    def _send(self, waiting: Iterator[tuple[int, Asked]], count: int, sent: list[float]) -> None:
        chosen = [one for _, one in zip(range(count), waiting, strict=False)]
        if chosen:
            sent += [time.perf_counter()] * len(chosen)
            self._engine.send(
                [Submit(i, Request(np.array(one.prompt, np.int32), one.tokens, (), GREEDY)) for i, one in chosen]
            )

    def _next(self) -> tuple[float, StepOutputs]:
        try:
            return self._outputs.get(timeout=PATIENCE)
        except queue.Empty:
            raise RuntimeError(f"nothing came from the engine for {PATIENCE:.0f} s") from None
