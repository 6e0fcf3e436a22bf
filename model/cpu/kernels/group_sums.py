"""Sums of a product whose weights are in groups, see `model.cpu.kernels.group_panels`.

A group's integers are summed first, exactly as they are stored. Then the sum gets the group's scale, and the sum of the
group's inputs its offset: weights are never rounded.

Invariant: as in `model.cpu.kernels.linear`, an output is one sum in a fixed order, whatever rows are beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import Element
from model.cpu.kernels.group_panels import Factors, GroupPanels
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.sides import TILE, PanelRows, each_tile
from model.cpu.kernels.values import FLOAT32, FLOATS, INTS, LANES, Value, Variable

Decode = Callable[[Value], list[list[Value]]]
"""Loads a step: for each of its words a vector of 16 outputs for each half."""

MOST_RUNS = 1024  # of a row of inputs, whose sums a thread keeps
PART_BYTES = 2**14  # bytes of the element that all rows go through before the next ones
LINE = 64  # bytes that a CPU fetches at once
AHEAD = 4096  # bytes
BOTH = (0, 1)  # halves of a panel
# Rows that are multiplied with both halves of a panel at once. More rows do not fit in registers, with the sums of a
# run beside their own: half by half Q6_K takes 0.9 of the time for 16 and 512 rows (Zen 4, busy machine).
MOST_IN_BOTH = 4
FEWEST = 2  # rows that wait for memory: prefetched into the second cache, 0.9 of the time; into the first for more rows


def add_group_sums(
    code: Code, weights: GroupPanels, taken: PanelRows, count: Value, panel: Value, steps: Value
) -> None:
    """Leaves the sums of the first `count` rows with a panel in their room.

    Those of their inputs are in theirs, see `sum_inputs`, where weights have offsets.
    """
    for size in range(1, TILE + 1):
        with code.when(count.equals(size)):
            for halves in _cut(size):
                rows = _Rows(taken.inputs(code, code.integer(0), size), halves, taken.sums, taken.input_sums)
                _few_rows(code, weights, rows, panel, steps)
    with code.when(count > TILE):
        _many_rows(code, weights, taken, count, panel, steps)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are multiplied together.

    Attributes:
        inputs: Address of each row's inputs.
        halves: Halves of the panel that they are multiplied with.
        sums: Room for their sums, [rows, 32] float32.
        input_sums: Sums of the inputs of each run, [rows, MOST_RUNS] float32.
    """

    inputs: list[Value]
    halves: Sequence[int]
    sums: Value
    input_sums: Value

    @property
    def places(self) -> list[list[int]]:
        """Offset of each row's sums, a vector for each half."""
        return [[(row * PANEL + half * LANES) * 4 for half in self.halves] for row in range(len(self.inputs))]


def _cut(size: int) -> Sequence[Sequence[int]]:
    """Returns the halves of a panel that so many rows are multiplied with at once."""
    return [BOTH] if size <= MOST_IN_BOTH else [(0,), (1,)]


def sum_inputs(code: Code, weights: GroupPanels, taken: PanelRows, count: Value, steps: Value) -> None:
    """Sums the inputs of each run of the first `count` rows, for offsets; the same for all panels.

    Args:
        code: The kernel.
        weights: Layout.
        taken: Places of rows and of the sums.
        count: The number of rows.
        steps: Words of the element that a row of inputs has.
    """
    element, ones = weights.element, _ones(code, weights.element)
    runs = weights.block_count(steps) * weights.together
    with code.loop(0, count) as row:
        (source,) = taken.inputs(code, row, 1)
        with code.loop(0, runs) as run:
            here, total = source + run * (weights.inputs * element.size), code.variable(code.floats(0.0))
            size = weights.inputs * element.size
            if size % (LANES * 4) == 0:
                for place in range(0, size, LANES * 4):
                    total.set(element.dot(code, total.value, code.load(here, INTS, place), ones))
                made = code.summed(total.value)
            else:
                for place in range(0, size, 4):
                    total.set(element.dot(code, total.value, element.everywhere(code, here, place), ones))
                made = code.lane(total.value, 0)
            code.store(made, taken.input_sums + (row * MOST_RUNS + run) * 4)


def _ones(code: Code, element: Element) -> Value:
    """Returns 1 in all lanes, as 32 bits of the element."""
    return code.like(code.lane_numbers(), 0x3F800000 if element.packed == 1 else 0x3F803F80)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a panel.

    Attributes:
        number: Its index in the row of inputs.
        place: Its address.
        block: Numbers of its block. None where there are no blocks.
    """

    number: Value
    place: Value
    block: Factors | None


@contextmanager
def _each_run(
    code: Code, weights: GroupPanels, place: Value, first: Value, blocks: Value, cache: int = 0
) -> Iterator[_Run]:
    """Loops over the runs of some blocks.

    Args:
        code: The kernel.
        weights: Layout.
        place: Address of the first block.
        first: Index of its first run.
        blocks: The number of blocks.
        cache: Cache that the heads of the following blocks are prefetched into. 0 for none.
    """
    with code.loop(0, blocks) as block:
        here = place + block * weights.block
        if cache:
            for line in range(0, weights.block_head, LINE):
                code.prefetch(here + AHEAD, line, cache)
        numbers, runs = weights.of_block(code, here), here + weights.block_head
        if weights.together == 1:
            yield _Run(first + block, runs, numbers)
        else:
            with code.loop(0, weights.together) as run:
                yield _Run(first + block * weights.together + run, runs + run * weights.run, numbers)


def _few_rows(code: Code, weights: GroupPanels, rows: _Rows, panel: Value, steps: Value) -> None:
    """Multiplies up to TILE rows with integers that become the element's in registers."""
    totals = [[code.variable(code.floats(0.0)) for _ in places] for places in rows.places]
    cache, words, first = 2 if len(rows.inputs) <= FEWEST else 1, weights.words, rows.halves[0] == 0
    blocks = weights.block_count(steps)
    with _each_run(code, weights, panel, code.integer(0), blocks, cache if first else 0) as run:
        for line in range(0, weights.types.size if first else 0, LINE):
            code.prefetch(run.place + AHEAD, line, cache)
        stored = run.place + weights.types.size

        def load(step: Value, stored: Value = stored) -> list[list[Value]]:
            place = stored + step * words.step
            for line in range(0, words.step if first else 0, LINE):
                code.prefetch(place + AHEAD, line, cache)
            return words.decode(code, place, rows.halves)

        _add_run(code, weights, run, rows, totals, load)
    _store(code, rows, totals)


