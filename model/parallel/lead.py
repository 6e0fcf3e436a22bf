"""What rank 0 does, told to the others before it does it: steps of its model, moves of pages."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.attention.backend import AttentionBackend, StepShape
from model.errors import RankLost
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder, Model
from model.page_store import Store
from model.parallel.members import Led
from model.parallel.steps import pack_step, unpack_moves
from model.parallel.wire import Kind, pack_arrays

log = logging.getLogger("quire.ranks")


@dataclass(frozen=True, slots=True, eq=False)
class LedPlan:
    """shape: of the step, which others plan for themselves. own: rank 0's plan."""

    shape: StepShape
    own: Any


class LedAttention:
    """`AttentionBackend` over rank 0's own and those of its followers."""

    def __init__(self, own: AttentionBackend, group: Led) -> None:
        self.own, self._group, self.name = own, group, own.name

    def plan(self, shape: StepShape) -> LedPlan:
        return LedPlan(shape, self.own.plan(shape))

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: LedPlan) -> None:
        self.own.write(layer, keys, values, plan.own)

    def attend(self, layer: int, queries: Tensor, plan: LedPlan) -> Tensor:
        return self.own.attend(layer, queries, plan.own)

    def copy(self, pages: NDArray[np.int32]) -> None:
        self._group.tell(Kind.COPY, pack_arrays(pages))
        self.own.copy(pages)

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        """Of rank 0's part."""
        return self.own.export(pages)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        self.own.import_pages(pages, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self._group.tell(Kind.POISON, pack_arrays(pages))
        self.own.poison(pages)


class LedStore:
    """`Store` of rank 0's parts of pages and of those of its followers."""

    def __init__(self, own: Store, group: Led) -> None:
        self._own, self._group = own, group

    def save(self, moves: NDArray[np.int32]) -> None:
        self._group.tell(Kind.SAVE, pack_arrays(moves))
        self._own.save(moves)

    def load(self, moves: NDArray[np.int32]) -> NDArray[np.int32]:
        """What any rank has lost is lost."""
        self._group.tell(Kind.LOAD, pack_arrays(moves))
        lost = [self._own.load(moves), *(unpack_moves(said, 1) for said in self._group.answers(Kind.LOST))]
        return np.unique(np.concatenate(lost))


class LedModel:
    """`Model` of all ranks, over a `LedAttention`."""

    def __init__(self, own: Model, group: Led, page_size: int) -> None:
        self._own, self._group, self._page_size = own, group, page_size

    @property
    def vision(self) -> ImageEncoder | None:
        return self._own.vision

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Raises RankLost, whatever goes wrong: the others wait in the middle of the step, and none of it can be run
        again.
        """
        if not isinstance(batch.attention, LedAttention):
            raise TypeError(f"rank 0 leads over its group's attention, not over {batch.attention.name}")
        if self._group.lost is not None:
            raise RankLost(self._group.lost)
        try:
            self._group.tell(Kind.STEP, pack_step(batch, batch.plan.shape, self._page_size))
            return self._own.forward(replace(batch, attention=batch.attention.own, plan=batch.plan.own))
        except RankLost as error:
            self._group.fail(str(error))
            raise
        except Exception as error:
            log.exception("rank 0 has failed")
            why = f"rank 0 has failed: {type(error).__name__}: {error}"
            self._group.fail(why)
            raise RankLost(why) from error
