"""An executor's input batch: rows as plans make them, work packed by slice, and halves that are parts of the whole."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.input_batch import InputBatch, Packed, StepSlices
from scheduler.controls import Controls
from scheduler.step import Join, StepPlan

PAGE = 4
ROWS = 8
CONTROLS = Controls(0.0, 1.0, 0, 0.0, 0)


@dataclass(frozen=True)
class Sequence:
    """A row's tokens known at its join, the number of them that are prompt, and the slice to compute."""

    row: int
    known: tuple[int, ...]
    prompt: int
    start: int
    count: int
    draws: bool


@st.composite
def batches(draw: st.DrawFn) -> list[Sequence]:
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    result = []
    for row in rows:
        known = tuple(draw(st.lists(st.integers(0, 999), min_size=1, max_size=40)))
        prompt = draw(st.integers(1, len(known)))
        start = draw(st.integers(0, len(known) - 1))
        count = draw(st.integers(1, len(known) - start))
        draws = start + count == len(known) and draw(st.booleans())
        result.append(Sequence(row, known, prompt, start, count, draws))
    return result


def pages_of(sequence: Sequence) -> NDArray[np.int32]:
    """Some pages, other ones for each row."""
    return np.arange(-(-len(sequence.known) // PAGE), dtype=np.int32) * ROWS + sequence.row


NONE = np.empty(0, np.int32)


def plan(
    step: int = 0,
    leaves: NDArray[np.int32] = NONE,
    joins: tuple[Join, ...] = (),
    grown: NDArray[np.int32] = NONE,
    slices: NDArray[np.int32] = NONE,
    logits: NDArray[np.int32] = NONE,
) -> StepPlan:
    none = NONE.reshape(0, 2)
    shaped = (grown.reshape(-1, 4), none, none, none, NONE, slices.reshape(-1, 3), logits.reshape(-1, 2), none)
    return StepPlan(step, leaves, joins, *shaped)


def plan_of(batch: list[Sequence], leaves: list[int] | None = None) -> StepPlan:
    grown = [(0, s.row, index, page) for s in batch for index, page in enumerate(pages_of(s).tolist())]
    slices = [(s.row, s.start, s.count) for s in batch]
    ends = np.cumsum([s.count for s in batch])
    logits = [(end - 1, s.row) for s, end in zip(batch, ends.tolist(), strict=True) if s.draws]
    joins = tuple(Join(s.row, np.array(s.known, np.int32), s.prompt, CONTROLS) for s in batch)
    arrays = (np.array(part, np.int32) for part in (grown, slices, logits))
    return plan(0, np.array(leaves or [], np.int32), joins, *arrays)


def check(packed: Packed, batch: list[Sequence]) -> None:
    """Token by token, what the packed arrays must say of these slices."""
    tokens, positions, slots, wanted, rows, outputs = [], [], [], [], [], []
    for s in batch:
        for position in range(s.start, s.start + s.count):
            tokens.append(s.known[position])
            positions.append(position)
            slots.append(int(pages_of(s)[position // PAGE]) * PAGE + position % PAGE)
        if s.draws:
            wanted.append(len(tokens) - 1)
            rows.append(s.row)
            outputs.append(len(s.known) - s.prompt)
    assert packed.tokens.tolist() == tokens
    assert packed.shape.positions.tolist() == positions
    assert packed.shape.slots.tolist() == [slots]
    assert packed.shape.slices.tolist() == [[s.row, s.start, s.count] for s in batch]
    assert packed.wanted.tolist() == wanted
    assert packed.rows.tolist() == rows
    assert packed.positions.tolist() == outputs
    for s in batch:
        table = packed.shape.tables[0, s.row]
        assert table[: len(pages_of(s))].tolist() == pages_of(s).tolist()


@settings(deadline=None)
@given(batch=batches(), before=batches())
def test_packed_work_and_every_half_of_it(batch: list[Sequence], before: list[Sequence]) -> None:
    """Rows had other tenants before, of whom nothing may be left."""
    input_batch = InputBatch(ROWS, 1, PAGE)
    input_batch.apply(plan_of(before))
    input_batch.last[:] = 777
    step = plan_of(batch, leaves=[s.row for s in before])
    input_batch.apply(step)

    def walk(work: StepSlices, part: list[Sequence], places: list[int]) -> None:
        check(input_batch.pack(work), part)
        assert work.draws[:, 2].tolist() == places
        if len(part) > 1:
            first, second = work.halves()
            middle = len(first.slices)
            assert 0 < middle < len(part)
            drawing = sum(s.draws for s in part[:middle])
            walk(first, part[:middle], places[:drawing])
            walk(second, part[middle:], places[drawing:])

    walk(StepSlices.of(step), batch, list(range(len(step.logits))))


def test_a_decode_takes_the_token_that_the_row_drew_last() -> None:
    input_batch = InputBatch(ROWS, 1, PAGE)
    first, second = Sequence(3, (5, 6, 7), 2, 0, 3, True), Sequence(1, (8, 9), 2, 0, 2, True)
    input_batch.apply(plan_of([first, second]))
    input_batch.last[[3, 1]] = [41, 42]
    slices = np.array([[1, 2, 1], [3, 3, 1]], np.int32)
    logits = np.array([[0, 1], [1, 3]], np.int32)
    packed = input_batch.pack(StepSlices.of(plan(1, slices=slices, logits=logits)))
    assert packed.tokens.tolist() == [42, 41]
    assert packed.positions.tolist() == [1, 2], "output positions: second and third token"


def test_a_join_sets_all_of_a_row() -> None:
    """All that an executor remembers of a row comes from its last join, whatever the row held before."""
    input_batch = InputBatch(ROWS, 1, PAGE)
    input_batch.apply(plan_of([Sequence(3, tuple(range(30)), 20, 0, 30, True)]))
    input_batch.last[3] = 5
    join = Join(3, np.array([1, 2], np.int32), 1, Controls(0.5, 0.9, 3, 0.1, 7, 2), index=4)
    input_batch.apply(plan(1, joins=(join,)))
    assert input_batch.last[3] == -1
    assert (input_batch.controls.seed[3], input_batch.controls.index[3], input_batch.controls.top_logprobs[3]) == (
        7,
        4,
        2,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_a_row_has_the_pages_of_its_present_tenant(groups: int) -> None:
    input_batch = InputBatch(ROWS, groups, PAGE)

    def apply(leaves: list[int], joins: list[int], grown: list[tuple[int, int, int, int]]) -> None:
        joined = tuple(Join(row, np.array([1], np.int32), 1, CONTROLS) for row in joins)
        input_batch.apply(plan(0, np.array(leaves, np.int32), joined, np.array(grown, np.int32)))

    def slots(row: int, *positions: int) -> list[list[int]]:
        """[groups, positions] where the executor puts these positions of the row."""
        slices = np.array([[row, position, 1] for position in positions], np.int32)
        packed = [input_batch.pack(StepSlices.of(plan(slices=one))) for one in slices]
        return np.concatenate([one.shape.slots for one in packed], axis=1).tolist()

    apply([], [2, 4], [(g, 2, i, 10 * g + i) for g in range(groups) for i in range(3)])
    apply([], [], [(g, 4, 0, 50 + g) for g in range(groups)])
    assert slots(2, 1, 5, 8) == [[40 * g + 1, 40 * g + 5, 40 * g + 8] for g in range(groups)]
    assert slots(4, 3) == [[(50 + g) * PAGE + 3] for g in range(groups)]
    apply([2], [2], [(g, 2, 0, 70 + g) for g in range(groups)])
    assert slots(2, 0) == [[(70 + g) * PAGE] for g in range(groups)]
    apply([], [], [(g, 2, 30, 90 + g) for g in range(groups)])  # wider than any table so far
    assert slots(2, 121) == [[(90 + g) * PAGE + 1] for g in range(groups)]


def test_a_page_that_stands_in_a_table_can_be_exchanged() -> None:
    """After a fork, or where another row has published the same content."""
    input_batch = InputBatch(ROWS, 1, PAGE)
    sequence = Sequence(3, tuple(range(12)), 12, 0, 12, False)
    input_batch.apply(plan_of([sequence]))
    input_batch.apply(plan(1, grown=np.array([[0, 3, 1, 99]], np.int32)))
    packed = input_batch.pack(StepSlices.of(plan(slices=np.array([[3, 0, 12]], np.int32))))
    before, after = pages_of(sequence).tolist(), packed.shape.tables[0, 3, :3].tolist()
    assert after == [before[0], 99, before[2]]
