"""Bugs to plant in what windows let go of, keep, find again and promise."""

import numpy as np

from cache_manager import lookup as lookup_module
from cache_manager.cached import PrefixCache
from cache_manager.layout import MOST_TOKENS, KVLayout
from cache_manager.manager import CacheManager
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.publishing import CLOSED, PublishedPages
from cache_manager.tables import PageTables
from tests.cache_manager.faults import FAULTS, fault

# Letting go


@fault(CacheManager, "slide", "windows")
def window_is_one_too_short(real):
    return lambda self, rows, computed: real(self, rows, computed + 1)


@fault(CacheManager, "slide", "windows")
def window_is_one_too_long(real):
    return lambda self, rows, computed: real(self, rows, np.maximum(computed - 1, 0))


@fault(CacheManager, "slide", "windows")
def page_is_let_go_that_a_step_in_flight_reads(real):
    """As if all that the row has slots for were computed."""
    return lambda self, rows, computed: real(self, rows, self.tables.held[:, rows].min(axis=0) * self.layout.page_size)


@fault(CacheManager, "slide", "windows")
def row_lets_go_of_the_page_that_it_goes_on_from(real):
    def slide(self, rows, computed):
        count, self.published.count = self.published.count, np.full_like(self.published.count, CLOSED)
        real(self, rows, computed)
        self.published.count = count

    return slide


@fault(CacheManager, "slide", "windows")
def nothing_is_let_go(real):
    return lambda self, rows, computed: None


@fault(PageTables, "cut", "windows")
def page_behind_a_window_stays_held_for_ever(real):
    return lambda self, group, row, first: real(self, group, row, first)[:0]


@fault(PageTables, "cut", "windows")
def page_behind_a_window_stays_in_the_table(real):
    def cut(self, group, row, first):
        before = int(self.first[group, row])
        gone = real(self, group, row, first)
        self.first[group, row] = before
        return gone

    return cut


@fault(PrefixCache, "settle_slid", "windows")
def page_behind_a_window_is_freed_though_it_has_a_name(real):
    def settle_slid(self, pages):
        self.settle(pages)
        return pages

    return settle_slid


@fault(CacheManager, "slide", "windows")
def page_behind_a_window_is_freed_though_another_row_holds_it(real):
    def slide(self, rows, computed):
        cut = self.tables.cut

        def cut_and_forget_the_others(group, row, first):
            gone = cut(group, row, first)
            self.allocator.counts[gone] = 1
            return gone

        self.tables.cut = cut_and_forget_the_others
        real(self, rows, computed)
        del self.tables.cut

    return slide


# The line of those that go first


@fault(PrefixCache, "settle_slid", "windows")
def pages_behind_windows_go_last(real):
    return lambda self, pages: self.settle(pages)


@fault(PrefixCache, "settle_slid", "windows")
def page_that_left_a_window_last_goes_first(real):
    def settle_slid(self, pages):
        before, self.slid = self.slid, {}
        free = real(self, pages)
        self.slid |= before
        return free

    return settle_slid


@fault(PrefixCache, "forget", "windows")
def page_that_was_forgotten_stays_in_line(real):
    def forget(self, nodes, cause):
        slid = self.slid.copy()
        free = real(self, nodes, cause)
        self.slid = slid
        return free

    return forget


@fault(PrefixCache, "revive", "windows")
def page_that_a_hit_holds_stays_in_line(real):
    def revive(self, nodes, pages):
        slid = self.slid.copy()
        real(self, nodes, pages)
        self.slid = slid

    return revive


@fault(PrefixCache, "_reach_all", "windows")
def last_resort_takes_what_is_held(real):
    return lambda self: self.slid.update(dict.fromkeys(np.flatnonzero(self.index.node_of != NONE).tolist()))


# Nodes that lose pages


@fault(PrefixIndex, "unbind", "windows")
def node_keeps_a_page_that_was_given_away(real):
    def unbind(self, pages):
        nodes = self.node_of[pages].copy()
        self.node_of[pages] = NONE
        return nodes

    return unbind


@fault(PrefixIndex, "unbind", "windows")
def name_is_kept_after_the_page_was_given_away(real):
    def unbind(self, pages):
        nodes = self.node_of[pages].copy()
        real(self, pages)
        self.node_of[pages] = nodes
        return nodes

    return unbind


@fault(PrefixCache, "_empty_leaf", "windows")
def empty_nodes_stay(real):
    return lambda self, node: False


@fault(PrefixCache, "_empty_leaf", "windows")
def empty_nodes_go_before_what_comes_after_them(real):
    return lambda self, node: bool((self.index.pages[:, node] == NONE).all())


@fault(PrefixIndex, "bind", "windows")
def lost_page_is_not_found_again_once_it_is_computed_anew(real):
    return lambda self, node, pages: None


