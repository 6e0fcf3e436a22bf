"""Executor of one device: runs step plans on a model and its paged attention.

A forward pass that raises is run again in halves, down to the one sequence that makes it raise; only that one is
reported as a fault. Running a half again is safe: KV writes are the same bytes into the same slots, nothing else was
changed.
"""

import logging
import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from model.architectures.registry import Model
from model.attention.backend import AttentionBackend, StepShape
from model.batch import Mirror, Work
from model.page_store import PageStore
from model.sampling.sampler import Drawn, sample
from scheduler.events import Logprobs
from scheduler.step import FAULTED, StepPlan, StepResult

log = logging.getLogger("quire.runner")


class Runner:
    """`Executor` for `model` on `device`. probe_page: a page that no sequence gets, for `probe`. poison: fill pages
    that are freed with NaN (a debugging aid). store: where pages are swapped to; None where none ever is. recompute:
    each step computes all tokens of its sequences, and reads no KV that it has not written itself.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        layout: KVLayout,
        rows: int,
        device: torch.device,
        probe_page: int,
        poison: bool = False,
        store: PageStore | None = None,
        recompute: bool = False,
    ) -> None:
        self._store, self._recompute = store, recompute
        self._model, self._attention, self._device, self._poison = model, attention, device, poison
        self._probe_page, self._page_size, self._groups = probe_page, layout.page_size, len(layout.groups)
        self._mirror = Mirror(rows, len(layout.groups), layout.page_size, history=recompute)
        self._results: deque[StepResult] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        if self._store is not None and len(plan.swap_outs):
            self._store.save(plan.swap_outs)
        swapped = time.perf_counter() - began
        if self._poison and len(plan.freed):
            self._attention.poison(plan.freed)
        self._mirror.apply(plan)
        if len(plan.copies):
            self._attention.copy(plan.copies)
        began, lost = time.perf_counter(), ()
        if self._store is not None and len(plan.swap_ins):
            lost = tuple(self._store.load(plan.swap_ins).tolist())
        swapped += time.perf_counter() - began
        self._results.append(replace(self._run(plan), lost_pages=lost, swap_seconds=swapped))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to let go of."""

    @torch.inference_mode()
    def probe(self) -> None:
        """Computes one token of its own. Raises what the model or the device raises, or RuntimeError for logits that
        are not finite: then no sequence is to blame for a step that failed.
        """
        table = np.full((self._groups, 1, 1), self._probe_page, np.int32)
        slots = np.full((self._groups, 1), self._probe_page * self._page_size, np.int64)
        zero = np.zeros(1, np.int64)
        shape = StepShape(np.array([[0, 0, 1]], np.int32), zero, slots, table)
        if not torch.isfinite(self._logits(zero, shape, zero)).all():
            raise RuntimeError("the model's logits for token 0 alone are not finite")

    def _run(self, plan: StepPlan) -> StepResult:
        n = len(plan.logits)
        drawing = plan.logits[:, 1].astype(np.int64)
        k = int(self._mirror.controls.top_logprobs[drawing].max(initial=0))
        tokens = np.full(n, FAULTED, np.int32)
        logprobs = Logprobs(
            np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
        )
        faults: list[tuple[int, str]] = []
        work = Work.of(plan)
        self._compute(work.from_the_start() if self._recompute else work, tokens, logprobs, faults)
        if len(faults) == len(plan.slices):
            self.probe()  # all failed: is it the device?
        self._mirror.drew(drawing, tokens)
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
            tokens[places[i]] = FAULTED
            faults.append((int(work.slices[work.draws[i, 0], 0]), "the model's logits are not finite"))

    def _forward(self, work: Work) -> Drawn | None:
        packed = self._mirror.pack(work)
        logits = self._logits(packed.tokens, packed.shape, packed.wanted)
        if not len(packed.wanted):
            return None
        return sample(logits, self._mirror.controls, packed.rows, packed.positions)

    def _logits(self, tokens: NDArray[np.int64], shape: StepShape, wanted: NDArray[np.int64]) -> torch.Tensor:
        plan = self._attention.plan(shape)
        device_tokens, positions, places = (self._to_device(array) for array in (tokens, shape.positions, wanted))
        return self._model.forward(device_tokens, positions, places, self._attention, plan)

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
