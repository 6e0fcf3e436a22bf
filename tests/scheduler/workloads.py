"""Workloads for the scheduler: who comes when and wants what, and what the engine has to serve them with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from cache_manager.block_hash import BlockHash, BlockHasher, Scope
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.transfers import TransferredPage
from scheduler.controls import Controls, LogitsParams
from scheduler.events import Abort, AdminQuery, AdminQuestion, Event, Submit
from scheduler.parameters import Beam
from scheduler.request import Request
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.executor import VOCABULARY, alone, next_token

GREEDY = Controls(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
PATIENT = QueueLimits(pools_of_tokens=math.inf, wait=1e9)
SECRET = bytes(range(32))
EVERYBODY = Scope()


def stem(head: list[int], length: int) -> tuple[int, ...]:
    """A conversation: the head, and what the model goes on with."""
    tokens = list(head)
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tuple(tokens)


# Three that start alike and one that does not.
STEMS = (
    stem([1, 2, 3, 4, 5], 30),
    stem([1, 2, 3, 4, 5, 6, 7, 8, 9], 30),
    stem([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4], 30),
    stem([9], 30),
)


def make_layout(page_size: int, groups: int = 1, windows: tuple[int | None, ...] = ()) -> KVLayout:
    """windows: by group, of which there are as many; () for groups without."""
    numbers = tuple((g,) for g in range(len(windows) or groups))
    return KVLayout.uniform(numbers, kv_heads=1, head_dim=8, element_bytes=2, page_size=page_size, windows=windows)


def make_request(
    attempt: int,
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 4,
    stop_ids: tuple[int, ...] = (),
    queue_timeout: float | None = None,
    scope: Scope = EVERYBODY,
) -> Request:
    """prompt: token ids, or how many (they are made up from the attempt)."""
    if isinstance(prompt, int):
        prompt = tuple((7 * attempt + 3 * i) % VOCABULARY for i in range(prompt))
    controls = replace(GREEDY, seed=attempt)
    return Request(np.array(prompt, np.int32), max_tokens, stop_ids, controls, queue_timeout, scope)


@dataclass(frozen=True)
class Arrival:
    """One attempt. Turns are the engine's: `turn` when it comes, `cancel` when its client leaves.

    dropped: turns in which it wants no more of one of the sequences, by index.

    emitted: by sequence, how much of its output an earlier attempt delivered, None for one that has ended; () for none
    of any. fault: the position whose computation fails, in whatever sequence. transferred: pages that come with it.
    """

    attempt: int
    turn: int
    request: Request
    cancel: int | None = None
    emitted: tuple[int | None, ...] = ()
    fault: int | None = None
    dropped: tuple[tuple[int, int], ...] = ()
    transferred: Mapping[BlockHash, TransferredPage] = field(default_factory=dict)

    @property
    def output(self) -> list[int]:
        """Output of its first sequence."""
        return alone(self.request)

    @property
    def open(self) -> list[int]:
        """Sequences that are to be told."""
        return [index for index in range(self.request.count) if not self.emitted or self.emitted[index] is not None]

    def known(self, index: int) -> list[int]:
        """Output of a sequence that an earlier attempt delivered."""
        if not self.emitted or not self.emitted[index]:
            return []
        return alone(self.request, index)[: self.emitted[index]]

    @property
    def submit(self) -> Submit:
        known = tuple(None if n is None else tuple(self.known(index)) for index, n in enumerate(self.emitted))
        return Submit(self.attempt, self.request, known, transferred=self.transferred)

    @property
    def heads(self) -> list[int]:
        """Sequences that come into the queue: all that have output, and of the others one."""
        known = [index for index in self.open if self.known(index)]
        return sorted([*known, *[index for index in self.open if index not in known][:1]])

    @property
    def rows(self) -> int:
        """Rows that it can have at once."""
        return self.request.count if self.request.beam is None else self.request.beam.width

    @property
    def last_turn(self) -> int:
        """In which something is heard of it."""
        return max([self.turn, self.cancel or 0, *(turn for turn, _ in self.dropped)])

    @property
    def turns(self) -> int:
        """More than it needs where in every other one some progress is made on it. A search may have to compute all its
        hypotheses again for every token.
        """
        rounds = 1 if self.request.beam is None else self.request.max_tokens
        return 4 * self.rows * rounds * (self.longest + self.request.max_tokens + 2)

    @property
    def longest(self) -> int:
        """Slots that the attempt can come to need."""
        return len(self.request.prompt) + self.request.max_tokens - 1


@dataclass(frozen=True)
class Workload:
    """eager: turns in which the engine collects though it could launch one more step first. resets: turns in which an
    operator has the prefix cache forgotten. amid: some of what comes in odd turns comes while a step runs.
    """

    arrivals: tuple[Arrival, ...]
    layout: KVLayout
    pages: int
    settings: SchedulerSettings
    queue: QueueLimits = PATIENT
    eager: frozenset[int] = frozenset()
    prefix_cache: bool = True
    resets: frozenset[int] = frozenset()
    policy: str = "lru"
    amid: bool = False

    @property
    def hasher(self) -> BlockHasher | None:
        return BlockHasher(SECRET, b"model", self.layout.page_size) if self.prefix_cache else None

    @property
    def cache(self) -> CacheManager:
        """A new one."""
        rows, ahead = self.settings.max_sequences, self.settings.ahead
        return CacheManager(self.layout, self.pages, rows, POLICIES[self.policy], ahead)

    def without_cache(self) -> "Workload":
        return replace(self, prefix_cache=False)

    @property
    def depth(self) -> int:
        return self.settings.depth

    def events(self, turn: int) -> list[Event]:
        """Returns what comes from outside in a turn."""
        come = self.arrivals
        events: list[Event] = [a.submit for a in come if a.turn == turn]
        events += [Abort(a.attempt, index) for a in come for when, index in a.dropped if when == turn]
        events += [Abort(a.attempt) for a in come if a.cancel == turn]
        return events + ([AdminQuery(turn, AdminQuestion.RESET_PREFIX_CACHE)] if turn in self.resets else [])

    def collects(self, turn: int, plan: StepPlan | None, in_flight: int) -> bool:
        """Returns whether the oldest step is collected in a turn: no plan came, the engine is full, or it is eager."""
        return bool(in_flight) and (plan is None or in_flight >= self.depth or turn in self.eager)

    @property
    def most_turns(self) -> int:
        """More than any engine needs that makes progress on its oldest sequence in every other turn."""
        return self.last_turn + 10 + sum(a.turns for a in self.arrivals)

    @property
    def last_turn(self) -> int:
        """In which something comes from outside."""
        return max([0, *(a.last_turn for a in self.arrivals), *self.resets])


@st.composite
def prompts(draw, alike: bool = False) -> tuple[int, ...]:
    """Half of them start as others do; alike: all of them."""
    if not alike and draw(st.booleans()):
        return tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=18)))
    known = (STEMS[0] if alike else draw(st.sampled_from(STEMS)))[: draw(st.integers(1, 28))]
    return known + tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3)))


@st.composite
def arrivals(
    draw,
    attempt: int,
    cancels: bool,
    queue_timeout: bool,
    resumed: bool,
    faults: bool,
    last_turn: int,
    alike: bool,
    several: bool,
):
    prompt = draw(prompts(alike))
    stop_ids = tuple(draw(st.just([]) | st.lists(st.integers(0, VOCABULARY - 1), max_size=2, unique=True)))
    waits = draw(st.none() | st.integers(0, 12).map(float)) if queue_timeout else None
    scope = Scope(salt=draw(st.sampled_from(("", "", "pepper"))))
    request = make_request(attempt, prompt, draw(st.integers(1, 24)), stop_ids, waits, scope)
    turn = draw(st.integers(0, last_turn))
    arrival = Arrival(attempt, turn, request)
    if several:
        arrival = draw(families(arrival, cancels, resumed))
    request = arrival.request
    if faults and not resumed and request.beam is None:
        stuck = draw(st.just([]) | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=2))
        adjustments = LogitsParams(not_yet=tuple(stuck))
        request = replace(request, controls=replace(request.controls, logits_params=adjustments))
        arrival = replace(arrival, request=request)
    if cancels:
        arrival = replace(arrival, cancel=draw(st.none() | st.none() | st.integers(turn, turn + 25)))
    if resumed and arrival.rows == 1 and request.beam is None:
        arrival = replace(arrival, emitted=(draw(st.integers(0, len(arrival.output) - 1)),))
    if faults:
        arrival = replace(arrival, fault=draw(st.none() | st.none() | st.integers(0, arrival.longest - 1)))
    return arrival


@st.composite
def families(draw, arrival: Arrival, cancels: bool, resumed: bool) -> Arrival:
    """An arrival of one sequence as one of several, or as a search, or as it is."""
    request, kind = arrival.request, draw(st.sampled_from(("several", "search", "search", "one")))
    most = min(request.max_tokens, 9)  # rounds of a search, and what several have, cost a test time
    if kind == "search":
        beam = Beam(draw(st.integers(1, 4)), draw(st.sampled_from((1.0, 0.0, 2.0, -0.5))))
        stops = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=6, unique=True)))
        count = draw(st.integers(1, beam.width))
        controls = replace(request.controls, top_logprobs=draw(st.sampled_from((2, 12, 0, -1))))
        search = replace(request, beam=beam, count=count, max_tokens=most, stop_ids=stops, controls=controls)
        return replace(arrival, request=search)
    if kind == "one":
        return arrival
    request = replace(request, count=draw(st.integers(2, 4)), max_tokens=most)
    arrival = replace(arrival, request=request)
    if resumed:
        known = st.none() | st.just(0) | st.integers(0, most)
        emitted = draw(st.tuples(*[known] * request.count))
        lengths = [len(alone(request, index)) for index in range(request.count)]
        at_most = [None if n is None else min(n, length) for n, length in zip(emitted, lengths, strict=True)]
        arrival = replace(arrival, emitted=tuple(at_most))
    if cancels:
        turns = st.integers(arrival.turn, arrival.turn + 20)
        dropped = draw(st.lists(st.tuples(turns, st.integers(0, request.count)), max_size=2))
        arrival = replace(arrival, dropped=tuple(dropped))
    return arrival


WINDOWS = ("hybrid", "pure")
ANY = ("full", "full", *WINDOWS)


@st.composite
def layouts(draw, kinds: tuple[str, ...] = ANY) -> KVLayout:
    """kinds: "full" for groups that see all, "pure" for groups with windows, "hybrid" for one of each."""
    size = draw(st.sampled_from((3, 1, 2, 7, 16)))
    window = st.integers(1, min(3 * size + 2, 20))  # from one token to more than three pages
    kind = draw(st.sampled_from(kinds))
    if kind == "full":
        return make_layout(size, draw(st.integers(1, 2)))
    if kind == "pure":
        return make_layout(size, windows=tuple(draw(st.lists(window, min_size=1, max_size=2))))
    return make_layout(size, windows=tuple(draw(st.permutations([None, draw(window)]))))


@st.composite
def workloads(
    draw,
    cancels: bool = False,
    queue_timeout: bool = False,
    resumed: bool = False,
    faults: bool = False,
    resets: bool = False,
    depths: tuple[int, ...] = (1, 2),
    roomy: bool = False,
    last_turn: int = 6,
    kinds: tuple[str, ...] = ANY,
    alike: bool = False,
    several: bool = False,
):
    """roomy: the pool, and rows of several, hold everything at once, so nothing is preempted. Else it may be as small
    as one sequence. kinds: of layer groups. alike: all prompts start alike. several: some have several sequences, or
    are searches.
    """
    drawn = arrivals(0, cancels, queue_timeout, resumed, faults, last_turn, alike, several)
    those = st.lists(drawn, min_size=1, max_size=3 if several else 4)
    come = draw(those if several else those | st.lists(drawn, min_size=4, max_size=8))
    come.sort(key=lambda arrival: arrival.turn)
    named = tuple(
        replace(a, attempt=i, request=replace(a.request, controls=replace(a.request.controls, seed=i)))
        for i, a in enumerate(come, 1)
    )
    rows = draw(st.sampled_from((3, 2, 1, 4, 5)))
    if several:
        most = sum if roomy else max
        rows = most([rows, *(a.rows for a in named)]) + draw(st.sampled_from((0, 0, 1, 2)))
    layout = draw(layouts(kinds))
    settings = SchedulerSettings(
        max_batched_tokens=rows + draw(st.integers(0, 12)),
        max_sequences=rows,
        prefill_chunk=draw(st.none() | st.integers(1, 8)),
        steps_in_flight=draw(st.sampled_from(depths)),
        backfill_time=draw(st.sampled_from((0.0, 0.0, 3.0, 1000.0))),
    )
    needs = [layout.pages_for(a.longest, settings.ahead) for a in named]
    # One page a row is what admission keeps free for those that run.
    everything = sum(a.rows * (need + len(layout.groups)) for a, need in zip(named, needs, strict=True))
    pages = everything + rows * len(layout.groups) if roomy else max(needs) + draw(st.integers(0, 8))
    queue = PATIENT
    if queue_timeout:
        queue = QueueLimits(draw(st.sampled_from((2, 1024))), math.inf, draw(st.sampled_from((6.0, 1e9))))
    eager = frozenset(draw(st.sets(st.integers(0, 40), max_size=6)))
    forgotten = frozenset(draw(st.sets(st.integers(0, 40), max_size=3))) if resets else frozenset()
    policy = draw(st.sampled_from(sorted(POLICIES)))
    amid = draw(st.booleans())
    return Workload(named, layout, pages, settings, queue, eager, resets=forgotten, policy=policy, amid=amid)
