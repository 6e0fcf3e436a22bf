"""A step's attention is divided: each key that a token sees is in one piece of it, whatever is shared."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import sharing
from model.attention.backend import StepShape
from model.attention.visible_keys import VisibleKeys
from model.gpu.pieces import Division, divide
from model.gpu.tuning import TileSizes, Tuning
from tests.support.examples import examples

TUNING = Tuning(few=TileSizes(16, 16, 32, 4, 2), many=TileSizes(32, 16, 64, 4, 2), shared=TileSizes(64, 16, 32, 4, 2))
TILE_HEADS = 8


def shape_of(slices: list[tuple[int, int]], tables: np.ndarray, page: int) -> StepShape:
    """slices: (tokens before, tokens now) of each row."""
    packed = np.array([(row, before, now) for row, (before, now) in enumerate(slices)], np.int32)
    positions = np.concatenate([np.arange(before, before + now) for before, now in slices])
    return StepShape(packed, positions, np.zeros((1, len(positions)), int), tables[None], np.zeros(len(slices), int))


def division(
    slices: list[tuple[int, int]],
    tables: np.ndarray,
    page: int,
    window: int | None = None,
    most: int = 10**6,
    chunked: bool = False,
) -> tuple[Division, VisibleKeys]:
    seen = VisibleKeys.of(shape_of(slices, tables, page), window, chunked)
    count = np.array([now for _, now in slices])
    rows = np.stack((np.arange(len(count)), np.cumsum(count) - count, count), axis=1)
    return divide(rows, len(seen.first), seen, tables, page, TUNING, TILE_HEADS, most), seen


def check(made: Division, seen: VisibleKeys, tables: np.ndarray, page: int, row_of: np.ndarray) -> None:
    """Raises AssertionError unless each token has each of its keys once, from its own pages."""
    seen_keys, parts = Counter[tuple[int, int]](), set[tuple[int, int]]()
    told = set[tuple[int, int]]()
    for number, part in enumerate(made.rounds):
        for kind in part.kinds:
            for line, place, count, begin, end, chunk, *_ in kind.pieces.tolist():
                assert count <= kind.sizes.tokens(TILE_HEADS)
                for token in made.order[place : place + count].tolist():
                    keys = np.arange(max(begin, int(seen.first[token])), min(end, int(seen.last[token])))
                    seen_keys.update((token, key) for key in keys.tolist())
                    mine = tables[row_of[token], keys // page]
                    np.testing.assert_array_equal(tables.reshape(-1)[line + keys // page], mine)
                    if chunk >= 0:
                        at = int(made.first_part[token]) + chunk
                        assert 0 <= at < part.parts
                        assert (number, at) not in parts, "two write to one place"
                        parts.add((number, at))
        for _, first, count, _ in part.joins.tolist():
            told |= {(number, at) for at in range(first, first + count)}
    assert parts == told, "what is written is what is joined"
    expected = {(token, key) for token in range(len(seen.first)) for key in range(seen.first[token], seen.last[token])}
    assert set(seen_keys) == expected
    assert set(seen_keys.values()) == {1}


lengths = st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 5, 70, 300]))


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(lengths, min_size=1, max_size=6),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([None, 9, 90]),
    st.booleans(),
)
def test_every_key_is_seen_once(slices: list[tuple[int, int]], page: int, window: int | None, chunked: bool) -> None:
    width = max(before + now for before, now in slices) // page + 2
    tables = np.arange(len(slices) * width, dtype=np.int32).reshape(len(slices), width)
    made, seen = division(slices, tables, page, window, chunked=chunked)
    check(made, seen, tables, page, np.repeat(np.arange(len(slices)), [now for _, now in slices]))


@settings(deadline=None, max_examples=examples(40))
@given(st.data(), st.sampled_from([7, 16, 32]))
def test_what_is_shared_is_read_from_pages_that_all_have(data: st.DataObject, page: int) -> None:
    """Sequences that begin as an earlier one does, up to any page; decodes all of them, but for one prompt."""
    width, sequences = 300 // page + 1, data.draw(st.integers(4, 24))
    tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    for row in range(1, sequences):
        like, pages = data.draw(st.integers(0, row - 1)), data.draw(st.integers(0, width))
        tables[row, :pages] = tables[like, :pages]
    slices = [(data.draw(st.integers(0, 290)), 1) for _ in range(sequences)]
    slices[data.draw(st.integers(0, sequences - 1))] = (3, 20)
    before, sharing.SHARERS = sharing.SHARERS, 2
    try:
        made, seen = division(slices, tables, page)
    finally:
        sharing.SHARERS = before
    check(made, seen, tables, page, np.repeat(np.arange(sequences), [now for _, now in slices]))


def test_a_prompt_that_all_have_is_read_once_for_as_many_as_a_tile_holds() -> None:
    """And once more for what only some go on with."""
    tables = np.arange(20 * 16, dtype=np.int32).reshape(20, 16)
    tables[:, :10] = tables[0, :10]  # 160 tokens: 5 chunks
    tables[:9, 10:13] = tables[0, 10:13]  # and for nine of them 48 more: one chunk, and a half that each reads
    made, _ = division([(215, 1)] * 20, tables, 16)
    ((*own, shared),) = (part.kinds for part in made.rounds)
    assert shared.sizes is TUNING.shared
    at_once = TUNING.shared.tokens(TILE_HEADS)
    assert len(shared.pieces) == 5 * -(-20 // at_once) + 1 * -(-9 // at_once)
    (alone,) = own
    assert len(alone.pieces) == 20 * 7 - 20 * 5 - 9
    assert made.order[20:40].tolist() == list(range(20))


@pytest.mark.parametrize("sequences", [sharing.SHARERS - 1, sharing.SHARERS])
def test_few_that_share_read_for_themselves(sequences: int) -> None:
    tables = np.zeros((sequences, 16), np.int32)
    tables[:, 8:] = np.arange(1, 1 + 8 * sequences).reshape(sequences, 8)
    made, _ = division([(150, 1)] * sequences, tables, 16)
    kinds = [kind.sizes for part in made.rounds for kind in part.kinds]
    assert (TUNING.shared in kinds) == (sequences == sharing.SHARERS)


def test_a_round_has_no_more_parts_than_there_is_room_for() -> None:
    """Unless one tile of tokens alone has more; then nothing is shared."""
    tables = np.zeros((12, 30), np.int32)
    tables[:, 12:] = np.arange(1, 1 + 18 * 12).reshape(12, 18)
    slices = [(300, 1)] * 10 + [(230, 40), (31, 2)]
    made, seen = division(slices, tables, 16, most=25)
    assert len(made.rounds) > 3
    for part in made.rounds:
        assert part.parts <= 25 or len({tuple(piece[:2]) for kind in part.kinds for piece in kind.pieces.tolist()}) == 1
    check(made, seen, tables, 16, np.repeat(np.arange(12), [now for _, now in slices]))
