"""What goes into an engine and what comes out of it, once a step.

An attempt is one submission of a request to one engine, named by a number that the frontend mints. Every attempt gets
exactly one `End` after which no more comes of it. Tokens carry attempt, index of the sequence and position, so a
frontend can tell gaps, duplicates and zombies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cache_manager.ledger import PageMap
from cache_manager.page_names import Name
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Source:
    """Another engine, which may still have the KV of a request. address, token: as in `rpc.frontend.engine_client`."""

    address: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Queue this request. emitted: by sequence, output tokens that an earlier attempt already delivered, which count as
    output; None for a sequence that has ended. () where nothing was delivered of any.

    again: another engine had taken it, and is gone: it is not refused, waits as long as its own patience, and comes
    before those that nobody has taken yet. alone: nothing else runs until it has gone so many steps beyond its prompt
    and what was delivered, or has ended. source: who had it before, for the link, which copies pages from there; these
    are brought: by name, each uint8 [groups, page_bytes] in canonical form.
    """

    attempt: int
    request: Request
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    again: bool = False
    alone: int = 0
    source: Source | None = None
    brought: Mapping[Name, NDArray[np.uint8]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """The frontend wants no more of this sequence (a stop string matched), or with index None of the whole attempt (the
    client left). Unknown ones are ignored.
    """

    attempt: int
    index: int | None = None


class Question(Enum):
    """What an operator wants of an engine."""

    PAGE_MAP = "page_map"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class Ask:
    """Answered once, under its ticket, which the frontend mints."""

    ticket: int
    question: Question


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """forgotten: pages that a reset has taken the name from."""

    ticket: int
    forgotten: int = 0
    page_map: PageMap | None = None


Event = Submit | Finish | Ask


class EndReason(Enum):
    """Why an attempt ended. The last five are errors to its client. STUCK: its own controls leave none to draw."""

    STOP = "stop"
    LENGTH = "length"
    FINISHED = "finished"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    STUCK = "stuck"
    FAULT = "fault"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True, slots=True)
