"""Figures as characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import admin_service_pb2 as pb

from rpc.terminal.cells import Cell, folded, parts, spark

STATES = st.lists(st.sampled_from([pb.PAGE_STATE_FREE, pb.PAGE_STATE_HELD, pb.PAGE_STATE_CACHED]), max_size=400)


@given(STATES, st.integers(1, 90))
def test_cells_have_each_page_once(states: list[int], most: int) -> None:
    each, cells = folded(np.array(states, np.uint8), most)
    assert len(cells) == -(-len(states) // each) <= most
    sizes = [min(each, len(states) - start) for start in range(0, len(states), each)]
    for state, share in ((pb.PAGE_STATE_HELD, "held"), (pb.PAGE_STATE_CACHED, "cached")):
        counted = sum(getattr(cell, share) * size for cell, size in zip(cells, sizes, strict=True))
        assert counted == pytest.approx(states.count(state))


def test_a_cell_is_darker_the_more_of_it_is_used() -> None:
    assert [Cell(held, 0).glyph for held in (0, 0.1, 0.5, 0.75, 1)] == ["·", "░", "▒", "▓", "█"]
    assert [Cell(0, cached).glyph for cached in (0.25, 0.5, 0.75, 1)] == ["⠂", "⠆", "⠶", "⠿"]
    assert Cell(0.5, 0.5).kind == "held"
    assert Cell(0.25, 0.5).glyph == "⠶"
    assert Cell(1, 0, set_aside=True).glyph == "!"


def test_spark() -> None:
    assert spark([1, 8, None, 4], 6) == "  ▁█ ▄"
    assert spark(list(range(100)), 3) == "███"
    assert spark([0, 0], 2) == "▁▁"
    assert spark([1, 2], 0) == spark([], 0) == ""


@given(st.lists(st.floats(0, 1), min_size=1, max_size=3), st.integers(3, 40))
def test_parts_fit_and_show_what_is_there(shares: list[float], width: int) -> None:
    whole = max(1.0, sum(shares))
    made = parts([share / whole for share in shares], width)
    assert sum(made) <= width
    assert [share > 0 for share in shares] == [part > 0 for part in made]
