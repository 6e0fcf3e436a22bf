"""Executor of one device: runs step plans on a model and its paged attention.

A forward pass that raises is run again in halves, down to the one sequence that makes it raise; only that one is
reported as a fault. Running a half again is safe: KV writes are the same bytes into the same slots, nothing else was
changed.
"""

import logging
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from model.architectures.registry import Model
from model.attention.backend import AttentionBackend
from model.batch import Mirror, Work
from model.sampling.sampler import Drawn, sample
from scheduler.events import Logprobs
from scheduler.step import StepPlan, StepResult

log = logging.getLogger("quire.runner")


class Runner:
    """`Executor` for `model` on `device`. poison: fill the pages of rows that leave with NaN (a debugging aid)."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        layout: KVLayout,
        rows: int,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self._model, self._attention, self._device, self._poison = model, attention, device, poison
        self._mirror = Mirror(rows, len(layout.groups), layout.page_size)
        self._results: deque[StepResult] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        if self._poison:
            self._attention.poison(self._mirror.pages_of(plan.leaves))
        self._mirror.apply(plan)
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def _run(self, plan: StepPlan) -> StepResult:
        n = len(plan.logits)
        drawing = plan.logits[:, 1]
        k = int(self._mirror.controls.top_logprobs[drawing].max(initial=0))
        tokens = np.full(n, -1, np.int32)
        logprobs = Logprobs(
            np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
        )
        faults: list[tuple[int, str]] = []
        self._compute(Work.of(plan), tokens, logprobs, faults)
        self._mirror.last[drawing] = tokens
        return StepResult(plan.step, tokens, logprobs, tuple(faults))

    def _compute(
        self, work: Work, tokens: NDArray[np.int32], logprobs: Logprobs, faults: list[tuple[int, str]]
    ) -> None:
        """Fills tokens and logprobs at the places of the work's draws; collects the rows that cannot be computed."""
        try:
            drawn = self._forward(work)
        except Exception as error:  # whatever a sequence makes the model raise ends that sequence alone
            if len(work.slices) == 1:
                row = int(work.slices[0, 0])
                log.exception("row %d cannot be computed", row)
                faults.append((row, f"{type(error).__name__} while computing this sequence"))
                return
            log.warning("a step of %d slices raised %s, running it in halves", len(work.slices), type(error).__name__)
            for half in work.halves():
                self._compute(half, tokens, logprobs, faults)
            return
        if drawn is None:
            return
        places = work.draws[:, 2]
        k = drawn.logprobs.top.shape[1]
        tokens[places] = drawn.tokens
        logprobs.chosen[places] = drawn.logprobs.chosen
        logprobs.rank[places] = drawn.logprobs.rank
        logprobs.top_ids[places, :k] = drawn.logprobs.top_ids
        logprobs.top[places, :k] = drawn.logprobs.top
        for i in np.flatnonzero(~np.isfinite(drawn.logprobs.chosen)).tolist():
            tokens[places[i]] = -1
            faults.append((int(work.slices[work.draws[i, 0], 0]), "the model's logits are not finite"))

    def _forward(self, work: Work) -> Drawn | None:
        packed = self._mirror.pack(work)
        plan = self._attention.plan(packed.shape)
        logits = self._model.forward(
            self._to_device(packed.tokens),
            self._to_device(packed.shape.positions),
            self._to_device(packed.wanted),
            self._attention,
            plan,
        )
        if not len(packed.wanted):
            return None
        return sample(logits, self._mirror.controls, packed.rows, packed.positions)

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
