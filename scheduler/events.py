"""Events into an engine, and its outputs, once a step.

An attempt is one submission of a request to one engine, named by a number that the frontend mints. Every attempt gets
exactly one `End` after which no more comes of it. Tokens carry attempt, index of the sequence and position, so a
frontend detects gaps, duplicates and zombies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash
from cache_manager.ledger import PageMap
from cache_manager.transfers import TransferredPage
from scheduler.preemption_cause import PreemptionCause
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class KVSource:
    """Another engine that may still have the KV of a request. address, token: as in `rpc.frontend.engine_client`."""

    address: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Queues a request.

    Attributes:
        emitted: Output tokens that an earlier attempt delivered, by sequence; they count as output. None for a sequence
            that has ended. () where no token of any sequence was delivered.
        again: An earlier engine had taken the request and is gone. The request is not refused, waits as long as its
            own queue timeout, and is admitted before requests that no engine has taken yet.
        isolated_steps: No other attempt runs until this one has gone this many steps beyond its prompt and `emitted`,
            or has ended.
        source: Engine that had the request before. The link copies KV pages from there.
        transferred: These pages, by block hash.
    """

    attempt: int
    request: Request
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    again: bool = False
    isolated_steps: int = 0
    source: KVSource | None = None
    transferred: Mapping[BlockHash, TransferredPage] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a sequence (a stop string matched), or with index None the whole attempt (the client left).

    Unknown ones are ignored.
    """

    attempt: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The logits processors of a held attempt can be made: its sequences may be admitted.

    The engine's loop makes these events, no frontend does. Unknown attempts, and those that are not held, are ignored.

    Attributes:
        fault: Why they cannot be made, which ends the attempt; "" where they can.
    """

    attempt: int
    fault: str = ""


class AdminQuestion(Enum):
    """An operator's questions to an engine."""

    PAGE_MAP = "page_map"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class AdminQuery:
    """Answered once, under its ticket, which the frontend mints."""

    ticket: int
    question: AdminQuestion


@dataclass(frozen=True, slots=True, eq=False)
class AdminAnswer:
    """An engine's answer. forgotten: number of pages that lost their block hash by a reset."""

    ticket: int
    forgotten: int = 0
    page_map: PageMap | None = None


Event = Submit | Abort | AdminQuery | Ready


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
        attempt: The attempt.
        age: Seconds since then on the engine's clock, when its outputs leave the scheduler. A frontend subtracts it
            from its own clock, so the two need not agree.
        cached: Prompt tokens whose KV was in the prefix cache.
    """

    attempt: int
    age: float
    cached: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Logprobs of n drawn tokens, from the raw logits in float32. k is the most alternatives of any of them.

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
        """Joins parts, one after the other. Narrower ones are padded: their requests asked for no more alternatives."""
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
    """Logprobs of some tokens of an attempt's prompt, each given all tokens before it.

    A part may come again after a preemption.

    Attributes:
        start: Position of the first of these tokens, at least 1.
    """

    attempt: int
    start: int
    logprobs: Logprobs


# Made once a step, so not frozen: a frozen dataclass sets each field by a call, 4.6 us instead of 1.2 for this one. As
# with `NewTokens`, `StepOutputs`, `StepPlan`, `StepResult`, `StepWork` and `InFlight`, no code writes to it once it is
# made.
@dataclass(slots=True)
class EngineStats:
    """Gauges at this moment, and counters since the engine started.

    Attributes:
        pages_used: Pages held by sequences and steps in flight.
        pages_cached: Pages in the prefix cache that no sequence holds.
        pages_shared: Pages held more than once.
        slots_unused: Token slots in the pages of running sequences that hold no token yet.
        computed_tokens: Tokens whose KV was computed.
        recomputed_tokens: Computed tokens that were computed again after a preemption.
        prefix_queries: Prompt tokens looked up in the prefix cache.
        prefix_hits: Looked-up tokens that were found.
        evicted_capacity: Pages that lost their block hash because others needed the room; `evicted_reset` because an
            operator reset the cache, `evicted_fault` because their content was in doubt.
        lifetimes: Pages evicted for capacity by age, in the classes of `cache_manager.cached.LIFETIMES`.
        lifetime_seconds: Sum of these ages.
        host_slots: Page slots of the host tier; `host_slots_used` of them hold a copy.
        swapped_out: Pages copied to the host tier; `swapped_in` back.
        swap_lost: Copies that were not what had been stored.
        imbalances: Pages that the ledger found wrong and set aside.
        pages_peak: Largest `pages_used` so far.
        page_bytes: Bytes of one page.
        pages_if_copied: Pages that sequences would hold if they shared none.
        images_encoded: Images that were encoded.
        isolated: 1 while one request has the engine for itself.
        waiting_seconds: Predicted time until the queue is worked off.
        pages_transferred: Copied in from other engines.
        draft_tokens: Draft tokens that were computed and checked.
        accepted_tokens: Draft tokens that the model drew too.
        jump_forward_tokens: Output tokens that a constraint left no choice of, and that were not drawn.
        preemptions: Sequences that lost their rows; each is also in the count of its cause, `preemptions_pages` and
            the others, see `PreemptionCause`.
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
    pages_transferred: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    jump_forward_tokens: int = 0
    preemptions_priority: int = 0
    preemptions_pages: int = 0
    preemptions_search: int = 0
    preemptions_lost_copy: int = 0

    @property
    def preempted(self) -> dict[PreemptionCause, int]:
        """Preemptions by cause."""
        return {cause: getattr(self, f"preemptions_{cause}") for cause in PreemptionCause}


