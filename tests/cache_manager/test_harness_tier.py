"""Bugs planted in the host tier's books: random play, or the test named with the bug, must notice each of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import pytest

from cache_manager.allocator import LedgerError
from cache_manager.changes import PageChanges
from cache_manager.lookup import PrefixLookup
from cache_manager.manager import CacheManager
from cache_manager.tables import PageTables
from cache_manager.tier import HostTier
from tests.cache_manager import test_tier
from tests.support.planted import planted

EPISODES = 60
CAUGHT = (AssertionError, LedgerError, IndexError, KeyError)
Make = Callable[[Callable], Callable]


def play() -> None:
    for seed in range(EPISODES):
        test_tier.episode(seed, operations=400, a_check=4)


FAULTS: dict[str, tuple[type, str, Make, Callable[[], None]]] = {}


def fault(target: type, name: str, catcher: Callable[[], None] = play) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        FAULTS[make.__name__] = (target, name, make, catcher)
        return make

    return register


@fault(HostTier, "_take")
def slot_is_given_out_twice(real):
    def take(self, index, count):
        slots = real(self, index, count)
        if slots:
            self._free.append(slots[0])
        return slots

    return take


@fault(HostTier, "_drop")
def slots_are_lost(real):
    def drop(self, name):
        free = len(self._free)
        real(self, name)
        del self._free[free:]

    return drop


@fault(HostTier, "reserve")
def copy_that_is_due_back_may_be_overwritten(real):
    def reserve(self, names):
        real(self, names)
        self._read = Forgetful(self._read)

    return reserve


class Forgetful(dict):
    """Knows what is in it, and denies it."""

    def __contains__(self, name):
        return False


@fault(HostTier, "fetch")
def copies_do_not_come_back(real):
    return lambda self, names, pages, step: real(self, names, pages, step)[1:]


@fault(HostTier, "fetch")
def copies_come_back_to_each_other_s_pages(real):
    def fetch(self, names, pages, step):
        moves = real(self, names, pages, step)
        return [(slot, page) for (slot, _), (_, page) in zip(moves, reversed(moves), strict=True)]

    return fetch


@fault(HostTier, "keep")
def wrong_page_goes_out(real):
    def keep(self, index, run, new=True):
        return [(max(page - 1, 0), slot) for page, slot in real(self, index, run, new)]

    return keep


@fault(HostTier, "_drop_after")
def copy_stays_without_what_comes_before_it(real):
    return lambda self, name, index: None


@fault(HostTier, "forget")
def copies_of_what_is_not_trusted_stay(real):
    return lambda self, names: None


@fault(HostTier, "clear")
def copies_outlive_a_reset(real):
    return lambda self: None


@fault(HostTier, "find")
def copy_of_another_sequence_is_found(real):
    def find(self, chain, start, most):
        found = real(self, chain, start, most)
        others = [name for name in self.copies if name not in found]
        return found + others[:1] if start + len(found) < most else found

    return find


@fault(HostTier, "find", test_tier.test_a_copy_of_another_content_with_the_same_name_is_not_found)
def copy_is_found_by_its_name_alone(real):
    return lambda self, chain, start, most: list(takewhile(self.copies.__contains__, chain.hashes[start:most]))


@fault(HostTier, "find", test_tier.test_a_copy_that_comes_after_another_page_is_not_found)
def copy_is_found_whatever_comes_before_it(real):
    def find(self, chain, start, most):
        found = takewhile(self.copies.__contains__, chain.hashes[start:most])
        return [name for i, name in enumerate(found, start) if self.copies[name].content == chain.contents[i]]

    return find


@fault(HostTier, "keep", test_tier.test_a_copy_makes_way_for_another_content_with_its_name)
def copy_of_another_content_stays_for_what_goes_out(real):
    def keep(self, index, run, new=True):
        for node, name in zip(run, index.hashes(run), strict=True):
            if name in self.copies:
                self.copies[name] = replace(self.copies[name], content=index.content(node))
        return real(self, index, run, new)

    return keep


@fault(CacheManager, "arrived")
def row_goes_on_from_a_spoilt_copy(real):
    def arrived(self, step, lost):
        real(self, step, lost)
        return []

    return arrived


@fault(PrefixLookup, "_valid")
def hit_needs_no_page_of_a_window(real):
    return lambda self, nodes, kept, come: len(nodes) + len(kept) + len(come)


@fault(PageChanges, "not_copied")
def copy_comes_back_to_a_page_that_was_freed(real):
    def not_copied(self, pages):
        ins = dict(self._ins)
        real(self, pages)
        self._ins = ins

    return not_copied


@fault(PageTables, "between")
def stale_entry_of_a_table_is_published(real):
    return lambda self, row, start, end: self.pages[:, row, start:end].copy()


@pytest.mark.parametrize("name", planted(FAULTS, rare=["stale_entry_of_a_table_is_published"]))
@pytest.mark.sample(2)
def test_harness_catches(name, monkeypatch):
    target, attribute, make, catcher = FAULTS[name]
    monkeypatch.setattr(target, attribute, make(getattr(target, attribute)))
    with pytest.raises(CAUGHT):
        catcher()


def test_enough_is_planted():
    assert len(FAULTS) >= 17
