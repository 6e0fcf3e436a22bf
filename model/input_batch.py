"""Input batch: the executor's copy of the batch rows. Applies what a plan changes and packs what it computes.

Invariant: the executor's rows follow from the plans alone. A row has `known` tokens (its prompt, output of an earlier
attempt), then its last draw. A slice reads known tokens as far as they go.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model.attention.backend import NONE, StateSegments, StepShape
from model.images import ImagePart
from model.rotary_rows import RotaryRows
from model.sampling.prompt_logprobs import PromptSlice
from model.sampling.sampler import SamplingRows
from model.sampling.sources import NO_SOURCES, ProcessorSources
from scheduler.request import PromptImage
from scheduler.step import Join, StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepSlices:
    """Slices of a step, and their draws.

    Attributes:
        slices: [n, 3] int32. Row, start, count.
        draws: [m, 4] int64. Slice, offset in the slice, place in the step's result, row that draws.
    """

    slices: Ints
    draws: NDArray[np.int64]

    @staticmethod
    def of(plan: StepPlan) -> "StepSlices":
        """Returns the work of a whole plan."""
        ends = np.cumsum(plan.slices[:, 2], dtype=np.int64)
        offsets = plan.logits[:, 0].astype(np.int64)
        owner = np.searchsorted(ends, offsets, side="right")
        within = offsets - (ends - plan.slices[:, 2])[owner]
        places, rows = np.arange(len(offsets)), plan.logits[:, 1].astype(np.int64)
        return StepSlices(plan.slices, np.stack((owner, within, places, rows), axis=1))

    def from_the_start(self) -> "StepSlices":
        """Returns the same draws, with all positions before each slice computed again."""
        draws, slices = self.draws.copy(), self.slices.copy()
        draws[:, 1] += slices[draws[:, 0], 1]
        slices[:, 2] += slices[:, 1]
        slices[:, 1] = 0
        return StepSlices(slices, draws)

    def halves(self) -> tuple["StepSlices", "StepSlices"]:
        """Splits the slices in two, each half with its draws."""
        middle = len(self.slices) // 2
        first = self.draws[:, 0] < middle
        return (
            StepSlices(self.slices[:middle], self.draws[first]),
            StepSlices(self.slices[middle:], self.draws[~first] - np.array([middle, 0, 0, 0])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Host arrays of one forward pass.

    Attributes:
        tokens: [tokens] int64. Token ids; -1 - i for the i-th of the draws in flight (`InputBatch.expect`).
        token_positions: [axes, tokens] int64. Positions, as `ForwardBatch.positions`.
        shape: Slices, positions and pages, for attention.
        wanted: [n] int64. Packed offset of each draw's logits.
        rows: [n] int64. Batch row of each draw.
        positions: [n] int64. Output position of each drawn token.
        prompts: Prompt slices whose logprobs are due.
        prompts_wanted: [m] int64. Packed offsets of their logits, one slice after the other.
        images: Images whose features replace tokens.
    """

    tokens: NDArray[np.int64]
    token_positions: NDArray[np.int64]
    shape: StepShape
    wanted: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    prompts: list[PromptSlice]
    prompts_wanted: NDArray[np.int64]
    images: list[ImagePart]


