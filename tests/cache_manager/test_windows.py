"""Layer groups with sliding windows: what a sequence keeps, what is found again, and which pages go first."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.layout import MOST_TOKENS, KVLayout
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from tests.cache_manager.sample import chain, compute, leave, match, start
from tests.cache_manager.sequences import make_layout, make_windowed, table
from tests.cache_manager.windows import Windows

FULL_AND_THREE = Windows((None, 3), ahead=8)
A = [1, 1, 1, 1, 1, 1, 1, 1]


def made(windows: Windows = FULL_AND_THREE, pages: int = 32, rows: int = 3) -> CacheManager:
    return make_windowed(page_size=2, pages=pages, rows=rows, windows=windows)


def opened(manager: CacheManager, row: int, tokens: Sequence[int]) -> int:
    """A row that goes on from what is cached of the tokens; how many of them."""
    names = chain(manager, tokens)
    found = manager.lookup.match(names, len(tokens) - 1)
    manager.open(row, row, names, found)
    return found.tokens


def run(manager: CacheManager, row: int, tokens: Sequence[int], chunk: int = 2) -> None:
    compute(manager, row, opened(manager, row, tokens), len(tokens), chunk)


# Pages that a sequence keeps


@pytest.mark.parametrize(("window", "ahead"), [(1, 1), (2, 1), (3, 2), (7, 5), (16, 3)])
@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_a_long_sequence_keeps_all_of_a_full_group_and_what_is_seen_of_a_window(page_size, window, ahead):
    manager = make_windowed(page_size, pages=256, rows=1, windows=Windows((None, window), ahead))
    layout, most = manager.layout, 0
    opened(manager, 0, [1] * 30 * ahead)
    for computed in range(0, 30 * ahead, ahead):
        manager.grow(0, computed, computed + ahead)
        full, windowed = table(manager, 0)
        assert len(full) == -(-(computed + ahead) // page_size)
        most = max(most, len(windowed))
        assert len(manager.tables.row(0)) <= layout.pages_for(computed + ahead, ahead)
        manager.published.publish(0, computed + ahead, None)
        manager.slide(np.array([0], np.int32), np.array([computed + ahead], np.int32))
    assert layout.pages_within(window, ahead) - 1 <= most <= layout.pages_within(window, ahead)
    verify(manager)


def test_what_is_let_go_can_be_had_at_once():
    manager = made(Windows((3,), ahead=2), pages=3)
    run(manager, 0, [1] * 20)
    assert (manager.pool.free, manager.pool.returning, manager.tables.first[0, 0]) == (2, 0, 9)


def test_a_window_gets_slots_for_what_may_be_in_flight_and_a_full_group_for_all():
    manager = made(Windows((None, 3), ahead=2))
    opened(manager, 0, A)
    assert manager.grow(0, 0, 8)
    assert [len(pages) for pages in table(manager, 0)] == [4, 1]
    rows, ends = np.array([0], np.int32), np.array([2], np.int32)
    assert manager.covers(rows, ends)
    assert not manager.covers(rows, ends + 1)
    assert not manager.lack_a_page(rows, ends + 1), "the full group does not lack one"
    assert manager.slots_unused(scheduled=2) == 6


def test_rows_let_go_of_nothing_without_windows():
    manager = make_windowed(page_size=2, pages=8, rows=1, windows=Windows((None, None)))
    run(manager, 0, A)
    assert [len(pages) for pages in table(manager, 0)] == [4, 4]


def test_a_page_that_another_row_holds_stays():
    manager = made(Windows((2,), ahead=3))
    start(manager, 0, [1, 1, 1])
    manager.fork(0, 1)
    shared = table(manager, 0)[0][0]
    manager.published.chains[0].extend(np.array([1, 1, 1, 1], np.int32))
    compute(manager, 0, 3, 6, 1)
    assert shared not in table(manager, 0)[0]
    assert table(manager, 1)[0][0] == shared
    assert manager.allocator.counts[shared] == 1
    verify(manager)


def test_what_was_not_published_is_free_once_it_leaves_its_window():
    manager = made(Windows((2,), ahead=2), pages=3)
    manager.open(0)
    compute(manager, 0, 0, 20, 2)
    assert (manager.allocator.free, manager.prefix.cached) == (2, 0)


# Pages that are found again


def windows_lost(manager: CacheManager, pages: int) -> None:
    """Evicts `pages` of the pages that left windows."""
    manager.pool.shrink_cache(manager.prefix.cached - pages)


def test_a_hit_starts_in_mid_window():
    manager = made()
    leave(manager, A)
    assert opened(manager, 0, [*A, 2]) == 8
    assert manager.tables.first[:, 0].tolist() == [0, 3]
    assert [len(pages) for pages in table(manager, 0)] == [4, 1]


@pytest.mark.parametrize(("window", "before"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_a_hit_holds_what_the_next_token_sees_and_a_page_to_go_on_from(window, before):
    manager = made(Windows((None, window), ahead=8))
    leave(manager, A)
    opened(manager, 0, [*A, 2])
    assert manager.tables.first[1, 0] == 4 - before
    assert manager.layout.pages_before(window) == before


def test_a_prefix_is_valid_where_all_groups_have_what_the_next_token_sees():
    manager = made(Windows((None, 4), ahead=2))
    run(manager, 0, A)
    assert [match(manager, A[:n]).tokens for n in (2, 4, 6, 8)] == [2, 4, 6, 8]
    windows_lost(manager, 1)
    assert [match(manager, A[:n]).tokens for n in (2, 4, 6, 8)] == [0, 0, 6, 8], "from 4 on, two pages are seen"
    windows_lost(manager, 1)
    assert [match(manager, A[:n]).tokens for n in (2, 4, 6, 8)] == [0, 0, 0, 8]


def test_a_prefix_is_the_longest_that_is_valid_in_all_groups():
    manager = made(Windows((3, None, 5), ahead=2))
    run(manager, 0, A)
    manager.release(0, None)
    assert match(manager, [*A, 2]).tokens == 8
    group, last = 2, manager.prefix.index.find(chain(manager, A), 4)[-1]
    manager.prefix._evict_slid(manager.prefix.index.pages[group, [last]])
    manager.prefix.cached -= 1
    assert match(manager, [*A, 2]).tokens == 6, "the last page is there in two groups of three"


def test_a_lost_page_is_found_again_once_somebody_has_computed_it_anew():
    manager = made()
    run(manager, 0, A)
    manager.release(0, None)
    windows_lost(manager, 2)
    before = table_of_nodes(manager, A)
    assert before[1][:2] == [-1, -1]
    run(manager, 1, A[:5])
    assert table_of_nodes(manager, A)[0] == before[0], "the second takes over what the first one left"
    assert match(manager, A[:4]).tokens == 4
    verify(manager)


def table_of_nodes(manager: CacheManager, tokens: Sequence[int]) -> list[list[int]]:
    names = chain(manager, tokens)
    return manager.prefix.index.pages[:, manager.prefix.index.find(names, len(names.hashes))].tolist()


# Pages that go first


def test_pages_behind_windows_go_before_ends_of_sequences_and_longest_gone_first():
    manager = made()
    leave(manager, [2, 2, 2, 2])
    run(manager, 0, A)
    slid = table_of_nodes(manager, A)[1][:3]
    assert list(manager.prefix.slid) == slid
    for gone in (1, 2, 3):
        windows_lost(manager, 1)
        assert list(manager.prefix.slid) == slid[gone:]
        assert match(manager, [2, 2, 2, 2]).tokens == 4
    windows_lost(manager, 1)
    assert match(manager, [2, 2, 2, 2]).tokens == 2


def test_a_hit_takes_pages_out_of_the_line():
    manager = made()
    run(manager, 0, A)
    slid = table_of_nodes(manager, A)[1][:3]
    assert opened(manager, 1, A[:5]) == 4
    assert list(manager.prefix.slid) == [slid[0], slid[2]]
    manager.release(1, None)
    assert list(manager.prefix.slid) == [slid[0], slid[2]], "its request has ended: it is an end like others"
    verify(manager)


def test_what_nobody_holds_goes_last_where_others_hold_what_comes_after():
    """A page in a window, of a node that is held: in no line, and no end of a sequence."""
    manager = made()
    leave(manager, A)
    opened(manager, 0, [*A, 2])
    assert (manager.prefix.cached, len(manager.prefix.slid), len(manager.prefix.policy)) == (3, 0, 0)
    windows_lost(manager, 1)
    assert sum(page == -1 for page in table_of_nodes(manager, A)[1]) == 1
    assert match(manager, [*A, 2]).tokens == 8
    verify(manager)


@pytest.mark.parametrize("windows", [(None, 3), (3,), (2, 5), (3, 3)])
def test_after_all_have_ended_every_page_is_free_or_cached_and_can_be_had(windows):
    manager = made(Windows(windows, ahead=2), pages=64)
    run(manager, 0, A)
    run(manager, 1, [*A, *A])
    run(manager, 2, [*A[:4], 2, 2, 2])
    for row in range(3):
        manager.release(row, None)
    assert manager.allocator.free + manager.prefix.cached == manager.pool.free == 64
    verify(manager)
    manager.pool.shrink_cache(0)
    assert len(manager.prefix.index) == manager.prefix.cached == 0
    verify(manager)


def test_a_node_without_pages_stays_as_long_as_others_are_found_through_it():
    manager = made(Windows((3,), ahead=2))
    run(manager, 0, A)
    manager.release(0, None)
    windows_lost(manager, 3)
    assert [page == -1 for page in table_of_nodes(manager, A)[0]] == [True, True, True, False]
    assert match(manager, [*A, 2]).tokens == 8
    windows_lost(manager, 1)
    assert len(manager.prefix.index) == 0


# Pages that are asked for


@st.composite
def admissions(draw) -> tuple[int, Windows, int, int, bool]:
    """page size, windows, pages of the prompt that are cached, tokens of the prompt, whether another one holds them."""
    size = draw(st.integers(1, 4))
    window = st.one_of(st.none(), st.integers(1, 3 * size + 1))
    windows = Windows(tuple(draw(st.lists(window, min_size=1, max_size=3))), draw(st.integers(1, 3 * size)))
    cached = draw(st.integers(0, 6))
    return size, windows, cached, size * cached + draw(st.integers(1, 8 * size)), draw(st.booleans())


@given(admissions())
def test_who_has_the_pages_that_are_needed_lacks_none_until_the_prompt_is_computed(admission):
    size, windows, cached, tokens, shared = admission
    manager = make_windowed(size, pages=200, rows=2, windows=windows)
    prompt = [*range(tokens)]
    if cached:
        run(manager, 0, prompt[: cached * size], chunk=1)
    if not shared:
        manager.release(0, None)
    names = chain(manager, prompt)
    found = manager.lookup.match(names, tokens - 1)
    free, needed = manager.pool.free, manager.needed(found, tokens)
    manager.open(1, 1, names, found)
    assert manager.grow(1, found.tokens, tokens)
    most = 200
    for computed in range(found.tokens, tokens):
        held = len(manager.tables.row(1))
        most = min(most, held + manager.pages_still_to_take(np.array([1], np.int32), np.array([tokens], np.int32)))
        assert held <= most, "more was taken on than was promised"
        compute(manager, 1, computed, computed + 1, 1)
        assert manager.grow(1, computed + 1, min(tokens, computed + 1 + windows.ahead))
        assert free - manager.pool.free <= needed


# Arithmetic


@st.composite
def layouts(draw) -> KVLayout:
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=4))
    return make_layout(draw(st.integers(1, 16)), len(windows), windows)


@given(layouts(), st.integers(0, 500), st.integers(1, 60))
def test_tokens_in_is_the_inverse_of_pages_for(layout, pages, ahead):
    tokens = layout.tokens_in(pages, ahead)
    assert layout.pages_for(tokens, ahead) <= pages
    more = tokens + layout.page_size
    assert layout.pages_for(more, ahead) > pages or more > MOST_TOKENS
    assert tokens % layout.page_size == 0


@given(layouts(), st.integers(0, 500), st.integers(1, 60))
def test_a_window_saves_pages_and_never_costs_any(layout, tokens, ahead):
    whole = -(-tokens // layout.page_size)
    full = sum(layout.window(group) is None for group in range(len(layout.groups)))
    assert full * whole <= layout.pages_for(tokens, ahead) <= len(layout.groups) * whole
    assert layout.pages_for(tokens, ahead) <= layout.pages_for(tokens + 1, ahead)
    assert layout.pages_for(tokens) == layout.pages_for(tokens, tokens + 1)


def test_known_size_of_a_cache_of_32768_tokens_of_which_27_layers_of_32_see_1024():
    groups = tuple((layer,) for layer in range(32))
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(32))
    assert windows.count(None) == 5
    cache = KVLayout.uniform(groups, kv_heads=8, head_dim=128, element_bytes=2, page_size=16, windows=windows)
    assert 0.78 <= cache.pages_for(32_768, ahead=1) * cache.page_bytes / 1e9 < 0.79
    assert round(cache.pages_for(32_768) * cache.page_bytes / 1e9, 2) == 4.29, "all at once, as without windows"


def test_a_window_below_one_token_is_refused():
    with pytest.raises(ValueError, match="each must be at least 1 token"):
        make_layout(2, 2, (None, 0))
