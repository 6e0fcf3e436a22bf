"""Sequences that come, grow, fork and leave, in the cache manager and in a plain model of it.

Each method does one thing to both and checks what was answered. A break of a law is an AssertionError, or a LedgerError
where the ledger sees it first. The model decides nothing by the manager's books: it counts holders itself, and knows by
the device's slots what every page is good for.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from cache_manager.matching import NO_MATCH, Awaited, Match
from cache_manager.page_names import PageChain, PageNamer, Scope
from cache_manager.prefix import NONE
from tests.cache_manager.device import Device, Prefixes

SECRET = b"a secret of tests"


def table(manager: CacheManager, row: int) -> list[list[int]]:
    """The row's pages by group."""
    return [manager.tables.of(group, row).tolist() for group in range(len(manager.layout.groups))]


def make_layout(page_size: int, groups: int = 1) -> KVLayout:
    """Of a model with two layers a group; the sizes of tensors do not matter here."""
    numbers = tuple((2 * g, 2 * g + 1) for g in range(groups))
    return KVLayout(numbers, kv_heads=1, head_dim=8, element_bytes=2, page_size=page_size)


def make_manager(page_size: int, pages: int, rows: int, groups: int = 1) -> CacheManager:
    return CacheManager(make_layout(page_size, groups), pages, rows)


@dataclass
class Story:
    """A sequence. tokens: all, drawn ones in flight included; known: how many of them the host knows. scheduled:
    computed or being computed. last_step: that touches its pages. table: [groups] pages. silent: publishes no more.
    forked: shares pages since it last grew. serial: another one each time that it is given a row.
    """

    attempt: int
    tokens: list[int]
    scope: Scope
    goal: int
    chain: PageChain | None
    known: int = 0
    scheduled: int = 0
    last_step: int = -1
    numbers: list[int] = field(default_factory=list)
    table: list[list[int]] = field(default_factory=list)
    silent: bool = False
    forked: bool = False
    serial: int = 0

    @property
    def need(self) -> int:
        """Tokens to compute; the last one of all is never computed."""
        return min(len(self.tokens), self.goal - 1) - self.scheduled


@dataclass
class Flown:
    """A step in flight. work: row, serial and the end of what it computes; draws: serials."""

    step: int
    work: list[tuple[int, int, int]]
    draws: list[int]
    touched: set[int]
    written: set[int]


