"""Into and out of an executor: flat arrays of what changed and of the work of one step.

An executor mirrors the rows and expands the plan, so a step costs what changed, not what is running. With two steps in
flight a decode's token does not exist when it is planned; the executor's mirror has it ("the token row r drew last").
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.controls import Controls
from scheduler.events import Logprobs
from scheduler.request import PromptImage

Ints = NDArray[np.int32]

FAULTED, NO_TOKEN = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """What another engine has computed goes into pages [n]. content: uint8 [n, page_bytes], in canonical form."""

    pages: Ints
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A sequence takes a row. All that an executor knows of a row comes from here and from what it drew since.

    tokens: prompt, then output tokens that are already known. index: of the sequence in its request. images: of the
    prompt. whole: so many tokens at the front see each other in both directions. fill: for pages of its own, before
    anything is computed.
    """

    row: int
    tokens: Ints
    prompt_count: int
    controls: Controls
    index: int = 0
    images: tuple[PromptImage, ...] = ()
    whole: int = 0
    fill: Fill | None = None


def fill_bytes(joins: Iterable[Join]) -> int:
    """Of what they have the executor fill in."""
    return sum(join.fill.content.nbytes for join in joins if join.fill is not None)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Applied in this order: swap_outs, leaves, joins, given, grown, copies, swap_ins, fills of joins; then the slices
    are computed.

    swap_outs: [n, 2] of page, host slot that its content goes to. leaves: [n] rows. given: [n, 2] of row, token that it
    goes on with in place of the one that it drew last. grown: [n, 4] of group, row, index
    in the page table, page. copies: [n, 2] of page to copy from, page to copy to; no page is both. swap_ins: [n, 2] of
    host slot, page that its content goes to. freed: [n] pages whose content nobody reads any more, once swapped out.
    slices: [n, 3] of row, start, count: positions start .. start + count - 1 of that row are computed and their KV
    written; what is left of tokens that see each other in both directions is in one slice. logits: [n, 2] of packed
    offset of a token in the slices, row that draws from its logits, which need not be the slice's: sequences that go
    on from one prompt draw from the logits of the row that computed it.
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
    given: Ints


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """tokens: [n], parallel to the plan's `logits`; FAULTED where the row did, NO_TOKEN where its own controls leave
    none to draw. faults: (row, what happened).

    lost_pages: pages to be swapped in whose host slots did not hold what had been put there. swap_seconds: how long
    swapping and filling took. prompt_parts: row, position of the first token, and the logprobs of some tokens of its
    prompt. images_encoded: calls of the image encoder. packing_seconds: how long it took to prepare the model's work.
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


class Executor(Protocol):
    """Runs steps in order. A fault of one sequence is found by the executor (a step that raises is run again in halves)
    and reported in the result; what `launch` or `collect` raise is a fault of the device and ends the engine.
    """

    def launch(self, plan: StepPlan) -> None:
        """Starts a step; may return before it is done."""

    def collect(self) -> StepResult:
        """The oldest step that was launched and not collected, waiting for it."""

    def close(self) -> None:
        """Lets go of threads; nothing is launched any more."""
