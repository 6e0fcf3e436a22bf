"""The page pool: hands out free and cached pages, and delays the return of pages that a step in flight can touch.

A page's count is page tables + steps in flight. A page that is released while a step can touch it waits for that step.
Then it is free, or cached where it has a block hash. Cached pages are available too: the prefix cache evicts the least
valuable ones, and the host tier, where there is one, takes copies of these.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import PageAllocator, Pages
from cache_manager.cached import Cause, PolicyMaker, PrefixCache
from cache_manager.changes import PageChanges
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.runs import Nodes
from cache_manager.tier import HostTier

AHEAD_PART = 512  # an eviction frees up to 1 / this of the pool ahead of need


class PagePool:
    """All pages of an engine: allocator, prefix cache and host tier together, in step with the plans.

    Writes `in_flight` and `changes`. Holder counts change through the allocator, but for `quarantine`, which corrects
    them.

    Args:
        size: Number of pages.
        index: An empty prefix index for these pages.
        make_policy: Makes the eviction policy.
        anchor: As in `PrefixCache`.
        tier: Home of copies of evicted pages; None without one.

    Attributes:
        total: Number of pages.
        allocator: Free list and holder counts.
        prefix: Published pages and their eviction.
        tier: The host tier.
        swaps: Whether pages are swapped out to and found in the tier at present.
        returning: Number of holders that pages lose as steps in flight retire.
        in_flight: Pages that wait for a step, by its number.
        changes: Page changes for the plan of this step.
        quarantined: Pages that `quarantine` has taken out of circulation.
        now: Seconds on the scheduler's clock.
        step: Number of the step that is being planned.
    """

    def __init__(
        self, size: int, index: PrefixIndex, make_policy: PolicyMaker, anchor: int | None, tier: HostTier | None
    ) -> None:
        self.total = size
        self.allocator = PageAllocator(size)
        self.prefix = PrefixCache(index, make_policy(size), self.allocator.counts, anchor, self._swap_out)
        self.tier = tier
        self.swaps = tier is not None
        self.returning = 0
        self.in_flight: dict[int, list[Pages]] = {}
        self.changes = PageChanges()
        self.quarantined: set[int] = set()
        self.now, self.step = 0.0, 0
        # An eviction takes its time by the run, not by the page. The next pages to be lacking come from the run that is
        # of least worth now, which mostly is of least worth then: so they go along with those lacking now.
        self._ahead = size // AHEAD_PART
        self._sources: dict[int, int] = {}  # page -> copies that read it in the step that is being planned

    @property
    def free(self) -> int:
        """Number of pages that `take` can return: free and cached ones."""
        return self.allocator.free + self.prefix.cached

    def begin(self, now: float, step: int) -> None:
        """Starts the planning of a step.

        Args:
            now: Seconds on the scheduler's clock.
            step: Number of the step.
        """
        self.now, self.step = now, step

    def take_changes(self) -> PageChanges:
        """Returns the page changes for the plan, and starts an empty set for the next one."""
        changes, self.changes = self.changes, PageChanges()
        self._sources.clear()
        if self.tier is not None:
            self.tier.planned(changes)
        return changes

    def take(self, count: int) -> Pages | None:
        """Takes pages with one holder each, evicting cached ones where too few are free.

        Returns:
            [count] the pages, or None where fewer are available; then nothing has changed.
        """
        short = count - self.allocator.free
        if short > 0:
            if short > self.prefix.cached:
                return None
            self._free(self.prefix.evict(short, self.now, self._ahead))
        return self.allocator.take(count)

    def hold(self, nodes: Sequence[int], pages: Pages) -> None:
        """Adds a holder to published pages.

        Args:
            nodes: As in `PrefixCache.revive`.
            pages: Their pages.
        """
        self.prefix.revive(nodes, pages)  # first: it tells cached pages by their count of 0
        self.allocator.hold(pages)

    def holders(self, page: int) -> int:
        """Returns the number of holders of a page, without those that wait only for it to be copied in this step."""
        return int(self.allocator.counts[page]) - self._sources.get(page, 0)

    def copy(self, source: Pages, target: Pages) -> None:
        """Plans a copy of a page, and releases the source after the step that copies it.

        Args:
            source: [1] page that loses a holder.
            target: [1] page that replaces it.
        """
        self.changes.copy(source, target)
        self._sources[int(source[0])] = self._sources.get(int(source[0]), 0) + 1
        self.let_go(source, self.step)

    def let_go(self, pages: Pages, after_step: int | None) -> None:
        """Removes a holder from each of these pages.

        Args:
            pages: [n] distinct pages.
            after_step: Step to wait for; None removes the holders at once.
        """
        if after_step is None:
            self.drop(pages)
        elif len(pages):
            self.in_flight.setdefault(after_step, []).append(pages)
            self.returning += len(pages)

    def drop(self, pages: Pages) -> None:
        """Removes a holder from each of these pages at once."""
        self._free(self.prefix.settle(self.allocator.drop(pages)))

    def drop_slid(self, pages: Pages) -> None:
        """Does as `drop` for pages that left the window of a sequence that goes on."""
        self._free(self.prefix.settle_slid(self.allocator.drop(pages)))

    def retire(self, step: int) -> None:
        """Releases the pages that wait for this step or an earlier one: none of these can touch a page any more."""
        if not self.in_flight:
            return
        for waiting in [s for s in self.in_flight if s <= step]:
            for pages in self.in_flight.pop(waiting):
                self.returning -= len(pages)
                self.drop(pages)

    def shrink_cache(self, pages: int) -> None:
        """Evicts cached pages until at most `pages` are left."""
        if self.prefix.cached > pages:
            self._free(self.prefix.evict(self.prefix.cached - pages, self.now))

    def forget(self, nodes: list[int]) -> None:
        """Removes nodes whose content may be wrong, with all nodes and copies that come after them."""
        if self.tier is not None:  # first: `under` finds nodes while they are in the index
            self.tier.forget(self.prefix.index.hashes(self.prefix.index.under(nodes)))
        self._free(self.prefix.forget(nodes, Cause.FAULT))

    def forget_all(self) -> int:
        """Removes all block hashes and all copies in the host tier; returns the number of pages that had one."""
        before = self.prefix.evicted[Cause.RESET]
        self._free(self.prefix.reset())
        if self.tier is not None:
            self.tier.clear()
        return self.prefix.evicted[Cause.RESET] - before

    def quarantine(self, pages: Pages, counts: NDArray[np.int64]) -> None:
        """Takes pages out of circulation whose books are wrong; their content gets no new reader.

        Args:
            pages: [n] the pages.
            counts: [n] holders that they have by page tables and steps in flight.
        """
        self.quarantined.update(pages.tolist())
        nodes = self.prefix.index.node_of[pages]
        self.allocator.set_aside(pages, "wrong in the ledger")
        self.allocator.counts[pages] = counts
        self.forget(nodes[nodes != NONE].tolist())
        self.prefix.recount()
        self.allocator.recount()

    def _swap_out(self, run: Nodes) -> None:
        """Plans swap-outs of nodes that were just evicted, the last one of the sequence first."""
        if self.tier is not None:
            self.changes.swap_out(self.tier.keep(self.prefix.index, run.tolist(), self.swaps))

    def _free(self, pages: Pages) -> None:
        if len(pages):
            self.allocator.put_back(pages)
            self.changes.freed(pages)