class Sequences:
    """`collisions`: two contents may have one name, so that what was published cannot always be found."""

    def __init__(
        self,
        page_size: int,
        pages: int,
        rows: int,
        groups: int = 1,
        namer: PageNamer | None = None,
        prefixes: Prefixes | None = None,
        collisions: bool = False,
        make_policy: PolicyMaker = LeastRecentlyUsed,
    ) -> None:
        self.size, self.groups, self.collisions = page_size, groups, collisions
        self.manager = CacheManager(make_layout(page_size, groups), pages, rows, make_policy)
        self.namer = namer or PageNamer(SECRET, b"model", page_size)
        self.prefixes = prefixes or Prefixes()
        self.device = Device(groups, pages, page_size, rows)
        self.rows: list[Story | None] = [None] * rows
        self.queue: list[Story] = []
        self.counts = [0] * pages  # of holders
        self.held = 0
        self.waiting: list[tuple[int, list[int]]] = []
        self.flight: deque[Flown] = deque()
        self.leaves: list[int] = []
        self.sources: dict[int, int] = {}  # how often each page is copied from, in the step that is planned
        self.targets: dict[int, int] = {}  # what the next plan copies: from which page, by the page that is copied to
        self.steps, self.retired, self.attempts, self.serials = 0, -1, 0, 0
        self.suspects: set[int] = set()
        self.distrusted: set[int] = set()
        self.awaited: set[Awaited] = set()
        self.manager.begin(0.0, 0)

    # The model's books

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.held += not self.counts[page]
            self.counts[page] += 1

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                self.held -= 1
                self.targets.pop(page, None)

    def _let_go(self, pages: list[int], after_step: int | None) -> None:
        if after_step is None:
            self._drop(pages)
        else:
            self.waiting.append((after_step, pages))

    def _fresh(self, pages: list[int]) -> None:
        """The manager has just given these out."""
        for page in pages:
            assert not self.counts[page], f"page {page} was given out while it is held"
            assert page not in self.suspects, f"page {page} was set aside and given out again"
            self.distrusted.discard(page)
        for flown in self.flight:
            assert not flown.touched.intersection(pages), f"pages {pages}: a step in flight still touches one"
        self._hold(pages)

    def _table(self, row: int) -> list[list[int]]:
        return table(self.manager, row)

    def _balance(self) -> None:
        """Free is what nobody holds: cached pages cost nothing."""
        aside = sum(not self.counts[page] for page in self.suspects)
        due = self.manager.total - self.held - aside
        assert self.manager.free == due, f"{self.manager.free} pages can be had, {due} are held by nobody"

    def after(self, story: Story) -> int | None:
        return story.last_step if story.last_step > self.retired else None

    def copied(self, row: int) -> bool:
        """Whether a page of this row waits for the copy that the next plan tells of."""
        return any(not self.targets.keys().isdisjoint(table) for table in self.story(row).table)

    def running(self) -> list[int]:
        return [row for row, story in enumerate(self.rows) if story is not None]

    def story(self, row: int) -> Story:
        story = self.rows[row]
        assert story is not None, f"row {row} is free"
        return story

    def _enter(self, row: int, story: Story, table: list[list[int]]) -> None:
        self.serials += 1
        story.serial, story.last_step, story.table = self.serials, -1, table
        self.rows[row] = story
        assert self._table(row) == table, f"row {row} holds {self._table(row)}, must hold {table}"

    # Sequences come and go

    def submit(self, tokens: Sequence[int], scope: Scope, goal: int, named: bool = True) -> Story:
        """A sequence in the queue. named: with the prefix cache."""
        self.attempts += 1
        chain = self.namer.chain(scope) if named else None
        story = Story(self.attempts, list(tokens), scope, goal, chain, known=len(tokens))
        self.prefixes.extend(story.numbers, story.tokens, scope, self.size)
        self.queue.append(story)
        return story

    def match(self, story: Story) -> Match:
        """What is cached of a queued sequence, after looking through it."""
        chain, most = story.chain, story.known - 1
        if chain is None:
            return NO_MATCH
        done = len(chain.names) * self.size
        if story.known - done >= self.size:
            chain.extend(np.array(story.tokens[done:], np.int32))
        match = self.manager.match(chain, most)
        tokens, pages = match.tokens, self.manager.prefix.index.pages[:, match.nodes].tolist()
        assert tokens == len(match.nodes) * self.size
        assert tokens <= most, f"{tokens} tokens were matched, at most {most} were asked for"
        assert not tokens or tokens >= story.scope.whole, "a span that hits whole or not at all was hit in part"
        for group, table in enumerate(pages):
            self.device.read(table, group, story.numbers, tokens)
            assert not self.suspects.intersection(table), "a page that was set aside is handed out"
            assert not self.distrusted.intersection(table), "a page that is not trusted is handed out"
            for flown in self.flight:
                assert not flown.written.intersection(table), "a page is handed out while a step writes it"
        if match.awaited is not None:
            self._check_awaited(match.awaited, chain, len(match.nodes) if tokens else 0)
        return match

    def longest(self, story: Story) -> int:
        """Tokens of the longest prefix that is published, by looking at every page."""
        full, node_of = self.device.content(), self.manager.prefix.index.node_of
        end = 0
        while end + self.size <= story.known - 1:
            pages = full.get(story.numbers[end + self.size - 1], ())
            if not any(self.device.group[page] == 0 and node_of[page] != NONE for page in pages):
                break
            end += self.size
        return end if end >= story.scope.whole else 0

    def _check_awaited(self, awaited: Awaited, chain: PageChain, known: int) -> None:
        """Somebody computes it, and it is the prompt's."""
        story, end = self.rows[awaited.row], awaited.index + 1
        assert story is not None, "nobody computes what a request waits for"
        assert story.attempt == awaited.owner, "another one computes what a request waits for"
        assert not story.silent, "what is waited for will not be published"
        if not self.collisions:
            assert self.manager.is_computing(awaited), "it was computed, and is waited for"
            assert known < end, "what is waited for is here"
            assert story.chain is not None
            assert story.chain.names[:end] == chain.names[:end], "a request waits for what it does not need"
        self.awaited.add(awaited)

    def admit(self, story: Story, wait: bool = True, whole: bool = True) -> bool:
        """Starts a queued sequence, if there is room. wait: not where another one computes its next page at the moment.
        whole: with pages for all of it, otherwise with what it has matched.
        """
        if None not in self.rows:
            return False
        match = self.match(story)
        if match.awaited is not None and wait:
            return False
        pages = self.manager.prefix.index.pages[:, match.nodes]
        needed = self.manager.needed(match, story.known)
        reused = sum(self.counts[page] > 0 for page in pages.reshape(-1).tolist())
        assert needed == -(-story.known // self.size) * self.groups - reused, "what a request needs is miscounted"
        if needed > self.manager.free:
            return False
        row = self.rows.index(None)
        self.manager.open(row, story.attempt, story.chain, match)
        self.queue.remove(story)
        story.scheduled, story.silent, story.forked = match.tokens, story.chain is None, False
        self._enter(row, story, pages.tolist())
        self._hold(pages.reshape(-1).tolist())
        if whole:
            assert self.grow(row, story.known), "pages that are needed were free and not given"
        self._balance()
        return True

    def grow(self, row: int, end: int) -> bool:
        story, size = self.story(row), self.size
        table, start = story.table, story.scheduled
        missing = max(0, -(-end // size) - len(table[0]))
        shared = [
            index
            for index in range(start // size, len(table[0]) if story.forked else 0)
            if self.counts[table[0][index]] - self.sources.get(table[0][index], 0) > 1
        ]
        enough = (missing + len(shared)) * self.groups <= self.manager.free
        grown = self.manager.grow(row, start, end)
        assert grown == enough, f"grow said {grown} where {self.manager.free} pages can be had"
        now = self._table(row)
        if not grown:
            assert now == table, "a grow that failed changed a table"
            self._balance()
            return False
        expected = [index in shared for index in range(len(table[0]))]
        for group in range(self.groups):
            assert len(now[group]) == len(table[group]) + missing
            changed = [a != b for a, b in zip(table[group], now[group], strict=False)]
            assert changed == expected, f"row {row} shares {shared} of {table}, and after growing has {now}"
            for index in shared:
                self._give_up(table[group][index], now[group][index], start > index * size)
            self._fresh([now[group][index] for index in shared] + now[group][len(table[group]) :])
        story.table, story.forked = now, False
        self._balance()
        return True

    def _give_up(self, page: int, own: int, written: bool) -> None:
        """A row has a page of its own instead of this one, and a copy if it had been written to."""
        if written:
            self.targets[own] = self.targets.get(page, page)
            self.sources[page] = self.sources.get(page, 0) + 1
            self.waiting.append((self.steps, [page]))
        else:
            self._drop([page])

    def grow_by_page(self, rows: list[int]) -> bool:
        enough = len(rows) * self.groups <= self.manager.free
        grown = self.manager.grow_by_page(np.array(rows, np.int32))
        assert grown == enough, f"grow_by_page said {grown}"
        for row in rows:
            story, now = self.story(row), self._table(row)
            if grown:
                assert [table[:-1] for table in now] == story.table
                self._fresh([table[-1] for table in now])
                story.table = now
            else:
                assert now == story.table, "a grow that failed changed a table"
        self._balance()
        return grown

    def fork(self, parent: int, draws: int) -> bool:
        """A twin of a running sequence, whose token in flight, if there is one, is another one."""
        if None not in self.rows:
            return False
        of, row = self.story(parent), self.rows.index(None)
        kept = max(of.scheduled, of.known)
        self.attempts += 1
        tokens = of.tokens[:kept] + [draws] * (len(of.tokens) - kept)
        story = Story(self.attempts, tokens, of.scope, of.goal, None, of.known, of.scheduled)
        story.numbers, story.silent = of.numbers[:kept], of.silent
        self.prefixes.extend(story.numbers, story.tokens, story.scope, self.size)
        self.manager.fork(parent, row, story.attempt)
        # The manager has given the twin a copy of the chain; a scheduler keeps one with the sequence likewise.
        story.chain = self.manager._chains[row]
        assert (story.chain is None) == (of.chain is None)
        assert story.chain is None or story.chain is not of.chain, "a fork must not extend its parent's names"
        self._enter(row, story, [table.copy() for table in of.table])
        self._hold(page for table in story.table for page in table)
        of.forked = story.forked = True
        for flown in self.flight:
            flown.draws += [story.serial] * flown.draws.count(of.serial)
        self._balance()
        return True

    def release(self, row: int, again: bool = False) -> None:
        """The sequence leaves; again: it is queued, with what is known of it."""
        story = self.story(row)
        self.manager.release(row, self.after(story))
        self._let_go([page for table in story.table for page in table], self.after(story))
        self.rows[row] = None
        self.leaves.append(row)
        story.table = []
        if again:
            del story.tokens[story.known :], story.numbers[story.known :]
            self.queue.append(story)
        self._balance()
