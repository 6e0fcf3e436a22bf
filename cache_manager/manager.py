"""The one door to the page pool: opens, grows, forks and releases the page tables of batch rows, and keeps the books.

A page's count is page tables + steps in flight. A row that leaves while a step that can touch its pages is in flight
hands them to that step; they are free, or cached, once it retires. So a late write of a dead sequence never lands in a
living one's page.

Full pages are published under a name once their KV has been computed, and other sequences go on from them (Kwon et al.,
PagedAttention, SOSP 2023; naming as in vLLM). Where two rows have computed the same page, the second takes over the
first one's: a content is named once, and who holds a page holds all before it. A row that writes into a page which it
shares after a fork gets a copy of that one page first.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, PageAllocator, Pages
from cache_manager.cached import Cause, PolicyMaker, PrefixCache
from cache_manager.changes import PageChanges
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.layout import KVLayout
from cache_manager.page_names import Name, PageChain
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.tables import PageTables

CLOSED = 2**30  # in `named`: nothing more of this row is published


@dataclass(frozen=True, slots=True)
class Awaited:
    """A page that is being computed: of this index and name, by this row, which has it for this owner."""

    row: int
    owner: int
    index: int
    name: Name


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What the prefix cache has of a prompt. tokens: a multiple of the page size. nodes: of the prefix index.

    awaited: where a row is computing what comes next, the last page that it has in common with the prompt.
    """

    tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    awaited: Awaited | None = None


NO_MATCH = Match()


