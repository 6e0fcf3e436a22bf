"""Laws of what an engine gives another one of its pages: all that the next token needs, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.layout import KVLayout, KVShape, LayerGroup
from cache_manager.prefix import NONE
from cache_manager.states import RecurrentLayer
from cache_manager.transfers import TransferredPage, pages_to_transfer
from tests.support.examples import examples

SHAPE, SIZE = KVShape(1, 16, 16), 4


def make_layout(windows: list[int | None], units: int) -> KVLayout:
    groups = tuple(LayerGroup((i,), SHAPE, window) for i, window in enumerate(windows))
    return KVLayout(groups, 4, SIZE, recurrent=(RecurrentLayer(9, (512,) * units),) if units else ())


def seen_after(layout: KVLayout, table: int, count: int) -> list[int]:
    """Returns the pages among the first `count` that the token after them reads."""
    if table in layout.state_tables:
        return [count - 1] if count else []
    window = layout.window(table)
    # A row that goes on publishes its next page under the node of the one before it, so it holds that one always.
    return [i for i in range(count) if window is None or i == count - 1 or (i + 1) * SIZE > count * SIZE - (window - 1)]


@st.composite
def runs(draw) -> tuple[KVLayout, np.ndarray]:
    windows = draw(st.sampled_from([[None], [None, 1], [None, 6], [None, 5, 13], [9], [4, 6]]))
    layout = make_layout(windows, draw(st.integers(0, 3)) if None in windows else 0)
    count = draw(st.integers(0, 12))
    pages = np.arange(layout.tables * count, dtype=np.int32).reshape(layout.tables, count)
    for table in range(layout.tables):
        if layout.window(table) is not None:
            lost = draw(st.lists(st.booleans(), min_size=count, max_size=count))
            pages[table, np.flatnonzero(lost)] = NONE
    return layout, pages


@settings(max_examples=examples(200), deadline=None)
@given(runs())
def test_what_is_given_is_what_the_token_after_the_longest_prefix_reads(drawn: tuple[KVLayout, np.ndarray]) -> None:
    layout, pages = drawn
    given_pages = pages_to_transfer(pages, layout)
    tables = range(layout.tables)
    right = [
        n for n in range(pages.shape[1] + 1)
        if all(pages[table, i] != NONE for table in tables for i in seen_after(layout, table, n))
    ]  # fmt: skip
    assert given_pages.shape == (layout.tables, max(right))
    expected = np.full_like(given_pages, NONE)
    for table in tables:
        these = seen_after(layout, table, max(right))
        expected[table, these] = pages[table, these]
    assert np.array_equal(given_pages, expected)


def test_a_page_is_found_by_its_table() -> None:
    content = np.arange(6, dtype=np.uint8).reshape(3, 2)
    page = TransferredPage(np.array([True, False, True, True]), content)
    assert [page.of(table).tolist() for table in (0, 2, 3)] == content.tolist()


@pytest.mark.parametrize("units", [0, 1])
def test_no_page_is_no_transfer(units: int) -> None:
    layout = make_layout([None, 6], units)
    assert pages_to_transfer(np.empty((layout.tables, 0), np.int32), layout).shape == (layout.tables, 0)