class End:
    """The last word on a sequence of an attempt, and on the attempt unless `more` of its sequences go on.

    stop_token_id: what matched, for STOP. retry_after: seconds, for QUEUE_*.
    """

    attempt: int
    reason: EndReason
    stop_token_id: int | None = None
    message: str = ""
    retry_after: float = 0.0
    index: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt got its first batch row.

    Attributes:
        attempt: Which.
        age: Seconds since then on the engine's clock, when its outputs leave the scheduler. A frontend subtracts it
            from its own clock, so the two need not agree.
        cached: Prompt tokens whose KV was in the prefix cache.
    """

    attempt: int
    age: float
    cached: int = 0


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

    @staticmethod
    def joined(parts: Sequence["Logprobs"]) -> "Logprobs":
        """One after the other. Narrower parts are padded: nobody asked for more alternatives than a part has."""
        width = max(part.top.shape[1] for part in parts)
        return Logprobs(
            chosen=np.concatenate([part.chosen for part in parts]),
            rank=np.concatenate([part.rank for part in parts]),
            top_ids=np.concatenate([_widened(part.top_ids, width, -1) for part in parts]),
            top=np.concatenate([_widened(part.top, width, -np.inf) for part in parts]),
        )

    def select(self, index: NDArray[np.intp]) -> "Logprobs":
        return Logprobs(self.chosen[index], self.rank[index], self.top_ids[index], self.top[index])


def _widened(array: NDArray, width: int, fill: float) -> NDArray:
    if array.shape[1] == width:
        return array  # as parts of a search's result are: np.pad took 0.25 s for 7,200 of them
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPart:
    """Logprobs of some tokens of an attempt's prompt, each given all that come before it. start: position of the first
    of these, at least 1. A part may come again after a preemption.
    """

    attempt: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they are now; counts since the engine started.

    pages_used: held by sequences and steps in flight; pages_peak: most that ever were, page_bytes: what one of them
    takes; pages_shared: those of them that have several holders;
    pages_if_copied: pages that sequences would hold if they shared none;
    pages_cached: held by nobody, but of use to a request that starts alike. slots_unused: places for tokens in the
    pages of running sequences that hold none yet. computed_tokens: tokens whose KV was computed; recomputed_tokens:
    those of them that a preemption had thrown away. prefix_queries, prefix_hits: prompt tokens that were looked up in
    the prefix cache, and found. evicted_*: pages that lost their content's name, by cause. lifetimes: of the pages that
    were evicted for their place, how many lived how long, in the classes of `cache_manager.cached.LIFETIMES`;
    lifetime_seconds: their sum. host_slots, host_slots_used: places for
    pages in the host tier, and those that hold a copy; swapped_out, swapped_in: pages copied there and back; swap_lost:
    those that did not come back as they had been. pages_brought: copied in from other engines. imbalances: pages that
    the ledger found wrong, and set aside. images_encoded: calls of the image encoder. isolated: 1 while one request has
    the engine for itself. waiting_seconds: that the queue is predicted to take.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    pages_shared: int = 0
    slots_unused: int = 0
    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evicted_capacity: int = 0
    evicted_reset: int = 0
    evicted_fault: int = 0
    lifetimes: tuple[int, ...] = ()
    lifetime_seconds: float = 0.0
    host_slots: int = 0
    host_slots_used: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swap_lost: int = 0
    imbalances: int = 0
    pages_peak: int = 0
    page_bytes: int = 0
    pages_if_copied: int = 0
    images_encoded: int = 0
    isolated: int = 0
    waiting_seconds: float = 0.0
    pages_brought: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class NameChanges:
    """Names of full pages that the prefix cache has from now on, and those that it no longer has, which come first.
    SHORT_NAME bytes of each: enough to route by, where a page is found by all of them.
    """

    removed: bytes
    added: bytes


SHORT_NAME = 8


def short_names(joined: bytes) -> list[bytes]:
    """One after the other, as in `NameChanges`."""
    return [joined[at : at + SHORT_NAME] for at in range(0, len(joined), SHORT_NAME)]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """New tokens, [n] each: see `StepOutputs`."""

    attempts: NDArray[np.int64]
    indices: NDArray[np.int32]
    positions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: Logprobs

    @staticmethod
    def none() -> "Tokens":
        none = np.empty(0, np.int32)
        return Tokens(np.empty(0, np.int64), none, none, none, Logprobs.none())

    @staticmethod
    def joined(parts: Sequence["Tokens"]) -> "Tokens":
        """One after the other."""
        return Tokens(
            np.concatenate([part.attempts for part in parts]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            Logprobs.joined([part.logprobs for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """All that one step has to tell its frontends. attempts, indices, positions, tokens: [n], one entry a new token.

    index: of the sequence in its request. position: of the token in its output, from 0. step_seconds: how long the step
    ran; empty where none did, several where the outputs of several steps were put together. overheads: seconds of each
    that it took to plan it, to pack what it computes and to take in what came of it. prompt_parts: all of a prompt's
    have come when its first token does. names: changes of the prefix cache, one after the other, where they are wanted.
    """

    attempts: NDArray[np.int64]
    indices: NDArray[np.int32]
    positions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: Logprobs
    starts: tuple[Start, ...]
    ends: tuple[End, ...]
    stats: EngineStats
    step_seconds: tuple[float, ...] = ()
    answers: tuple[Answer, ...] = ()
    prompt_parts: tuple[PromptPart, ...] = ()
    overheads: tuple[float, ...] = ()
    names: tuple[NameChanges, ...] = ()

    @property
    def over(self) -> set[int]:
        """Attempts of which nothing more comes."""
        return {end.attempt for end in self.ends if not end.more}


def nothing(stats: EngineStats, ends: tuple[End, ...] = ()) -> StepOutputs:
    """Outputs without a token."""
    none = np.empty(0, np.int32)
    return StepOutputs(np.empty(0, np.int64), none, none, none, Logprobs.none(), (), ends, stats)
