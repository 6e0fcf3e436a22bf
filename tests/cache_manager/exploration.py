"""Every order of events: a breadth-first walk through all states that a few requests can bring the cache manager into.

The classes that serve are walked, not a model of them: a state is copied, one thing is done to it and to the model
beside it, everything is checked, and the state is kept if none like it was seen. Two states are alike where they differ
in the numbers of pages, rows and steps alone.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cache_manager.block_hash import BlockHasher, Scope
from cache_manager.layout import KVLayout
from cache_manager.prefix import NONE
from tests.cache_manager.device import Prefixes
from tests.cache_manager.driver import CacheDriver
from tests.cache_manager.histories import SequenceHistory
from tests.cache_manager.sequences import SECRET
from tests.cache_manager.windows import NO_WINDOWS, Windows

PAGE_SIZE = 2
NAMER = BlockHasher(SECRET, b"model", PAGE_SIZE)
PREFIXES = Prefixes()
SHARED = Scope()
COMMON: list[object] = []  # that all states share: what does not change, and what they may know of each other


def _common(number: int) -> object:
    return COMMON[number]


def _number(thing: object) -> tuple[Callable[[int], object], tuple[int]]:
    for number, known in enumerate(COMMON):
        if thing is known:
            return _common, (number,)
    COMMON.append(thing)
    return _common, (len(COMMON) - 1,)


class _Pickler(pickle.Pickler):
    dispatch_table = dict.fromkeys((BlockHasher, Prefixes, Scope, KVLayout, Windows), _number)


@dataclass(frozen=True)
class Request:
    """answer: tokens that it draws at most."""

    prompt: Sequence[int]
    answer: int = 1
    scope: Scope = SHARED


@dataclass(frozen=True)
class Bounds:
    """Bounds that make the walk end: how often a sequence may fork, and one may be preempted, all in all; and whether a
    step may compute a part of what a row needs.
    """

    forks: int = 0
    preemptions: int = 0
    chunks: bool = False
    resets: int = 0


@dataclass
class State:
    world: CacheDriver
    left: Bounds


def frozen(world: CacheDriver) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(world)
    return file.getvalue()


Move = tuple[str, int, int]


def explore(requests: Sequence[Request], pages: int, rows: int, bounds: Bounds, windows: Windows = NO_WINDOWS) -> int:
    """Walks all states, and returns how many there are. Raises what the first that breaks a law raises, with the moves
    that led there.
    """
    world = CacheDriver(PAGE_SIZE, pages, rows, hasher=NAMER, prefixes=PREFIXES, windows=windows)
    for request in requests:
        world.submit(request.prompt, request.scope, len(request.prompt) + request.answer)
    seen = {hash(alike(State(world, bounds)))}
    todo: deque[tuple[bytes, Bounds, tuple[Move, ...]]] = deque([(frozen(world), bounds, ())])
    while todo:
        before, left, path = todo.popleft()
        for move in list(moves(State(pickle.loads(before), left))):  # noqa: S301 - our own
            after = State(pickle.loads(before), left)  # noqa: S301
            try:
                apply(after, move)
                key = hash(alike(after))
                if key not in seen:
                    seen.add(key)
                    check(after.world)
                    todo.append((frozen(after.world), after.left, (*path, move)))
            except Exception as error:
                error.add_note(f"after {[*path, move]}")
                raise
    return len(seen)


def check(world: CacheDriver) -> None:
    world.check()
    if not world.running() and not world.flight and not world.waiting:
        assert world.manager.pool.free == world.manager.pool.total, "pages were lost"


def moves(state: State) -> Iterator[Move]:
    """All that may happen next: kind, row or place in the queue, count."""
    world, left = state.world, state.left
    free = world.rows.count(None)
    for i in range(len(world.queue) if free else 0):
        yield "admit", i, 0
        yield "hurry", i, 0
    needs = {row: need for row in world.running() if (need := world.need(row)) > 0}
    if len(world.flight) < 2:
        if len(needs) > 1:
            yield "all", 0, 0
        for row, need in needs.items():
            yield "step", row, need
            if need > 1 and left.chunks:
                yield "step", row, 1
    if world.flight:
        yield "commit", 0, 0
    for row in world.running():
        if left.forks and free:
            yield "fork", row, 0
        yield "finish", row, 0
        if left.preemptions:
            yield "preempt", row, 0
    if left.resets:
        yield "reset", 0, 0


def apply(state: State, move: Move) -> None:
    world, left = state.world, state.left
    kind, which, count = move
    if kind in ("admit", "hurry"):
        world.admit(world.queue[which], wait=kind == "admit")
    elif kind == "all":
        world.launch([(row, world.need(row)) for row in world.running()])
    elif kind == "step":
        world.launch([(which, count)])
    elif kind == "commit":
        world.commit()
    elif kind == "finish":
        world.release(which)
    elif kind == "fork":
        world.fork(which, draws=1)
        state.left = Bounds(left.forks - 1, left.preemptions, left.chunks, left.resets)
    elif kind == "preempt":
        world.release(which, again=True)
        state.left = Bounds(left.forks, left.preemptions - 1, left.chunks, left.resets)
    else:
        world.reset()
        state.left = Bounds(left.forks, left.preemptions, left.chunks, left.resets - 1)


def alike(state: State) -> tuple[object, ...]:
    """Equal for states that differ in the numbers of pages, rows, steps and nodes alone."""
    world, manager = state.world, state.world.manager
    index, policy = manager.prefix.index, manager.prefix.policy
    labels: dict[int, int] = {}

    def label(pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(page if page == NONE else labels.setdefault(page, len(labels)) for page in pages)

    def of(story: SequenceHistory) -> tuple[object, ...]:
        return story.attempt, tuple(story.tokens), story.known

    by_attempt = sorted((world.story(row).attempt, row) for row in world.running())
    place = {row: i for i, (_, row) in enumerate(by_attempt)}
    serials = {world.story(row).serial: i for row, i in place.items()}
    rows = []
    for _, row in by_attempt:
        story = world.story(row)
        waits = max(story.last_step, world.retired) - world.retired
        tables = [(table.first, label(table.pages)) for table in (*story.table, *world.device.tables[row])]
        names = 0 if story.chain is None else len(story.chain.hashes)
        books = (names, int(manager.published.count[row]), bool(manager.forked[row]), story.silent, row in world.leaves)
        computed = story.computed if world.windows.any else 0  # else it does not matter
        rows.append((of(story), computed, story.scheduled, waits, tuple(tables), books))
    waiting = tuple((step - world.retired, label(pages)) for step, pages in sorted(world.waiting))
    flight = tuple(
        (
            tuple((serials.get(serial, -1), end) for _, serial, end in flown.work),
            tuple(serials.get(serial, -1) for serial in flown.draws),
        )
        for flown in world.flight
    )
    paths = {node: tuple(map(index.content, index.path(node))) for node in index.all()}
    used = {policy.last_used(node) for node in paths}
    rank = {use: i for i, use in enumerate(sorted(used))}
    nodes = tuple(
        (path, label(index.pages[:, node].tolist()), rank[policy.last_used(node)], policy.is_offered(node))
        for node, path in sorted(paths.items(), key=lambda item: item[1])
    )
    slid = label(list(manager.prefix.slid))
    computing = tuple(sorted((name, place[row]) for name, row in manager.published.frontiers.row_of.items()))
    freed = tuple(sorted(label([p for p in manager.pool.changes.freed_pages().tolist() if p in labels])))
    copies = tuple(map(tuple, (label(pair) for pair in manager.pool.changes.copies().tolist())))
    queue = tuple(map(of, world.queue))
    return tuple(rows), queue, waiting, flight, nodes, slid, computing, freed, copies, state.left
