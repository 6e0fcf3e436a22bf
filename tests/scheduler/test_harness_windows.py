"""Bugs with windows planted in the scheduler and in the cache manager as it sees it: the laws must notice each.

`blind` ones are noticed by what the executor reads and writes alone, however well their pages are counted.
"""

from dataclasses import replace

import numpy as np
import pytest

from cache_manager import lookup as module
from cache_manager.cached import PrefixCache
from cache_manager.layout import KVLayout
from cache_manager.lookup import PrefixLookup
from cache_manager.manager import CacheManager
from cache_manager.pool import PagePool
from cache_manager.publishing import CLOSED, PublishedPages
from cache_manager.tables import PageTables
from cache_manager.transfers import NO_TRANSFER
from scheduler.results import Results
from scheduler.scheduler import Scheduler
from tests.scheduler.planting import Faults, caught
from tests.scheduler.workloads import WINDOWS
from tests.support.planted import planted

FAULTS = Faults()


def fault(target, name, **workload):
    return FAULTS.fault(target, name, **{"kinds": WINDOWS, **workload})


# When pages are let go of, and of whom.


@fault(CacheManager, "slide")
def pages_behind_a_window_are_kept(real):
    return lambda self, rows, computed: None


@fault(CacheManager, "slide")
def pages_behind_a_window_are_kept_a_token_longer(real):
    return lambda self, rows, computed: real(self, rows, computed - 1)


@fault(CacheManager, "slide", cache=False, blind=True, depths=(1,))
def a_page_is_let_go_of_before_its_last_token_is_out_of_sight(real):
    return lambda self, rows, computed: real(self, rows, computed + 1)


def slid_by(self, flown, rows, computed, real):
    """A step's results are published with these rows slid to these positions."""
    slide = self.cache.slide
    self.cache.slide = lambda *_: slide(rows, computed)
    real(self, flown)
    del self.cache.slide


@fault(Results, "_publish", blind=True, depths=(2,))
def a_row_slides_to_where_it_is_scheduled(real):
    def publish(self, flown):
        rows = flown.slices[self.rows.serial[flown.slices[:, 0]] == flown.serials[flown.slices[:, 0]], 0]
        slid_by(self, flown, rows, self.rows.scheduled[rows], real)

    return publish


@fault(Results, "_publish")
def a_row_slides_to_where_the_step_began(real):
    def publish(self, flown):
        slices = flown.slices[self.rows.serial[flown.slices[:, 0]] == flown.serials[flown.slices[:, 0]]]
        slid_by(self, flown, slices[:, 0], slices[:, 1], real)

    return publish


@fault(Results, "_publish", cache=False, blind=True, depths=(2,))
def a_row_slides_for_its_former_tenant(real):
    def publish(self, flown):
        slices = flown.slices[self.rows.serial[flown.slices[:, 0]] > 0]
        slid_by(self, flown, slices[:, 0], slices[:, 1] + slices[:, 2], real)

    return publish


@fault(Results, "_publish")
def rows_slide_before_their_pages_are_published(real):
    def publish(self, flown):
        rows = flown.slices[self.rows.serial[flown.slices[:, 0]] == flown.serials[flown.slices[:, 0]]]
        self.cache.slide(rows[:, 0], rows[:, 1] + rows[:, 2])
        slid_by(self, flown, rows[:0, 0], rows[:0, 1], real)

    return publish


@fault(CacheManager, "slide")
def the_last_page_that_a_row_published_is_let_go_of(real):
    def slide(self, rows, computed):
        named = self.published.count.copy()
        self.published.count[:] = CLOSED
        real(self, rows, computed)
        self.published.count[:] = named

    return slide


@fault(Scheduler, "_plan", blind=True, alike=True)
def pages_are_let_go_of_when_a_step_is_planned(real):
    def plan(self, now, work, drafts):
        self.cache.slide(work[:, 0], work[:, 1] + work[:, 2])
        return real(self, now, work, drafts)

    return plan


@fault(PageTables, "cut")
def a_page_is_let_go_of_twice(real):
    def cut(self, group, row, first):
        before = self.first[group, row]
        gone = real(self, group, row, first)
        self.first[group, row] = before
        return gone

    return cut