def _add_run(
    code: Code, weights: GroupPanels, run: _Run, rows: _Rows, totals: list[list[Variable]], load: Decode
) -> None:
    """Adds the products of some rows with a run to their totals.

    Args:
        code: The kernel.
        weights: Layout.
        run: The run.
        rows: Rows.
        totals: A vector for each half of each row.
        load: Loads a step of the run by its number.
    """
    element, first = weights.element, run.number * (weights.inputs * weights.element.size)
    sums = [[code.variable(code.floats(0.0)) for _ in row] for row in totals]
    with code.loop(0, weights.steps) as step:
        running = [[part.value for part in row] for row in sums]
        sources = [source + first + step * (weights.words.words * 4) for source in rows.inputs]
        for word, vectors in enumerate(load(step)):
            for source, parts in zip(sources, running, strict=True):
                value = element.everywhere(code, source, word * 4)
                parts[:] = [element.dot(code, part, vector, value) for part, vector in zip(parts, vectors, strict=True)]
        for row, parts in zip(sums, running, strict=True):
            for total, part in zip(row, parts, strict=True):
                total.set(part)
    factors = weights.of_run(code, run.place, run.block)
    for number, (row, results) in enumerate(zip(sums, totals, strict=True)):
        for made, total, half in zip(row, results, rows.halves, strict=True):
            total.set(code.fma(made.value, factors.scales[half], total.value))
        if factors.offsets is not None:
            inputs = code.splat(code.load(rows.input_sums + run.number * 4, FLOAT32, number * MOST_RUNS * 4))
            for total, half in zip(results, rows.halves, strict=True):
                total.set(code.fma(inputs, factors.offsets[half], total.value))


def _many_rows(code: Code, weights: GroupPanels, taken: PanelRows, count: Value, panel: Value, steps: Value) -> None:
    """Multiplies more rows, some blocks at a time, whose integers become the element's once for all rows."""
    with code.loop(0, count * 2) as vector:
        code.store(code.floats(0.0), taken.sums + vector * (LANES * 4))
    together, size_of_run = weights.together, _decoded_step(weights) * weights.steps
    most = max(1, PART_BYTES // size_of_run // together)
    room, blocks = code.room(most * together * size_of_run), weights.block_count(steps)

    def decoded(run: Value, halves: Sequence[int]) -> Decode:
        """Returns a function that loads a step of a decoded run."""

        def load(step: Value) -> list[list[Value]]:
            place = run + step * _decoded_step(weights)
            return [
                [code.load(place, INTS, (2 * word + half) * LANES * 4) for half in halves]
                for word in range(weights.words.words)
            ]

        return load

    with code.loop(0, blocks, most) as first_block:
        here = panel + first_block * weights.block
        number = code.smaller(blocks - first_block, code.integer(most))
        first = first_block * together
        with _each_run(code, weights, here, code.integer(0), number) as run:
            _decode_run(code, weights, run, room + run.number * size_of_run, number * weights.block)

        def tile(row: Value, size: int, first: Value = first, here: Value = here, number: Value = number) -> None:
            places = taken.sums + row * (PANEL * 4), taken.input_sums + row * (MOST_RUNS * 4)
            for halves in _cut(size):
                rows = _Rows(taken.inputs(code, row, size), halves, *places)
                totals = [[code.variable(code.load(rows.sums, FLOATS, place)) for place in row] for row in rows.places]
                with _each_run(code, weights, here, first, number) as run:
                    base = room + (run.number - first) * size_of_run
                    _add_run(code, weights, run, rows, totals, decoded(base, halves))
                _store(code, rows, totals)

        each_tile(code, count, tile)


def _store(code: Code, rows: _Rows, totals: list[list[Variable]]) -> None:
    for places, made in zip(rows.places, totals, strict=True):
        for place, total in zip(places, made, strict=True):
            code.store(total.value, rows.sums, place)


def _decode_run(code: Code, weights: GroupPanels, run: _Run, room: Value, ahead: Value) -> None:
    """Decodes a run into a room, and prefetches what lies so many bytes ahead."""
    words = weights.words
    with code.loop(0, weights.steps) as step:
        source = run.place + weights.types.size + step * words.step
        for line in range(0, words.step, LINE):
            code.prefetch(source + ahead, line)
        place = room + step * _decoded_step(weights)
        for number, halves in enumerate(words.decode(code, source, BOTH)):
            for half, values in enumerate(halves):
                code.store(values, place, (number * 2 + half) * LANES * 4)


def _decoded_step(weights: GroupPanels) -> int:
    """Returns the bytes of a decoded step."""
    return PANEL * 4 * weights.words.words