class InputBatch:
    """State of each batch row.

    A join sets all of a row's state, so nothing of the row's earlier sequence stays. A row may go on before its draw is
    known on the host: see `expect`.

    Attributes:
        last: [rows] int64. Token that each row drew last.
        controls: Sampling controls of the rows.
    """

    def __init__(
        self,
        rows: int,
        groups: int,
        page_size: int,
        history: bool = False,
        sources: ProcessorSources = NO_SOURCES,
        rotary_axes: int = 1,
        states: int = 0,
        interval: int = 0,
    ) -> None:
        """Makes an empty batch.

        Args:
            rows: The number of rows.
            groups: The number of page tables of a row.
            page_size: Tokens in a page.
            history: Keep all tokens that a row draws, so that they can be computed again.
            sources: Sources of logits processors.
            rotary_axes: Axes of rotary positions, as in `model.multimodal.Vision`.
            states: How many of the page tables, the last ones, are of recurrent states.
            interval: Tokens of their entries, see `KVLayout.interval`.
        """
        self._kv, self._interval = groups - states, interval
        self._page_size, self._history = page_size, history
        self._known: list[Ints | None] = [None] * rows
        self._known_count = np.zeros(rows, np.int64)
        self._prompt_count = np.zeros(rows, np.int64)
        self._tables = np.zeros((groups, rows, 8), np.int32)
        self._held = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self._expected = np.zeros(0, np.int64)  # rows that draw now
        self._place = np.full(rows, -1, np.int64)  # index of each row in `_expected`, -1 for none
        self.controls = SamplingRows(rows, sources)
        self._bidirectional = np.zeros(rows, np.int64)  # length of each row's bidirectional prefix
        self._images: dict[int, tuple[PromptImage, ...]] = {}
        self._rotary = RotaryRows(rows, rotary_axes) if rotary_axes > 1 else None
        self._drafts: dict[int, Ints] = {}  # by row, of the step that was applied last
        self._jumped: dict[int, tuple[int, Ints]] = {}  # by row, a draw and what follows it, with the draw's position

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes of rows: leaves, joins, forced tokens, jumps, closing, drafts and new pages."""
        for row in plan.leaves.tolist():
            self._known[row] = None
            self._held[row] = 0
            self._place[row] = -1
            self._images.pop(row, None)
            self._jumped.pop(row, None)
            self.controls.processors.leave(row)
        for join in plan.joins:
            self._join(join)
        for row, token in plan.forced.tolist():
            self._force(row, token)
        if len(plan.jumps):
            self._jump(plan.jumps)
        for row, most in plan.closing.tolist():
            self.controls.processors.close_within(row, most)
        self._drafts = _by_row(plan.drafts) if len(plan.drafts) else {}
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
        self._bidirectional[row] = join.bidirectional
        self._images.pop(row, None)
        self._jumped.pop(row, None)
        if join.images:
            self._images[row] = join.images
        if self._rotary is not None:
            self._rotary.join(row, join.prompt_count, join.images)
        self.last[row] = -1
        self._place[row] = -1
        self.controls.join(join)

    def _force(self, row: int, token: int) -> None:
        """Replaces the token that the row drew last."""
        self.last[row] = token
        self.controls.processors.told(row, token)
        known = self._known[row]
        if self._history and known is not None:
            self._known[row] = np.append(known[:-1], np.int32(token))

    def _jump(self, jumps: Ints) -> None:
        """Puts tokens behind the last draws of rows. jumps: as in the plan."""
        for row in np.unique(jumps[:, 0]).tolist():
            _, positions, tokens = jumps[jumps[:, 0] == row].T
            self.controls.processors.drew(np.full(len(tokens), row, np.int64), tokens)
            known = self._known[row]
            if not self._history:
                self._jumped[row] = int(positions[0]) - 1, np.append(np.int32(self.last[row]), tokens)
            elif known is not None:
                self._known[row] = np.append(known, tokens)
                self._known_count[row] += len(tokens)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Marks rows whose draws are in flight, until `arrived`.

        A step that is packed meanwhile has -1 - i in `Packed.tokens` for the token that the i-th of these rows draws.
        """
        self._expected = rows
        self._place[rows] = np.arange(len(rows))

    def arrived(self, tokens: Ints) -> NDArray[np.int64]:
        """Takes in the tokens that the expected rows drew.

        Rows that left or joined anew since are skipped: the token belongs to the row's earlier sequence.

        Args:
            tokens: [n] int32, in the order of the rows of `expect`.

        Returns:
            The other rows.
        """
        still = self._place[self._expected] == np.arange(len(tokens))
        rows, self._expected = self._expected[still], self._expected[:0]
        self._place[rows] = -1
        self.drew(rows, tokens[still])
        return rows

    def drew(self, rows: NDArray[np.int64], tokens: Ints) -> None:
        """Records a token for each of these rows, below 0 for a row that drew none.

        A row that drew none counts as having drawn token 0: the scheduler ends it, and discards its later draws.
        """
        self.last[rows] = np.maximum(tokens, 0)
        self.controls.processors.drew(rows, tokens)
        for row in rows.tolist() if self._history else ():
            known = self._known[row]
            if known is not None:
                self._known[row] = np.append(known, np.int32(self.last[row]))
                self._known_count[row] += 1

    def _widen(self, columns: int) -> None:
        """Grows the page tables to at least `columns`; doubles them, so that growth is amortised."""
        have = self._tables.shape[2]
        if columns > have:
            room = max(columns, 2 * have) - have
            self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, room)))

    def pack(self, work: StepSlices) -> Packed:
        """Makes the arrays of one forward pass over the work's slices."""
        row, start, count = np.ascontiguousarray(work.slices.T, np.int64)  # kernels read each by its address
        first = np.cumsum(count) - count
        # A step of decodes alone has one token a slice: the slices' own columns are the packed ones.
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
                here = known[start[i] : start[i] + count[i]]
                tokens[first[i] : first[i] + len(here)] = here  # drafts may follow in the same slice
        for i in np.flatnonzero(np.isin(row, list(self._jumped))).tolist() if self._jumped else ():
            begin, run = self._jumped[int(row[i])]
            here = run[max(0, start[i] - begin) : max(0, start[i] + count[i] - begin)]
            tokens[first[i] : first[i] + len(here)] = here
        # A drafted row's slice begins with the token of its last draw, and its drafts follow.
        if self._drafts:
            for i in np.flatnonzero(np.isin(row, list(self._drafts))).tolist():
                tokens[first[i] + 1 : first[i] + count[i]] = self._drafts[int(row[i])]
        index, within = np.divmod(positions, self._page_size)
        slots = self._tables[: self._kv, row_of, index].astype(np.int64) * self._page_size + within
        slice_of, offset, _, rows = work.draws.T
        wanted = first[slice_of] + offset
        segments = self._segments(row, start, count) if self._interval else None
        shape = StepShape(work.slices, positions, slots, self._tables[: self._kv], self._bidirectional[row], segments)
        drawn = positions[wanted] + 1 - self._prompt_count[rows]
        prompts, offsets = self._prompt_slices(row, start, count, first)
        images = self._image_parts(row, start, count, first) if self._images else []
        axes = positions[None] if self._rotary is None else self._rotary.pack(work.slices, positions, row_of, first)
        prompts_wanted = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        return Packed(tokens, axes, shape, wanted, rows, drawn, prompts, prompts_wanted, images)

    def _segments(self, row: NDArray[np.int64], start: NDArray[np.int64], count: NDArray[np.int64]) -> StateSegments:
        """Cuts the slices where checkpoints are. Arguments as of `_image_parts`."""
        made = StateSegments.of(self._tables[self._kv :], self._interval, row, start, count)
        # Where all is computed again from the start, nothing is read, and pages of earlier entries are other rows'.
        return replace(made, targets=np.full_like(made.targets, NONE)) if self._history else made

    def _image_parts(
        self, row: NDArray[np.int64], start: NDArray[np.int64], count: NDArray[np.int64], first: NDArray[np.int64]
    ) -> list[ImagePart]:
        """Returns the parts of images that lie in the slices.

        Args:
            row: [n] int64. Row of each slice.
            start: [n] int64. First position of each slice.
            count: [n] int64. The number of positions of each slice.
            first: [n] int64. Packed offset of each slice's first token.
        """
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
        """Returns the prompt slices whose logprobs are due, and the packed offsets of their logits.

        The logits at a position are of the token after it. Arguments as of `_image_parts`.
        """
        if not np.count_nonzero(self.controls.prompt_logprobs):
            return [], []
        last = np.minimum(start + count, self._prompt_count[row] - 1)
        # A row that has drawn has reported its prompt's logprobs. Without a cache the prompt is computed again.
        due = self.controls.prompt_logprobs[row] & (start < last) & (self.last[row] < 0)
        prompts, offsets = [], []
        for i in np.flatnonzero(due).tolist():
            known = self._known[row[i]]
            if known is not None:
                prompts.append(PromptSlice(int(row[i]), int(start[i]) + 1, known[start[i] + 1 : last[i] + 1]))
                offsets.append(first[i] + np.arange(last[i] - start[i]))
        return prompts, offsets


def _by_row(pairs: Ints) -> dict[int, Ints]:
    """pairs: [n, 2] of row, token. Returns the tokens of each row, in order."""
    rows = pairs[:, 0]
    return {row: pairs[rows == row, 1] for row in np.unique(rows).tolist()}
