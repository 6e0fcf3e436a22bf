"""The page pool: which pages can be had, who gives way for them, and when pages that somebody lets go can be had again.

A page's count is page tables + steps in flight. Pages that are let go while a step that can touch them is in flight
wait for that step; then they are free, or cached where they have a name. Cached pages can be had too: the prefix cache
gives up the least worthy, and the host tier, where there is one, takes copies of these.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import PageAllocator, Pages
from cache_manager.cached import Cause, PolicyMaker, PrefixCache
from cache_manager.changes import PageChanges
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.tier import HostTier


class PagePool:
    """`size` pages. index: what names them; it is empty. anchor: as in `PrefixCache`.

    swaps: whether the tier is used at the moment. returning: pages that lose a holder as steps in flight retire.
    in_flight: these pages, by the step they wait for. changes: what the plan of the step must tell its executor.
    quarantined: pages that `quarantine` has dealt with. now, step: the time, and the step that is planned.
    """

    def __init__(
        self, size: int, index: PrefixIndex, make_policy: PolicyMaker, anchor: int | None, tier: HostTier | None
    ) -> None:
        self.allocator = PageAllocator(size)
        self.prefix = PrefixCache(index, make_policy(size), self.allocator.counts, anchor, self._gone)
        self.tier = tier
        self.swaps = tier is not None
        self.returning = 0
        self.in_flight: dict[int, list[Pages]] = {}
        self.changes = PageChanges()
        self.quarantined: set[int] = set()
        self.now, self.step = 0.0, 0
        self._sources: dict[int, int] = {}  # how often each page is copied from in the step that is being planned

    @property
    def total(self) -> int:
        return self.allocator.size

    @property
    def free(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody holds."""
        return self.allocator.free + self.prefix.cached

    def begin(self, now: float, step: int) -> None:
        """From here on the time is `now`, in seconds on any clock, and `step` is planned."""
        self.now, self.step = now, step

    def take_changes(self) -> PageChanges:
        """All that the plan of the step must tell its executor."""
        changes, self.changes = self.changes, PageChanges()
        self._sources.clear()
        if self.tier is not None:
            self.tier.planned(changes)
        return changes

    def take(self, count: int) -> Pages | None:
        """So many pages, with one holder each; None, and nothing changed, where fewer can be had."""
        short = count - self.allocator.free
        if short > 0:
            if short > self.prefix.cached:
                return None
            self._free(self.prefix.evict(short, self.now))
        return self.allocator.take(count)

    def hold(self, nodes: Sequence[int], pages: Pages) -> None:
        """One more holder for these pages of these published nodes, as in `PrefixCache.revive`."""
        self.prefix.revive(nodes, pages)
        self.allocator.hold(pages)

    def holders(self, page: int) -> int:
        """How many hold a page, without those that hold it only until it has been copied from."""
        return int(self.allocator.counts[page]) - self._sources.get(page, 0)

    def copy(self, source: Pages, target: Pages) -> None:
        """source: [1], let go by who copies it to `target` [1]; it waits for the step that does."""
        self.changes.copy(source, target)
        self._sources[int(source[0])] = self._sources.get(int(source[0]), 0) + 1
        self.let_go(source, self.step)

    def let_go(self, pages: Pages, after_step: int | None) -> None:
        """One holder less for each of these pages, at once (None) or when `after_step` has retired."""
        if after_step is None:
            self.drop(pages)
        elif len(pages):
            self.in_flight.setdefault(after_step, []).append(pages)
            self.returning += len(pages)

    def drop(self, pages: Pages) -> None:
        self._free(self.prefix.settle(self.allocator.drop(pages)))

    def drop_slid(self, pages: Pages) -> None:
        """As `drop`, of pages that left the window of a sequence that goes on."""
        self._free(self.prefix.settle_slid(self.allocator.drop(pages)))

    def retire(self, step: int) -> None:
        """No step up to and with this one can touch a page any more."""
        for waiting in [s for s in self.in_flight if s <= step]:
            for pages in self.in_flight.pop(waiting):
                self.returning -= len(pages)
                self.drop(pages)

    def shrink_cache(self, pages: int) -> None:
        """Gives up cached pages until at most so many are left."""
        if self.prefix.cached > pages:
            self._free(self.prefix.evict(self.prefix.cached - pages, self.now))

    def forget(self, nodes: list[int]) -> None:
        """What these nodes' pages hold, or what came after them, may be wrong."""
        if self.tier is not None:
            self.tier.forget(self.prefix.index.names(self.prefix.index.under(nodes)))
        self._free(self.prefix.forget(nodes, Cause.FAULT))

    def forget_all(self) -> int:
        """Forgets all that is published, and all copies in the host tier. Returns how many pages were published."""
        before = self.prefix.evicted[Cause.RESET]
        self._free(self.prefix.reset())
        if self.tier is not None:
            self.tier.clear()
        return self.prefix.evicted[Cause.RESET] - before

    def quarantine(self, pages: Pages, counts: NDArray[np.int64]) -> None:
        """pages: wrong in the ledger. counts: of their holders. From now on nobody else gets one, or its content."""
        self.quarantined.update(pages.tolist())
        nodes = self.prefix.index.node_of[pages]
        self.allocator.set_aside(pages, "wrong in the ledger")
        self.allocator.counts[pages] = counts
        self.forget(nodes[nodes != NONE].tolist())
        self.prefix.recount()
        self.allocator.recount()

    def _gone(self, run: list[int]) -> None:
        """These nodes made place for others; the last one first."""
        if self.tier is not None:
            self.changes.swap_out(self.tier.keep(self.prefix.index, run, self.swaps))

    def _free(self, pages: Pages) -> None:
        self.allocator.put_back(pages)
        self.changes.freed(pages)
