"""Bugs to plant in the cache manager's books: stand-ins for what serves, each with the test that must notice it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from cache_manager.allocator import PageAllocator
from cache_manager.cached import PrefixCache
from cache_manager.changes import PageChanges
from cache_manager.manager import CacheManager
from cache_manager.pool import PagePool
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.publishing import PublishedPages
from cache_manager.tables import PageTables
from tests.support.planted import plant


@dataclass(frozen=True)
class Fault:
    """stand_in: makes one for target.name from the original. catcher: name of the test that must catch it. needs: what
    is planted beside it, and is no fault by itself.
    """

    target: type | ModuleType
    name: str
    stand_in: Callable
    catcher: str
    needs: tuple["Fault", ...] = ()

    def plant(self, monkeypatch) -> None:
        for fault in (*self.needs, self):
            plant(monkeypatch, fault.target, fault.name, fault.stand_in)


FAULTS: dict[str, Fault] = {}


def fault(target, name, catcher="play", needs=()):
    def register(make):
        FAULTS[make.__name__] = Fault(target, name, make, catcher, needs)
        return make

    return register


# Counts


@fault(PageAllocator, "drop", "allocator")
def drop_skips_a_decrement(real):
    return lambda self, pages: real(self, pages[:-1])


@fault(PageAllocator, "drop", "allocator")
def shared_page_is_freed_by_its_first_holder(real):
    def drop(self, pages):
        self.counts[pages] = np.minimum(self.counts[pages], 1)
        return real(self, pages)

    return drop


@fault(PageAllocator, "drop", "allocator")
def page_without_a_holder_is_dropped(real):
    def drop(self, pages):
        self.counts[pages] = np.maximum(self.counts[pages], 1)
        return real(self, pages)

    return drop


@fault(PageAllocator, "put_back", "allocator")
def page_is_freed_twice(real):
    def put_back(self, pages):
        self._listed[pages] = False
        real(self, pages)

    return put_back


@fault(PageAllocator, "hold", "allocator")
def hold_is_forgotten(real):
    def hold(self, pages):
        real(self, pages)
        self.counts[pages] -= 1

    return hold


@fault(PageAllocator, "take", "allocator")
def page_stays_on_the_free_list(real):
    def take(self, n):
        pages = real(self, n)
        self.free += bool(pages is not None and n)
        return pages

    return take


@fault(PageAllocator, "put_back", "allocator")
def page_that_was_set_aside_is_freed(real):
    def put_back(self, pages):
        aside, self.pages_set_aside = self.pages_set_aside, {}
        real(self, pages)
        self.pages_set_aside |= aside

    return put_back


@fault(PageAllocator, "set_aside")
def page_that_was_set_aside_stays_on_the_free_list(real):
    def set_aside(self, pages, why):
        self.pages_set_aside |= dict.fromkeys(pages.tolist(), why)

    return set_aside


@fault(PrefixCache, "settle")
def cached_pages_are_miscounted(real):
    def settle(self, pages):
        free = real(self, pages)
        self.cached -= len(free) < len(pages)
        return free

    return settle


@fault(CacheManager, "needed")
def need_forgets_what_is_held_already(real):
    return lambda self, match, tokens: self.layout.pages_for(tokens)


# Steps in flight


@fault(CacheManager, "release")
def step_in_flight_is_forgotten(real):
    return lambda self, row, after_step: real(self, row, None)


@fault(PublishedPages, "publish")
def page_that_a_step_reads_is_given_up_at_once(real):
    return lambda self, row, computed, after_step: real(self, row, computed, None)


@fault(PagePool, "retire")
def pages_return_a_step_too_early(real):
    return lambda self, step: real(self, step + 1)


@fault(PagePool, "retire")
def pages_never_return(real):
    return lambda self, step: None


@fault(PagePool, "let_go")
def freed_pages_are_told_too_early(real):
    def let_go(self, pages, after_step):
        if after_step is not None:
            self.changes.freed(pages)
        real(self, pages, after_step)

    return let_go


@fault(PagePool, "drop")
def cached_page_is_told_to_be_freed(real):
    def drop(self, pages):
        real(self, pages)
        self.changes.freed(pages[self.allocator.counts[pages] == 0])

    return drop


@fault(PageChanges, "freed")
def nobody_is_told_what_was_freed(real):
    return lambda self, pages: None


# Publishing


@fault(PublishedPages, "publish")
def page_is_published_before_it_is_computed(real):
    def publish(self, row, computed, after_step):
        chain = self.chains[row]
        most = 0 if chain is None else len(chain.hashes) * self.layout.page_size
        real(self, row, max(computed, min(most, self.tables.held[0, row] * self.layout.page_size)), after_step)

    return publish


@fault(PrefixIndex, "add_each")
def the_next_page_comes_after_the_one_before_its_parent(real):
    def add_each(self, parents, named, pages, now):
        return real(self, [self.parent[parent] for parent in parents], named, pages, now)

    return add_each


@fault(PublishedPages, "_take_over")
def page_is_taken_over_by_one_of_its_forks_alone(real):
    def take_over(self, row, index, node, after_step):
        own = self.tables.pages[:, row, index]
        counts = self.allocator.counts[own]
        rows_with, self.tables.rows_with = self.tables.rows_with, lambda *_: np.array([row])
        self.allocator.counts[own] = 1
        done = real(self, row, index, node, after_step)
        self.allocator.counts[own] += counts - 1
        self.tables.rows_with = rows_with
        return done

    return take_over


@fault(PublishedPages, "_take_over")
def page_that_a_fork_shares_is_never_taken_over(real):
    def take_over(self, row, index, node, after_step):
        own, page = self.tables.pages[:, row, index], self.prefix.index.pages[:, node]
        shared = (self.allocator.counts[own] > 1) & (own != page) & (page != NONE)
        return not shared.any() and real(self, row, index, node, after_step)

    return take_over


@fault(PageTables, "rows_with")
def page_that_left_the_window_of_a_fork_is_exchanged(real):
    return lambda self, group, index, page: np.flatnonzero(self.pages[group, :, index] == page)


@fault(PrefixCache, "reset")
def node_outlives_a_reset(real):
    return lambda self: real(self) if len(self.index) < 2 else self.forget([], None)


@fault(PublishedPages, "_close")
def row_publishes_on(real):
    return lambda self, row, start: self._forget_frontier(row, start)


@fault(PrefixIndex, "under")
def what_comes_after_is_not_forgotten(real):
    return lambda self, nodes: list(dict.fromkeys(nodes))


@fault(PublishedPages, "_forget_frontier")
def name_of_a_page_to_come_sticks(real):
    return lambda self, row, index: None


@fault(PublishedPages, "_set_frontier")
def page_to_come_is_not_known(real):
    return lambda self, row, index: None


@fault(PublishedPages, "is_computing")
def page_is_waited_for_when_nobody_computes_it(real):
    return lambda self, awaited: True


# Forks and copies


@fault(CacheManager, "fork")
def fork_holds_nothing(real):
    def fork(self, parent, child, owner=-1):
        real(self, parent, child, owner)
        pages = self.tables.row(child)
        self.allocator.counts[pages] -= 1
        self.allocator.recount()

    return fork


@fault(CacheManager, "fork")
def fork_is_not_noted(real):
    def fork(self, parent, child, owner=-1):
        real(self, parent, child, owner)
        self.forked[parent] = False

    return fork


@fault(PageChanges, "copy")
def copy_is_forgotten(real):
    return lambda self, sources, targets: None


@fault(PageChanges, "copy")
def wrong_page_is_copied(real):
    return lambda self, sources, targets: real(self, np.zeros_like(sources), targets)


@fault(PagePool, "let_go")
def page_that_is_copied_is_free_before_the_copy(real):
    return lambda self, pages, after_step: real(self, pages, None if after_step == self.step else after_step)


@fault(CacheManager, "_shared_from")
def all_shared_pages_but_the_first_are_written_to(real):
    return lambda self, row, index: real(self, row, index)[:1]


# Eviction


@fault(PrefixCache, "_idle_run", "play")
def held_page_is_evicted(real):
    def idle_run(self, chosen):
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        try:
            return real(self, chosen)
        finally:
            self._counts = counts

    return idle_run


@fault(PrefixCache, "revive")
def page_that_is_held_again_may_be_evicted(real):
    def revive(self, nodes, pages):
        withdraw, self.policy.withdraw = self.policy.withdraw, lambda node: None
        real(self, nodes, pages)
        self.policy.withdraw = withdraw

    return revive


@fault(PrefixCache, "_idle_run")
def page_is_evicted_before_those_that_come_after_it(real):
    def idle_run(self, chosen):
        parent = self.index.parent[chosen[0]]
        return chosen[:1] if parent == NONE or self.held([parent])[0] else np.array([parent])

    return idle_run


@fault(PrefixCache, "_offer_if_leaf")
def page_that_nothing_comes_after_is_never_offered(real):
    return lambda self, node: None if node != NONE and self.index.parent[node] == NONE else real(self, node)


# Tables and what the executor is told


@fault(PageTables, "append")
def widening_forgets_the_pages_so_far(real):
    def append(self, group, row, pages):
        columns = self.pages.shape[2]
        real(self, group, row, pages)
        if self.pages.shape[2] > columns:
            self.pages[:, row, :columns] = 0

    return append


@fault(PageTables, "clear")
def cleared_table_keeps_its_pages(real):
    return lambda self, row: None


@fault(PageChanges, "grew")
def changes_tell_the_wrong_place(real):
    return lambda self, group, row, index, pages: real(self, group, row, index + bool(index), pages)


@fault(PageChanges, "row_left")
def changes_tell_of_a_row_that_left(real):
    return lambda self, row: None


@fault(CacheManager, "covers")
def covers_is_off_by_one(real):
    return lambda self, rows, ends: real(self, rows, ends - 1)
