"""What goes into an engine and what comes out of it, once a step.

An attempt is one submission of a request to one engine, named by a number that the frontend mints. Every attempt gets
exactly one `End` from its engine. Tokens carry attempt and position, so a frontend can tell gaps, duplicates and
zombies.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from scheduler.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Queue this request. emitted: output tokens that an earlier attempt already delivered; they count as output."""

    attempt: int
    request: Request
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The frontend wants no more of this attempt (a stop string matched, the client left). Unknown attempts are
    ignored.
    """

    attempt: int


Event = Submit | Finish


class EndReason(Enum):
    """Why an attempt ended. The last four are errors to its client."""

    STOP = "stop"
    LENGTH = "length"
    FINISHED = "finished"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    FAULT = "fault"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True, slots=True)
class End:
    """The last word on an attempt. stop_token_id: what matched, for STOP. retry_after: seconds, for QUEUE_*."""

    attempt: int
    reason: EndReason
    stop_token_id: int | None = None
    message: str = ""
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt left the queue for the first time after so many seconds."""

    attempt: int
    waited: float


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Of n drawn tokens, from the raw logits in float32. k is the most alternatives that any of them asked for.

    chosen: [n] natural log. rank: [n], 1 is the likeliest. top_ids, top: [n, k], likeliest first.
    """

    chosen: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    @staticmethod
    def none() -> "Logprobs":
        return Logprobs(
            np.empty(0, np.float32), np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
        )

    def select(self, index: NDArray[np.intp]) -> "Logprobs":
        return Logprobs(self.chosen[index], self.rank[index], self.top_ids[index], self.top[index])


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they are now; counts since the engine started. computed_tokens: tokens whose KV was computed;
    recomputed_tokens: those of them that a preemption had thrown away.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """All that one step has to tell its frontends. attempts, positions, tokens: [n], one entry a new token.

    position: of the token in its output, from 0. step_seconds: how long the step ran; empty where none did, several
    where the outputs of several steps were put together.
    """

    attempts: NDArray[np.int64]
    positions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: Logprobs
    starts: tuple[Start, ...]
    ends: tuple[End, ...]
    stats: EngineStats
    step_seconds: tuple[float, ...] = ()


def nothing(stats: EngineStats, ends: tuple[End, ...] = ()) -> StepOutputs:
    """Outputs without a token."""
    none = np.empty(0, np.int32)
    return StepOutputs(np.empty(0, np.int64), none, none, Logprobs.none(), (), ends, stats)
