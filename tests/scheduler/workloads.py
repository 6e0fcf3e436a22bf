"""Workloads for the scheduler: who comes when and wants what, and what the engine has to serve them with."""

import math
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from cache_manager.page_names import PageNamer, Scope
from cache_manager.policies import POLICIES
from scheduler.request import Adjustments, Controls, Request
from scheduler.settings import QueueLimits, SchedulerSettings
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
    return KVLayout(numbers, kv_heads=1, head_dim=8, element_bytes=2, page_size=page_size, windows=windows)


def make_request(
    attempt: int,
    prompt: int | tuple[int, ...] = 4,
    max_tokens: int = 4,
    stop_ids: tuple[int, ...] = (),
    patience: float | None = None,
    scope: Scope = EVERYBODY,
) -> Request:
    """prompt: token ids, or how many (they are made up from the attempt)."""
    if isinstance(prompt, int):
        prompt = tuple((7 * attempt + 3 * i) % VOCABULARY for i in range(prompt))
    controls = replace(GREEDY, seed=attempt)
    return Request(np.array(prompt, np.int32), max_tokens, stop_ids, controls, patience, scope)


@dataclass(frozen=True)
class Arrival:
    """One attempt. Turns are the engine's: `turn` when it comes, `cancel` when its client leaves.

    emitted: how much of its output an earlier attempt delivered. fault: the position whose computation fails.
    """

    attempt: int
    turn: int
    request: Request
    cancel: int | None = None
    emitted: int = 0
    fault: int | None = None

    @property
    def output(self) -> list[int]:
        return alone(self.request)

    @property
    def longest(self) -> int:
        """Slots that the attempt can come to need."""
        return len(self.request.prompt) + self.request.max_tokens - 1


@dataclass(frozen=True)
class Workload:
    """eager: turns in which the engine collects though it could launch one more step first. resets: turns in which an
    operator has the prefix cache forgotten.
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

    @property
    def namer(self) -> PageNamer | None:
        return PageNamer(SECRET, b"model", self.layout.page_size) if self.prefix_cache else None

    @property
    def cache(self) -> CacheManager:
        """A new one."""
        rows, ahead = self.settings.max_sequences, self.settings.ahead
        return CacheManager(self.layout, self.pages, rows, POLICIES[self.policy], ahead)

    def without_cache(self) -> "Workload":
        return replace(self, prefix_cache=False)

    @property
    def depth(self) -> int:
        return self.settings.steps_in_flight

    @property
    def most_turns(self) -> int:
        """More than any engine needs that makes progress on its oldest sequence in every other turn."""
        horizon = max((max(a.turn, a.cancel or 0) for a in self.arrivals), default=0)
        horizon = max(horizon, *self.resets, 0)
        return horizon + 10 + sum(4 * (a.longest + a.request.max_tokens + 2) for a in self.arrivals)


@st.composite
def prompts(draw, alike: bool = False) -> tuple[int, ...]:
    """Half of them start as others do; alike: all of them."""
    if not alike and draw(st.booleans()):
        return tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=18)))
    known = (STEMS[0] if alike else draw(st.sampled_from(STEMS)))[: draw(st.integers(1, 28))]
    return known + tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3)))


@st.composite
def arrivals(
    draw, attempt: int, cancels: bool, patience: bool, resumed: bool, faults: bool, last_turn: int, alike: bool
):
    prompt = draw(prompts(alike))
    stop_ids = tuple(draw(st.just([]) | st.lists(st.integers(0, VOCABULARY - 1), max_size=2, unique=True)))
    waits = draw(st.none() | st.integers(0, 12).map(float)) if patience else None
    scope = Scope(salt=draw(st.sampled_from(("", "", "pepper"))))
    request = make_request(attempt, prompt, draw(st.integers(1, 24)), stop_ids, waits, scope)
    turn = draw(st.integers(0, last_turn))
    arrival = Arrival(attempt, turn, request)
    if faults and not resumed:
        stuck = draw(st.just([]) | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=2))
        adjustments = Adjustments(not_yet=tuple(stuck))
        request = replace(request, controls=replace(request.controls, adjustments=adjustments))
        arrival = replace(arrival, request=request)
    if cancels:
        arrival = replace(arrival, cancel=draw(st.none() | st.none() | st.integers(turn, turn + 25)))
    if resumed:
        arrival = replace(arrival, emitted=draw(st.integers(0, len(arrival.output) - 1)))
    if faults:
        arrival = replace(arrival, fault=draw(st.none() | st.none() | st.integers(0, arrival.longest - 1)))
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
    patience: bool = False,
    resumed: bool = False,
    faults: bool = False,
    resets: bool = False,
    depths: tuple[int, ...] = (1, 2),
    roomy: bool = False,
    last_turn: int = 6,
    kinds: tuple[str, ...] = ANY,
    alike: bool = False,
):
    """roomy: the pool holds everything at once, so nothing is preempted. Else it may be as small as one request. kinds:
    of layer groups. alike: all prompts start alike.
    """
    drawn = arrivals(0, cancels, patience, resumed, faults, last_turn, alike)
    several = draw(st.lists(drawn, min_size=1, max_size=4) | st.lists(drawn, min_size=4, max_size=8))
    several.sort(key=lambda arrival: arrival.turn)
    named = tuple(
        replace(a, attempt=i, request=replace(a.request, controls=replace(a.request.controls, seed=i)))
        for i, a in enumerate(several, 1)
    )
    rows = draw(st.sampled_from((3, 2, 1, 4, 5)))
    layout = draw(layouts(kinds))
    settings = SchedulerSettings(
        max_batched_tokens=rows + draw(st.integers(0, 12)),
        max_sequences=rows,
        prefill_chunk=draw(st.none() | st.integers(1, 8)),
        steps_in_flight=draw(st.sampled_from(depths)),
    )
    needs = [layout.pages_for(a.longest, settings.ahead) for a in named]
    # One page a row is what admission keeps free for those that run.
    pages = sum(needs) + rows * len(layout.groups) if roomy else max(needs) + draw(st.integers(0, 8))
    queue = PATIENT
    if patience:
        queue = QueueLimits(draw(st.sampled_from((2, 1024))), math.inf, draw(st.sampled_from((6.0, 1e9))))
    eager = frozenset(draw(st.sets(st.integers(0, 40), max_size=6)))
    forgotten = frozenset(draw(st.sets(st.integers(0, 40), max_size=3))) if resets else frozenset()
    policy = draw(st.sampled_from(sorted(POLICIES)))
    return Workload(named, layout, pages, settings, queue, eager, resets=forgotten, policy=policy)
