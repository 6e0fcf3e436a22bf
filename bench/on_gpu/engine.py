"""Runs the engine like a server, without the frontend: events in, outputs of steps out, timed as they come."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bench.on_gpu.loads import EngineRequest
from bench.on_gpu.memory import free
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.settings import EngineConfig
from scheduler.events import Abort, EndReason, StepOutputs, Submit
from scheduler.request import Request
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings

PATIENCE = 120.0  # seconds until an engine without output counts as stuck


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A step's outputs.

    Attributes:
        at: Time of their arrival, in seconds of time.perf_counter.
        attempts: Attempts that got a token.
        overhead: Seconds of the host's work for the step.
    """

    at: float
    attempts: NDArray[np.int64]
    overhead: float


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """Result of a run. Times are seconds of time.perf_counter.

    Attributes:
        began: Start of the run.
        ended: Time of the last output.
        moments: Outputs by step.
        sent: Time at which each request was sent.
        times: Arrival of each request's tokens.
        firsts: Id of each request's first token.
    """

    began: float
    ended: float
    moments: list[Moment]
    sent: list[float]
    times: list[list[float]]
    firsts: list[int]

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class KeptWarnings(logging.Handler):
    """Keeps warnings.

    Attributes:
        messages: Their texts.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class TimedEngine:
    """A running engine; at the end of its context it is stopped, and its memory is free."""

    def __init__(self, directory: Path, device: str, backend: str, kv_memory: int, sequences: int, step: int) -> None:
        """Starts an engine.

        Args:
            directory: Checkpoint of the model.
            device: "cuda" or "cpu".
            backend: Backend of the model.
            kv_memory: Bytes of the KV pool.
            sequences: Sequences that run at once.
            step: Most tokens of a step.
        """
        self.warnings = KeptWarnings()
        self._outputs = queue.SimpleQueue[tuple[float, StepOutputs]]()
        config = EngineConfig(
            model=ModelSettings(str(directory), device=device, backend=backend, kv_cache_memory=kv_memory),
            scheduler=SchedulerSettings(max_batched_tokens=step, max_sequences=sequences, steps_in_flight=2),
            queue=NO_QUEUE_LIMITS,
        )
        self._engine = assemble(config).engine(lambda outputs: self._outputs.put((time.perf_counter(), outputs)))
        self._engine.start()
        self.attempts = 0
        logging.getLogger("quire").addHandler(self.warnings)

    def __enter__(self) -> "TimedEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("quire").removeHandler(self.warnings)
        with contextlib.suppress(TimeoutError):  # an earlier exception says more
            self._engine.stop()
        for thread in threading.enumerate():
            if thread.name == "quire-step":
                thread.join(10)
        del self._engine
        free()

    def run(self, asked: Sequence[EngineRequest], together: int | None = None) -> EngineRun:
        """Runs requests.

        Args:
            asked: The requests.
            together: Requests at a time; the next one is sent when one ends. None sends all at once.

        Raises:
            RuntimeError: A request ends before its last token, or the engine is stuck.
        """
        first = self.attempts
        self.attempts += len(asked)
        try:
            return self._run(asked, len(asked) if together is None else together, first)
        except RuntimeError:
            self._engine.send([Abort(attempt) for attempt in range(first, self.attempts)])
            raise

    def _run(self, asked: Sequence[EngineRequest], together: int, first: int) -> EngineRun:
        """Runs requests whose attempts are numbered from `first`."""
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
                    continue  # from a run that failed
                if not times[attempt - first]:
                    firsts[attempt - first] = token
                times[attempt - first].append(at)
            ends = [end for end in outputs.ends if end.attempt >= first]
            for end in ends:
                if end.reason is not EndReason.LENGTH:
                    raise RuntimeError(f"request {end.attempt - first} ended: {end.reason.value} {end.message}".strip())
            left -= len(ends)
            self._send(waiting, len(ends), sent)
        return EngineRun(began, at, moments, sent, times, firsts)

    def _send(self, waiting: Iterator[tuple[int, EngineRequest]], count: int, sent: list[float]) -> None:
        chosen = [one for _, one in zip(range(count), waiting, strict=False)]
        if chosen:
            sent += [time.perf_counter()] * len(chosen)
            self._engine.send(
                [Submit(i, Request(np.array(one.prompt, np.int32), one.tokens, (), one.controls)) for i, one in chosen]
            )

    def _next(self) -> tuple[float, StepOutputs]:
        try:
            return self._outputs.get(timeout=PATIENCE)
        except queue.Empty:
            raise RuntimeError(f"nothing came from the engine for {PATIENCE:.0f} s") from None
