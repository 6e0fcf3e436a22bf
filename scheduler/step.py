"""Into and out of an executor: flat arrays of what changed and of the work of one step.

An executor mirrors the rows and expands the plan, so a step costs what changed, not what is running. With two steps in
flight a decode's token does not exist when it is planned; the executor has it ("the token row r drew last").
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.controls import Controls
from scheduler.drafts import NO_DRAFTS
from scheduler.events import Logprobs
from scheduler.request import PromptImage

Ints = NDArray[np.int32]

FAULTED, NO_TOKEN = -1, -2
NO_JUMPS: Ints = np.empty((0, 3), np.int32)
NO_CLOSING: Ints = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KVTransfer:
    """KV of another engine for pages [n]. content: uint8 [n, page_bytes], in canonical form."""

    pages: Ints
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A sequence takes a row. All that an executor knows of a row comes from here and from what it drew since.

    Attributes:
        row: Batch row, free until now.
        tokens: [n] int32. Prompt, then output tokens that are already known.
        prompt_count: Tokens of the prompt.
        controls: Controls of the row's draws.
        index: Index of the sequence in its request.
        images: Images of the prompt, in order.
        bidirectional: Tokens at the front that are a bidirectional prefix.
        transfer: Content for pages of the row, put in before anything is computed.
        searching: The sequence is a hypothesis of a beam search. The search says which token it goes on with, so a draw
            changes nothing, and its alternatives are tokens that the changes of the logits leave; a forbidden one has
            the logprob -inf.
    """

    row: int
    tokens: Ints
    prompt_count: int
    controls: Controls
    index: int = 0
    images: tuple[PromptImage, ...] = ()
    bidirectional: int = 0
    transfer: KVTransfer | None = None
    searching: bool = False


def transfer_bytes(joins: Iterable[Join]) -> int:
    """Returns the bytes of the KV transfers of these joins."""
    return sum(join.transfer.content.nbytes for join in joins if join.transfer is not None)


@dataclass(slots=True, eq=False)  # not frozen, see `scheduler.events.EngineStats`
class StepPlan:
    """Changes and work of one engine step, as flat arrays.

    Applied in this order: swap_outs, leaves, joins, forced, jumps, closing, grown, copies, swap_ins, transfers of
    joins. Then the slices are computed.

    Attributes:
        step: Number of the step.
        leaves: [n] int32. Rows that end.
        joins: Sequences that take a row.
        grown: [n, 4] int32. Group, row, index in the page table, page.
        copies: [n, 2] int32. Page to copy from, page to copy to. No page is both.
        swap_outs: [n, 2] int32. Page, and the host slot that its content goes to.
        swap_ins: [n, 2] int32. Host slot, and the page that its content goes to.
        freed: [n] int32. Pages whose content no row reads any more, once it is swapped out.
        slices: [n, 3] int32. Row, start, count: positions start .. start + count - 1 of the row are computed and their
            KV is written. One slice has all of a bidirectional prefix that is left.
        logits: [n, 2] int32. Packed offset of a token in the slices, and the row that draws from its logits. The row
            need not be the slice's: sequences of one request draw their first tokens from the logits of the row that
            computed the prompt.
        forced: [n, 2] int32. Row, and the token that replaces its last draw.
        drafts: [n, 2] int32. Row, and a token computed behind the row's last one as though it had been drawn; a row's
            drafts stand together in order of position. The row draws at its last token and at each draft.
        jumps: [n, 3] int32. Row, position in its sequence, and a token that follows the row's last draw without one of
            its own (`scheduler.jump_forward`). A row's tokens stand together in order of position.
        closing: [n, 2] int32. Row with a constraint, and the number of tokens within which its output is to be
            complete, since its time runs out.
    """

    step: int
    leaves: Ints
    joins: tuple[Join, ...]
    grown: Ints
    copies: Ints
    swap_outs: Ints
    swap_ins: Ints
    freed: Ints
    slices: Ints
    logits: Ints
    forced: Ints
    drafts: Ints = field(default_factory=lambda: NO_DRAFTS)
    jumps: Ints = field(default_factory=lambda: NO_JUMPS)
    closing: Ints = field(default_factory=lambda: NO_CLOSING)


@dataclass(slots=True, eq=False)  # not frozen, see `scheduler.events.EngineStats`
class StepResult:
    """Result of one step.

    Attributes:
        step: Number of the step.
        tokens: [n] int32, parallel to the plan's `logits`. FAULTED where the row's computation failed,
            NO_TOKEN where its own controls leave none to draw.
        logprobs: Logprobs of these tokens.
        faults: Row, and what happened.
        lost_pages: Pages that were to be swapped in, copied or transferred and do not hold what they should, and a
            page of each recurrent state that the step has spoilt.
        swap_seconds: Time of swaps and transfers.
        prompt_parts: Row, position of the first token, and logprobs of some tokens of its prompt.
        images_encoded: Images that were encoded.
        packing_seconds: Time to prepare the model's work.
        jumps: [n, 2] int32. Row, and the only token that can follow what the row drew. A row's tokens stand together in
            their order.
    """

    step: int
    tokens: Ints
    logprobs: Logprobs
    faults: tuple[tuple[int, str], ...] = ()
    lost_pages: tuple[int, ...] = ()
    swap_seconds: float = 0.0
    prompt_parts: tuple[tuple[int, int, Logprobs], ...] = ()
    images_encoded: int = 0
    packing_seconds: float = 0.0
    jumps: Ints = field(default_factory=lambda: NO_DRAFTS)


class Executor(Protocol):
    """Runs steps in order.

    The executor finds the fault of one sequence (a step that raises is run again in halves) and reports it in the
    result.
    An exception out of `launch` or `collect` is a fault of the device and ends the engine.
    """

    def launch(self, plan: StepPlan) -> None:
        """Starts a step; may return before it is done."""

    def collect(self) -> StepResult:
        """Waits for the oldest step that was launched and not collected, and returns its result."""

    def close(self) -> None:
        """Ends the executor's threads, and frees what it holds. Nothing else of it is called any more."""
