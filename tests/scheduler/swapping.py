"""An executor of the harness that swaps pages between the pool and a host, and loses some of them."""

from collections import deque
from dataclasses import replace
from random import Random

import numpy as np

from scheduler.step import StepPlan, StepResult
from tests.scheduler.executor import SPOILED, FakeExecutor


class SwappingExecutor(FakeExecutor):
    """Copies pages to a host's slots and back.

    Attributes:
        spoils: How likely a step that brings pages back finds one of them spoilt.
        rng: Decides it.
    """

    rng = Random(0)
    spoils = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._host: dict[int, np.ndarray] = {}
        self._lost = deque[tuple[int, ...]]()

    def launch(self, plan: StepPlan) -> None:
        size = self.layout.page_size
        for page, slot in plan.swap_outs.tolist():
            self._host[slot] = self._slots[:, page * size : (page + 1) * size].copy()
        super().launch(plan)

    def _believe(self, plan: StepPlan) -> None:
        size, ins = self.layout.page_size, plan.swap_ins.tolist()
        for slot, page in ins:
            self._slots[:, page * size : (page + 1) * size] = self._host[slot]
        super()._believe(plan)
        lost = [self.rng.choice(ins)[1]] if ins and self.rng.random() < self.spoils else []
        self._lost.append(tuple(lost))
        for page in lost:
            self._slots[:, page * size : (page + 1) * size] = SPOILED
            for mirror in self.rows.values():
                mirror.broken |= page in mirror.pages()

    def collect(self) -> StepResult:
        return replace(super().collect(), lost_pages=self._lost.popleft())
