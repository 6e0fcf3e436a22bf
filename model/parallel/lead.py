"""Rank 0's side of steps and page moves: each is sent to the followers before rank 0 does it.

The order matters. In a step, rank 0 waits for the followers in its collectives, so they must have started.
"""

import logging
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.backend import AttentionBackend, StepShape
from model.errors import RankLost
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder, Model
from model.logit_parts import LogitParts
from model.page_store import Store, copy_or_lose
from model.parallel.members import RankGroup
from model.parallel.steps import pack_step, send_inputs, unpack_moves
from model.parallel.wire import FrameKind, pack_arrays

log = logging.getLogger("quire.ranks")


@dataclass(frozen=True, slots=True, eq=False)
class RankGroupPlan:
    """Plan of a step in a rank group.

    Attributes:
        shape: Shape of the step, from which each follower makes its own plan.
        own: Rank 0's plan.
    """

    shape: StepShape
    own: Any


class RankGroupAttention:
    """`AttentionBackend` over rank 0's own and those of its followers."""

    def __init__(self, own: AttentionBackend, group: RankGroup) -> None:
        self.own, self._group, self.name = own, group, own.name

    def plan(self, shape: StepShape) -> RankGroupPlan:
        return RankGroupPlan(shape, self.own.plan(shape))

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: RankGroupPlan) -> None:
        self.own.write(layer, keys, values, plan.own)

    def attend(self, layer: int, queries: Tensor, plan: RankGroupPlan, sinks: Tensor | None = None) -> Tensor:
        return self.own.attend(layer, queries, plan.own, sinks)

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages on all ranks.

        Raises:
            torch.OutOfMemoryError: A rank lacked memory, so the pages are lost on all ranks.
            RankLost: A rank has failed.
        """
        self._group.broadcast(FrameKind.COPY, pack_arrays(pages))
        lost = [copy_or_lose(self.own, pages), *_lost_pages(self._group)]
        if any(map(len, lost)):
            ranks = ", ".join(str(rank) for rank, some in enumerate(lost) if len(some))
            raise torch.OutOfMemoryError(f"no memory to copy {len(pages)} pages on rank {ranks}")

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        """Returns rank 0's part of the pages."""
        return self.own.export(pages, groups)

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        self.own.import_pages(pages, groups, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self._group.broadcast(FrameKind.POISON, pack_arrays(pages))
        self.own.poison(pages)


class RankGroupStore:
    """`Store` over rank 0's parts of pages and those of its followers."""

    def __init__(self, own: Store, group: RankGroup) -> None:
        self._own, self._group = own, group

    def save(self, moves: NDArray[np.int32]) -> None:
        self._group.broadcast(FrameKind.SAVE, pack_arrays(moves))
        self._own.save(moves)

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Loads pages on all ranks. A page that one rank has lost is lost."""
        self._group.broadcast(FrameKind.LOAD, pack_arrays(moves))
        return np.unique(np.concatenate([self._own.load(moves), *_lost_pages(self._group)]))

    def close(self) -> None:
        """Closes rank 0's part. Those of followers end with their processes."""
        self._own.close()


def _lost_pages(group: RankGroup) -> list[NDArray[np.int32]]:
    """Waits for the pages that each follower has lost, in the order of ranks. Raises RankLost."""
    return [unpack_moves(said, 1) for said in group.answers(FrameKind.LOST)]


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Reads logits in parts until a reading raises. Followers compute all parts, so rank 0 goes on to the last one.

    Attributes:
        parts: The parts and their reader.
        errors: What the reader raised, at most one.
    """

    parts: LogitParts
    errors: list[Exception] = field(default_factory=list)

    def read(self, logits: Tensor) -> None:
        if self.errors:
            return
        try:
            self.parts.read(logits)
        except Exception as error:  # raised behind the step, whose other parts need the memory that it holds
            traceback.clear_frames(error.__traceback__)
            self.errors.append(error)


class RankGroupModel:
    """`Model` of all ranks, over a `RankGroupAttention`.

    Attributes:
        own: This rank's part of the model.
    """

    def __init__(self, own: Model, group: RankGroup, page_size: int) -> None:
        self.own, self._group, self._page_size = own, group, page_size

    @property
    def vision(self) -> ImageEncoder | None:
        return self.own.vision

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Computes a step on all ranks.

        Raises:
            RankLost: Any rank failed. The other ranks wait in the middle of the step, so no part of it can be run
                again.
            Exception: The reader of `batch.parts` raised it. All ranks have done the step.
        """
        if not isinstance(batch.attention, RankGroupAttention):
            raise TypeError(f"rank 0 leads over its group's attention, not over {batch.attention.name}")
        if self._group.lost is not None:
            raise RankLost(self._group.lost)
        reading = None if batch.parts is None else _Reading(batch.parts)
        parts = None if reading is None else LogitParts(reading.parts.wanted, reading.read)
        try:
            ahead = self._group.collective.runs_ahead
            self._group.broadcast(FrameKind.STEP, pack_step(batch, batch.plan.shape, self._page_size, not ahead))
            if ahead:
                send_inputs(self._group.collective, batch)
            own = replace(batch, attention=batch.attention.own, plan=batch.plan.own, parts=parts)
            output = self.own.forward(own)
        except RankLost as error:
            self._group.fail(str(error))
            raise
        except Exception as error:
            log.exception("rank 0 has failed")
            why = f"rank 0 has failed: {type(error).__name__}: {error}"
            self._group.fail(why)
            raise RankLost(why) from error
        if reading is not None and reading.errors:
            raise reading.errors[0]
        return output