@fault(PrefixCache, "settle_slid")
def a_page_with_a_name_is_free_when_it_is_out_of_sight(real):
    return lambda self, pages: pages


@fault(PrefixCache, "_evict_slid")
def a_page_that_is_out_of_sight_keeps_its_name_when_it_is_evicted(real):
    return lambda self, pages: self._not_slid(pages)


@fault(PagePool, "forget", kinds=("pure",), faults=True, alike=True, last_turn=0)
def a_fault_takes_no_names_from_pages_out_of_sight(real):
    return lambda self, nodes: real(self, [node for node in nodes if self.prefix.held([node])[0]])


# Slots for what is computed soon.


@fault(PageTables, "append")
def a_new_page_stands_where_those_before_it_have_left(real):
    def append(self, group, row, pages):
        start = int(self.held[group, row] - self.first[group, row])
        real(self, group, row, pages)
        self.pages[group, row, start : start + len(pages)] = pages

    return append


@fault(CacheManager, "grow")
def a_prompt_has_all_its_slots_at_once(real):
    def grow(self, row, start, end):
        ahead, self.ahead = self.ahead, end
        grown = real(self, row, start, end)
        self.ahead = ahead
        return grown

    return grow


@fault(CacheManager, "__init__", depths=(2,))
def one_step_is_thought_to_be_in_flight(real):
    def init(self, layout, pages, rows, make_policy, ahead):
        real(self, layout, pages, rows, make_policy, ahead // 2)

    return init


@fault(CacheManager, "covers", blind=True)
def a_prefill_goes_on_without_slots(real):
    return lambda self, rows, ends: np.ones(len(rows), np.bool_)


@fault(CacheManager, "pages_still_to_take", alike=True)
def newcomers_take_what_windows_will_need(real):
    return lambda self, rows, tokens: 0


@fault(CacheManager, "needed")
def all_of_a_prompt_must_find_room(real):
    def needed(self, match, tokens):
        windows, self._windows = self._windows, {}
        need = real(self, match, tokens)
        self._windows = windows
        return need

    return needed


@fault(CacheManager, "slots_unused")
def slots_out_of_sight_count_as_unused(real):
    def slots_unused(self, scheduled):
        return real(self, scheduled) + int(self.tables.first.sum()) * self.layout.page_size

    return slots_unused


# Prefixes that are valid in all groups.


@fault(PageTables, "start")
def a_match_is_put_at_the_start_of_the_table(real):
    return lambda self, group, row, index, pages: real(self, group, row, 0, pages)


@fault(PrefixLookup, "match")
def a_match_uses_all_pages_of_a_window(real):
    return lambda self, chain, most, transferred=NO_TRANSFER: replace(real(self, chain, most, transferred), firsts=())


@fault(module, "valid_pages")
def a_prefix_is_valid_where_a_window_lacks_pages(real):
    return lambda pages, layout: pages.shape[1]


@fault(module, "valid_pages", alike=True)
def only_a_prefix_that_is_there_as_a_whole_is_valid(real):
    return lambda pages, layout: int((pages >= 0).all(axis=0).cumprod().sum())


@fault(KVLayout, "pages_before", blind=True, alike=True)
def a_prefix_is_valid_a_page_short_of_the_window(real):
    return lambda self, window: max(1, real(self, window) - 1)


@fault(PublishedPages, "_take_over", alike=True)
def a_page_that_was_computed_again_is_not_found_again(real):
    def take_over(self, row, index, node, after_step):
        self.prefix.index.bind = lambda node, pages: None
        taken = real(self, row, index, node, after_step)
        del self.prefix.index.bind
        return taken

    return take_over


RARE = {"a_fault_takes_no_names_from_pages_out_of_sight", "a_prefix_is_valid_where_a_window_lacks_pages"}


@pytest.mark.parametrize("name", planted(FAULTS, RARE))
@pytest.mark.sample(2)
def test_harness_catches(name, monkeypatch):
    assert caught(FAULTS[name], monkeypatch)