@fault(PrefixIndex, "bind", "windows")
def page_that_takes_a_lost_ones_place_has_no_name(real):
    def bind(self, node, pages):
        real(self, node, pages)
        self.node_of[pages[pages != NONE]] = NONE

    return bind


@fault(PublishedPages, "_take_over", "windows")
def page_is_taken_over_from_the_wrong_group(real):
    def take_over(self, row, index, node, after_step):
        pages = self.prefix.index.pages
        pages[:, node] = pages[::-1, node]
        return real(self, row, index, node, after_step)

    return take_over


# Finding


@fault(lookup_module, "valid_pages", "windows")
def page_that_is_lacking_in_a_window_is_overlooked(real):
    return lambda pages, layout: pages.shape[1]


@fault(lookup_module, "valid_pages", "windows")
def hit_ends_at_the_first_page_that_is_lacking(real):
    def valid_pages(pages, layout):
        whole = (pages != NONE).all(axis=0)
        return real(pages[:, : pages.shape[1] if whole.all() else int(whole.argmin())], layout)

    return valid_pages


@fault(KVLayout, "pages_before", "windows")
def page_that_a_window_begins_in_is_not_seen(real):
    return lambda self, window: max(1, (window - 1) // self.page_size)


@fault(lookup_module, "firsts", "windows")
def hit_holds_a_page_too_few(real):
    return lambda layout, pages: tuple(min(pages, first + 1) for first in real(layout, pages))


@fault(lookup_module, "firsts", "windows")
def hit_holds_a_page_too_many(real):
    return lambda layout, pages: tuple(max(0, first - 1) for first in real(layout, pages))


@fault(PageTables, "start", "windows")
def table_of_a_hit_starts_at_its_first_page(real):
    return lambda self, group, row, index, pages: real(self, group, row, 0, pages)


@fault(PrefixIndex, "complete", "windows")
def page_is_thought_to_be_here_though_a_group_lost_it(real):
    return lambda self, name: name in self._node_of_hash


# Growing, and what is asked for


@fault(CacheManager, "grow", "windows")
def window_gets_slots_for_the_whole_prompt(real):
    def grow(self, row, start, end):
        ahead, self.ahead = self.ahead, MOST_TOKENS
        try:
            return real(self, row, start, end)
        finally:
            self.ahead = ahead

    return grow


@fault(CacheManager, "grow", "windows")
def window_gets_a_token_less_than_may_be_in_flight(real):
    def grow(self, row, start, end):
        self.ahead -= 1
        try:
            return real(self, row, start, end)
        finally:
            self.ahead += 1

    return grow


def of_the_first_group(real):
    """Asks of the first group what is to be asked of all."""

    def answer(self, rows, numbers):
        held, self.tables.held = self.tables.held, self.tables.held[:1]
        try:
            return real(self, rows, numbers)
        finally:
            self.tables.held = held

    return answer


for question in ("covers", "lack_a_page"):
    of_the_first_group.__name__ = f"{question}_of_the_first_group_alone"
    fault(CacheManager, question, "windows")(of_the_first_group)


@fault(CacheManager, "slots_unused", "windows")
def slots_unused_of_the_first_group_alone(real):
    def slots_unused(self, scheduled):
        return int(self.tables.held[0].sum()) * self.layout.page_size - scheduled

    return slots_unused


@fault(CacheManager, "needed", "windows")
def need_is_a_page_too_small(real):
    return lambda self, match, tokens: max(0, real(self, match, tokens) - 1)


@fault(CacheManager, "needed", "windows")
def need_is_that_of_full_attention(real):
    def needed(self, match, tokens):
        windows, self._windows = self._windows, {}
        try:
            return real(self, match, tokens)
        finally:
            self._windows = windows

    return needed


@fault(CacheManager, "pages_still_to_take", "windows")
def nothing_is_promised(real):
    return lambda self, rows, tokens: 0


@fault(CacheManager, "pages_still_to_take", "windows")
def more_is_promised_than_a_window_takes(real):
    def promised(self, rows, tokens):
        ahead, self.ahead = self.ahead, MOST_TOKENS
        try:
            return real(self, rows, tokens)
        finally:
            self.ahead = ahead

    return promised


@fault(KVLayout, "pages_within", "windows")
def window_is_thought_to_begin_where_a_page_begins(real):
    return lambda self, window, ahead: real(self, window, ahead) - 1


@fault(CacheManager, "fork", "windows")
def fork_takes_the_first_page_it_shares_for_the_first_of_all(real):
    def fork(self, parent, child, owner=-1):
        real(self, parent, child, owner)
        self.tables.first[:, child] = 0

    return fork


@fault(PublishedPages, "_nodes_of", "windows")
def distrusted_row_is_asked_for_what_it_still_holds_alone(real):
    def nodes_of(self, row):
        nodes = self.prefix.index.node_of[self.tables.pages_of(0, row)]
        return nodes[nodes != NONE]

    return nodes_of


WINDOWED = [name for name, fault in FAULTS.items() if fault.catcher == "windows"]