@dataclass(frozen=True, slots=True, eq=False)
class KVEvents:
    """Changes of the prefix cache, for routers: `removed` applies before `added`.

    Both hold the first SHORT_HASH bytes of each block hash: enough to route by. Pages are found by whole hashes.
    """

    removed: bytes
    added: bytes


SHORT_HASH = 8


def short_hashes(joined: bytes) -> list[bytes]:
    """Splits the first bytes of block hashes, which stand one after the other in `KVEvents`."""
    return [joined[at : at + SHORT_HASH] for at in range(0, len(joined), SHORT_HASH)]


@dataclass(slots=True, eq=False)  # not frozen, see `EngineStats`
class NewTokens:
    """New tokens, [n] each: see `StepOutputs`."""

    attempts: NDArray[np.int64]
    indices: NDArray[np.int32]
    positions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: Logprobs

    @staticmethod
    def none() -> "NewTokens":
        none = np.empty(0, np.int32)
        return NewTokens(np.empty(0, np.int64), none, none, none, Logprobs.none())

    @staticmethod
    def joined(parts: Sequence["NewTokens"]) -> "NewTokens":
        """Joins tokens of several steps, one after the other."""
        return NewTokens(
            np.concatenate([part.attempts for part in parts]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            Logprobs.joined([part.logprobs for part in parts]),
        )


@dataclass(slots=True, eq=False)  # not frozen, see `EngineStats`
class StepOutputs:
    """Outputs of one step, or of several that were put together.

    Attributes:
        attempts: [n] int64. Attempt of each new token.
        indices: [n] int32. Its sequence in the request.
        positions: [n] int32. Its position in the output, from 0.
        tokens: [n] int32. The new tokens.
        logprobs: Of the n new tokens.
        starts: Attempts that began to run.
        ends: Sequences and attempts that ended.
        stats: The engine's state behind the step.
        step_seconds: Seconds that each step ran; empty where none did.
        answers: Of the questions that an administrator asked.
        prompt_parts: Logprobs of prompts. All of a prompt's have come when its first token does.
        overheads: Seconds of each step's planning, packing and commit together.
        kv_events: Changes of the prefix cache, in order, where they are wanted.
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
    answers: tuple[AdminAnswer, ...] = ()
    prompt_parts: tuple[PromptPart, ...] = ()
    overheads: tuple[float, ...] = ()
    kv_events: tuple[KVEvents, ...] = ()

    @property
    def over(self) -> set[int]:
        """Attempts that report nothing more."""
        return {end.attempt for end in self.ends if not end.more} if self.ends else set()


def nothing(stats: EngineStats, ends: tuple[End, ...] = ()) -> StepOutputs:
    """Outputs without a token."""
    none = np.empty(0, np.int32)
    return StepOutputs(np.empty(0, np.int64), none, none, none, Logprobs.none(), (), ends, stats)
