"""The executor's mirror of the batch rows: applies what a step plan changes and packs what it computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention.backend import StepShape
from model.images import ImagePart
from model.sampling.logits_processors import LogitsProcessorFactory
from model.sampling.sampler import SamplingRows
from scheduler.request import PromptImage
from scheduler.step import Join, StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Slices of a step and the rows that draw. slices: [n, 3] of row, start, count. draws: [m, 4] of slice, offset in
    it, place in the step's result, row that draws.
    """

    slices: Ints
    draws: NDArray[np.int64]

    @staticmethod
    def of(plan: StepPlan) -> "Work":
        ends = np.cumsum(plan.slices[:, 2], dtype=np.int64)
        offsets = plan.logits[:, 0].astype(np.int64)
        owner = np.searchsorted(ends, offsets, side="right")
        within = offsets - (ends - plan.slices[:, 2])[owner]
        places, rows = np.arange(len(offsets)), plan.logits[:, 1].astype(np.int64)
        return Work(plan.slices, np.stack((owner, within, places, rows), axis=1))

    def from_the_start(self) -> "Work":
        """The same draws, with all positions before each slice computed again."""
        draws, slices = self.draws.copy(), self.slices.copy()
        draws[:, 1] += slices[draws[:, 0], 1]
        slices[:, 2] += slices[:, 1]
        slices[:, 1] = 0
        return Work(slices, draws)

    def halves(self) -> tuple["Work", "Work"]:
        middle = len(self.slices) // 2
        first = self.draws[:, 0] < middle
        return (
            Work(self.slices[:middle], self.draws[first]),
            Work(self.slices[middle:], self.draws[~first] - np.array([middle, 0, 0, 0])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptSlice:
    """Tokens of a row's prompt from position `start` on, whose logprobs are wanted."""

    row: int
    start: int
    tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Host arrays of one forward pass. tokens: [tokens]. wanted: [m] packed offsets whose logits are needed, those that
    are drawn from before those of the prompts.

    rows: [n] batch row that draws from each. positions: [n] output position of the drawn token. images: of which
    features stand in places of tokens.
    """

    tokens: NDArray[np.int64]
    shape: StepShape
    wanted: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    prompts: list[PromptSlice]
    images: list[ImagePart]


class Mirror:
    """What an executor remembers of each row. Everything is set by the row's join, so nothing of an earlier one stays.

    last: the token that the row drew last. history: every token that a row draws is kept, so that it can be computed
    again. A row may go on before it is known here what it has drawn: see `expect`.
    """

    def __init__(
        self,
        rows: int,
        groups: int,
        page_size: int,
        history: bool = False,
        factories: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        """factories: of logits processors."""
        self._page_size, self._history = page_size, history
        self._known: list[Ints | None] = [None] * rows
        self._known_count = np.zeros(rows, np.int64)
        self._prompt_count = np.zeros(rows, np.int64)
        self._tables = np.zeros((groups, rows, 8), np.int32)
        self._held = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self._expected = np.zeros(0, np.int64)  # rows that draw now
        self._place = np.full(rows, -1, np.int64)  # of each among these, -1 for none
        self.controls = SamplingRows(rows, factories)
        self._whole = np.zeros(rows, np.int64)
        self._images: dict[int, tuple[PromptImage, ...]] = {}

    def apply(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            self._known[row] = None
            self._held[row] = 0
            self._place[row] = -1
            self._images.pop(row, None)
        for join in plan.joins:
            self._join(join)
        for row, token in plan.given.tolist():
            self._give(row, token)
        group, row, index, page = plan.grown.T
        if len(page):
            self._widen(int(index.max()) + 1)
            self._tables[group, row, index] = page
            np.maximum.at(self._held, row, index.astype(np.int64) + 1)

    def _join(self, join: Join) -> None:
        row = join.row
        self._known[row] = join.tokens
        self._known_count[row] = len(join.tokens)
        self._prompt_count[row] = join.prompt_count
        self._held[row] = 0
        self._whole[row] = join.whole
        self._images.pop(row, None)
        if join.images:
            self._images[row] = join.images
        self.last[row] = -1
        self._place[row] = -1
        self.controls.join(join)

    def _give(self, row: int, token: int) -> None:
        """In place of what it drew last."""
        self.last[row] = token
        known = self._known[row]
        if self._history and known is not None:
            self._known[row] = np.append(known[:-1], np.int32(token))

    def expect(self, rows: NDArray[np.int64]) -> None:
        """These rows draw; `arrived` says what, perhaps after the next step was packed: its `tokens` have -1 - i where
        the one that the i-th of them has drawn is to be.
        """
        self._expected = rows
        self._place[rows] = np.arange(len(rows))

    def arrived(self, tokens: Ints) -> None:
        """What the expected rows have drawn. Of those that others have taken meanwhile, nobody wants to know."""
        still = self._place[self._expected] == np.arange(len(tokens))
        rows, self._expected = self._expected[still], self._expected[:0]
        self._place[rows] = -1
        self.drew(rows, tokens[still])

    def drew(self, rows: NDArray[np.int64], tokens: Ints) -> None:
        """Each of these rows drew a token, below 0 for none; what it does next is then never looked at."""
        self.last[rows] = np.maximum(tokens, 0)
        self.controls.adjusted.drew(rows, tokens)
        for row in rows.tolist() if self._history else ():
            known = self._known[row]
            if known is not None:
                self._known[row] = np.append(known, np.int32(self.last[row]))
                self._known_count[row] += 1

    def _widen(self, columns: int) -> None:
        have = self._tables.shape[2]
        if columns > have:
            room = max(columns, 2 * have) - have
            self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, room)))

    def pack(self, work: Work) -> Packed:
        row, start, count = np.ascontiguousarray(work.slices.T, np.int64)  # kernels read each as it lies
        first = np.cumsum(count) - count
        positions, row_of = start, row
        if np.count_nonzero(count != 1):
            owner = np.repeat(np.arange(len(row)), count)
            positions, row_of = np.arange(len(owner)) - (first - start)[owner], row[owner]
        tokens = self.last[row_of]
        if len(self._expected):
            tokens = np.where(self._place[row_of] >= 0, -1 - self._place[row_of], tokens)
        for i in (start < self._known_count[row]).nonzero()[0].tolist():
            known = self._known[row[i]]
            if known is not None:
                tokens[first[i] : first[i] + count[i]] = known[start[i] : start[i] + count[i]]
        index, within = np.divmod(positions, self._page_size)
        slots = self._tables[:, row_of, index].astype(np.int64) * self._page_size + within
        slice_of, offset, _, rows = work.draws.T
        wanted = first[slice_of] + offset
        shape = StepShape(work.slices, positions, slots, self._tables, self._whole[row])
        drawn = positions[wanted] + 1 - self._prompt_count[rows]
        prompts, offsets = self._prompt_slices(row, start, count, first)
        images = self._image_parts(row, start, count, first) if self._images else []
        return Packed(tokens, shape, np.concatenate((wanted, *offsets)), rows, drawn, prompts, images)

    def _image_parts(
        self, row: NDArray[np.int64], start: NDArray[np.int64], count: NDArray[np.int64], first: NDArray[np.int64]
    ) -> list[ImagePart]:
        """What slices compute of images. first: packed offset of each slice's first token."""
        parts = []
        for i in np.flatnonzero(start < self._prompt_count[row]).tolist():
            for image in self._images.get(int(row[i]), ()):
                begin, end = np.searchsorted(image.places, (start[i], start[i] + count[i])).tolist()
                if begin < end:
                    offsets = image.places[begin:end] - start[i] + first[i]
                    parts.append(ImagePart(image, offsets, np.arange(begin, end)))
        return parts

    def _prompt_slices(
        self, row: NDArray[np.int64], start: NDArray[np.int64], count: NDArray[np.int64], first: NDArray[np.int64]
    ) -> tuple[list[PromptSlice], list[NDArray[np.int64]]]:
        """What slices compute of prompts whose logprobs are wanted, and packed offsets of their logits; the logits at a
        position are of the token after it. first: packed offset of each slice's first token.
        """
        if not np.count_nonzero(self.controls.prompt_logprobs):
            return [], []
        last = np.minimum(start + count, self._prompt_count[row] - 1)
        # Once a row has drawn, its prompt was told (and is only computed again, without a cache).
        due = self.controls.prompt_logprobs[row] & (start < last) & (self.last[row] < 0)
        prompts, offsets = [], []
        for i in np.flatnonzero(due).tolist():
            known = self._known[row[i]]
            if known is not None:
                prompts.append(PromptSlice(int(row[i]), int(start[i]) + 1, known[start[i] + 1 : last[i] + 1]))
                offsets.append(first[i] + np.arange(last[i] - start[i]))
        return prompts, offsets