class CacheManager:
    """Pages for up to `rows` running sequences from a pool of `pages`.

    returning: pages that lose a holder as steps in flight retire. in_flight: these pages, by the step they wait for.
    named: [rows] pages of each row that are published. owners: [rows] the attempt that each row is held for. forked:
    [rows] whether it may share pages that are still written to. quarantined: pages that `quarantine` has dealt with.
    """

    def __init__(self, layout: KVLayout, pages: int, rows: int, make_policy: PolicyMaker = LeastRecentlyUsed) -> None:
        self.layout = layout
        self.allocator = PageAllocator(pages)
        self.tables = PageTables(len(layout.groups), rows)
        self.prefix = PrefixCache(PrefixIndex(len(layout.groups), pages), make_policy(pages), self.allocator.counts)
        self.returning = 0
        self.named = np.full(rows, CLOSED, np.int32)
        self.owners = np.full(rows, -1, np.int64)
        self.in_flight: dict[int, list[Pages]] = {}
        self._now, self._step = 0.0, 0
        self._chains: list[PageChain | None] = [None] * rows
        self.quarantined: set[int] = set()
        self._computing: dict[Name, int] = {}  # the row that computes the page which will have this name next
        self.forked = np.zeros(rows, np.bool_)
        self._sources: dict[int, int] = {}  # how often each page is copied from in the step that is being planned
        self._changes = PageChanges()

    @property
    def total(self) -> int:
        return self.allocator.size

    @property
    def free(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody holds."""
        return self.allocator.free + self.prefix.cached

    def begin(self, now: float, step: int) -> None:
        """From here on the time is `now`, in seconds on any clock, and `step` is planned."""
        self._now, self._step = now, step

    def take_changes(self) -> PageChanges:
        """All that the plan of the step must tell its executor."""
        changes, self._changes = self._changes, PageChanges()
        self._sources.clear()
        return changes

    # Sequences

    def match(self, chain: PageChain, most: int) -> Match:
        """The longest published prefix of a sequence, of at most `most` tokens; chain: names of its pages.

        A prefix that ends inside a span whose tokens see each other in both directions is none.
        """
        size = self.layout.page_size
        most = min(most // size, len(chain.names))
        nodes = self.prefix.index.find(chain, most)
        awaited = self._awaited(chain, len(nodes), most)
        if len(nodes) * size < chain.scope.whole:
            nodes = []
        return Match(len(nodes) * size, nodes, awaited)

    def _awaited(self, chain: PageChain, index: int, most: int) -> Awaited | None:
        row = self._computing.get(chain.names[index]) if index < most else None
        other = None if row is None else self._chains[row]
        if row is None or other is None:
            return None
        # Names are chained: two chains are equal up to some index, and nowhere after it.
        last = bisect_left(
            range(min(most, len(other.names))), True, lo=index + 1, key=lambda i: _differ(chain, other, i)
        )
        return Awaited(row, int(self.owners[row]), last - 1, chain.names[last - 1])

    def is_computing(self, awaited: Awaited) -> bool:
        """Whether that page is still to come, from that row or from another that was quicker."""
        same = self.owners[awaited.row] == awaited.owner and self.named[awaited.row] <= awaited.index
        return bool(same) and awaited.name not in self.prefix.index

    def needed(self, match: Match, tokens: int) -> int:
        """Pages that a sequence of so many tokens which goes on from `match` takes out of `free`."""
        held = np.count_nonzero(self.allocator.counts[self.prefix.index.pages[:, match.nodes]])
        return self.layout.pages_for(tokens) - int(held)

    def open(self, row: int, owner: int = -1, chain: PageChain | None = None, match: Match = NO_MATCH) -> None:
        """Starts a table with the pages of a match of this moment. owner: the attempt, for the ledger. chain: None
        publishes nothing. Raises LedgerError where the row still holds pages.
        """
        if self.tables.held[row]:
            raise LedgerError(f"row {row} is opened while it holds {self.tables.held[row]} pages")
        self.owners[row], self._chains[row], self.forked[row] = owner, chain, False
        self.named[row] = CLOSED if chain is None else len(match.nodes)
        if match.nodes:
            self.prefix.revive(match.nodes)
            pages = self.prefix.index.pages[:, match.nodes]
            self.allocator.hold(pages.reshape(-1))
            self.tables.append(row, pages)
            self._changes.grew(row, 0, pages)
        self._set_frontier(row, len(match.nodes))

    def covers(self, rows: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each row, whether it can write positions below its end, from its last page on, without `grow`."""
        return (self.tables.held[rows] * self.layout.page_size >= ends) & ~self.forked[rows]

    def grow(self, row: int, start: int, end: int) -> bool:
        """Gives the row slots of its own for positions start .. end - 1. False, and nothing changed, where pages are
        lacking.
        """
        size, groups = self.layout.page_size, len(self.layout.groups)
        held = int(self.tables.held[row])
        missing = max(0, -(-end // size) - held)
        shared = self._shared_from(row, start // size) if self.forked[row] else []
        taken = self._take((missing + len(shared)) * groups)
        if taken is None:
            return False
        pages = taken.reshape(groups, missing + len(shared))
        if missing:
            self.tables.append(row, pages[:, :missing])
            self._changes.grew(row, held, pages[:, :missing])
        for i, index in enumerate(shared):
            self._unshare(row, index, pages[:, missing + i], start > index * size)
        self.forked[row] = False
        return True

    def grow_by_page(self, rows: NDArray[np.int32]) -> bool:
        """One more page for each of these distinct rows, none of which shares its last one. False, and nothing changed,
        where pages are lacking.
        """
        groups, n = len(self.layout.groups), len(rows)
        taken = self._take(n * groups)
        if taken is None:
            return False
        pages = taken.reshape(groups, n)
        indices = self.tables.held[rows]
        self.tables.append_each(rows, pages)
        self._changes.grew_each(rows, indices, pages)
        return True

    def fork(self, parent: int, child: int, owner: int = -1) -> None:
        """The child row, which is empty, shares all of the parent's pages. Raises LedgerError for a row in use."""
        chain = self._chains[parent]
        named = self.named[parent]
        self.open(child, owner)
        pages = self.tables.row(parent).copy()
        self.allocator.hold(pages.reshape(-1))
        self.tables.append(child, pages)
        self._changes.grew(child, 0, pages)
        self._chains[child] = None if chain is None else chain.copy()
        self.named[child] = named
        self.forked[parent] = self.forked[child] = True

    def publish(self, row: int, computed: int, after_step: int | None) -> None:
        """Names the row's full pages below position `computed`, whose KV is computed; its chain must reach so far.

        after_step: as in `release`, for pages that the row gives up because another row published the same content.
        """
        chain, index = self._chains[row], self.prefix.index
        start, full = int(self.named[row]), computed // self.layout.page_size
        if chain is None or full <= start:
            return
        end = self._trusted(row, start, full)
        node = int(index.node_of[self.tables.pages[0, row, start - 1]]) if start else NONE
        if start and node == NONE:  # the page before was forgotten
            self._close(row, start)
            return
        self._forget_frontier(row, start)
        while start < end:
            known = index.child(node, chain, start)
            if known is None:
                self._close(row, start)
                return
            if known == NONE:
                stop = index.unnamed_until(chain, start, end)
                pages = self.tables.pages[:, row, start:stop]
                nodes = index.add(node, chain, start, pages, self._now)
                self.prefix.policy.published(nodes, chain.names[start:stop])
                node, start = nodes[-1], stop
            elif self._take_over(row, start, known, after_step):
                node, start = known, start + 1
            else:
                self._close(row, start)
                return
        self.named[row] = end
        if end < full:
            self._close(row, end)
        self._set_frontier(row, end)

    def release(self, row: int, after_step: int | None) -> None:
        """Empties the row's table. Its pages are let go at once (None), or when `after_step` has retired."""
        pages = self.tables.row(row)
        nodes = self.prefix.index.node_of[pages[0]]
        nodes = nodes[nodes != NONE]
        if len(nodes):
            self.prefix.policy.released(nodes)
        self._close(row, int(self.named[row]))
        pages = pages.reshape(-1).copy()
        self._changes.not_copied(pages[self.allocator.counts[pages] == 1])
        self._let_go(pages, after_step)
        self.tables.clear(row)
        self._changes.left(row)
        self._chains[row] = None

    def distrust(self, row: int) -> None:
        """What this row computed or read may be wrong: none of its pages keeps its name, nor any that came after."""
        pages = self.tables.row(row)
        nodes = self.prefix.index.node_of[pages[0]]
        self._free(self.prefix.forget(nodes[nodes != NONE].tolist(), Cause.FAULT, self._now))
        for other in np.flatnonzero(self.named != CLOSED).tolist():
            if other == row or np.isin(self.tables.row(other), pages).any():  # forks hold some of its pages
                self._close(other, int(self.named[other]))

    def reset(self) -> int:
        """Forgets all that is published: how many pages. Running rows keep theirs and publish no more of them."""
        before = self.prefix.evicted[Cause.RESET]
        for row in np.flatnonzero(self.named != CLOSED).tolist():
            self._close(row, int(self.named[row]))
        self._free(self.prefix.reset(self._now))
        return self.prefix.evicted[Cause.RESET] - before

    def shrink_cache(self, pages: int) -> None:
        """Gives up cached pages until at most so many are left."""
        if self.prefix.cached > pages:
            self._free(self.prefix.evict(self.prefix.cached - pages, self._now))

    def quarantine(self, pages: Pages, counts: NDArray[np.int64]) -> None:
        """pages: wrong in the ledger. counts: of their holders. From now on nobody else gets one, or its content."""
        self.quarantined.update(pages.tolist())
        nodes = self.prefix.index.node_of[pages]
        self.allocator.set_aside(pages, "wrong in the ledger")
        self.allocator.counts[pages] = counts
        self._free(self.prefix.forget(nodes[nodes != NONE].tolist(), Cause.FAULT, self._now))
        self.prefix.recount()
        self.allocator.recount()

    def retire(self, step: int) -> None:
        """No step up to and with this one can touch a page any more."""
        for waiting in [s for s in self.in_flight if s <= step]:
            for pages in self.in_flight.pop(waiting):
                self.returning -= len(pages)
                self._drop(pages)

    # Pages

    def _take(self, count: int) -> Pages | None:
        short = count - self.allocator.free
        if short > 0:
            if short > self.prefix.cached:
                return None
            self._free(self.prefix.evict(short, self._now))
        return self.allocator.take(count)

    def _drop(self, pages: Pages) -> None:
        self._free(self.prefix.settle(self.allocator.drop(pages)))

    def _free(self, pages: Pages) -> None:
        self.allocator.put_back(pages)
        self._changes.freed(pages)

    def _let_go(self, pages: Pages, after_step: int | None) -> None:
        if after_step is None:
            self._drop(pages)
        elif len(pages):
            self.in_flight.setdefault(after_step, []).append(pages)
            self.returning += len(pages)

    def _trusted(self, row: int, start: int, end: int) -> int:
        """Up to which index none of the row's pages from `start` on was set aside."""
        if not self.allocator.suspects:
            return end
        wrong = np.isin(self.tables.pages[:, row, start:end], list(self.allocator.suspects)).any(axis=0)
        return start + int(wrong.argmax()) if wrong.any() else end

    def _set_frontier(self, row: int, index: int) -> None:
        """The page of this index is the row's next; others may wait for it, if its tokens are known by now."""
        chain = self._chains[row]
        if chain is not None and self.named[row] != CLOSED and index < len(chain.names):
            self._computing.setdefault(chain.names[index], row)

    def _forget_frontier(self, row: int, index: int) -> None:
        chain = self._chains[row]
        if chain is not None and index < len(chain.names) and self._computing.get(chain.names[index]) == row:
            del self._computing[chain.names[index]]

    def _close(self, row: int, start: int) -> None:
        """The row, whose pages up to index `start` are published, publishes no more."""
        self._forget_frontier(row, start)
        self.named[row] = CLOSED

    def _shared_from(self, row: int, index: int) -> list[int]:
        """Indices from `index` on whose pages other rows hold too."""
        pages = self.tables.row(row)[0, index:].tolist()
        counts, sources = self.allocator.counts, self._sources
        return [index + i for i, page in enumerate(pages) if counts[page] - sources.get(page, 0) > 1]

    def _unshare(self, row: int, index: int, pages: Pages, written: bool) -> None:
        """Puts pages [groups] of its own in the row's table, and has them filled from those before if they had been
        written to. These wait for the step that copies.
        """
        before = self.tables.replace(row, index, pages)
        self._changes.grew(row, index, pages[:, None])
        if written:
            self._changes.copy(before, pages)
            for page in before.tolist():
                self._sources[page] = self._sources.get(page, 0) + 1
            self._let_go(before, self._step)
        else:
            self._drop(before)

    def _take_over(self, row: int, index: int, node: int, after_step: int | None) -> bool:
        """Replaces the row's pages of this index by the node's, which have the same content. Not where a fork shares
        them: it would hold pages that come after the node's without holding these.
        """
        own, pages = self.tables.pages[:, row, index], self.prefix.index.pages[:, node].copy()
        if (own == pages).all():
            return True
        if (self.allocator.counts[own] > 1).any():
            return False
        self.prefix.revive([node])
        self.allocator.hold(pages)
        before = self.tables.replace(row, index, pages)
        self._changes.grew(row, index, pages[:, None])
        self._let_go(before, after_step)
        return True


def _differ(one: PageChain, other: PageChain, index: int) -> bool:
    return one.names[index] != other.names[index]
