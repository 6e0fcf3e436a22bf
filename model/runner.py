"""Executor of one device: runs step plans on a model and its paged attention.

A forward pass that raises is run again in halves, down to the one sequence that makes it raise; only that one is
reported as a fault. Running a half again is safe: KV writes are the same bytes into the same slots, nothing else was
changed.

On a device that computes while the host goes on, a step is in flight until its result is wanted: the next one is packed
and asked for before this one's tokens are known here; it finds them on the device.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend, StepShape
from model.batch import Mirror, PromptSlice, Work
from model.errors import RankLost, RequestFault
from model.forward import ForwardBatch, Model
from model.images import ImagePart, ImageStore
from model.page_store import Store
from model.sampling.logits_processors import LogitsProcessorFactory
from model.sampling.sampler import TORCH_OPS, Drawing, Drawn, LogitOps, Starter, logprobs_of, sample
from scheduler.events import Logprobs
from scheduler.step import FAULTED, StepPlan, StepResult

log = logging.getLogger("quire.runner")

PromptLogprobs = tuple[int, int, Logprobs]
"""Row, position of the first token, and the logprobs of some tokens of its prompt."""


class Runner:
    """`Executor` for `model` on `device`. probe_page: a page that no sequence gets, for `probe`. poison: fill pages
    that are freed with NaN (a debugging aid). store: where pages are swapped to; None where none ever is. recompute:
    each step computes all tokens of its sequences, and reads no KV that it has not written itself. images: None for a
    model of text alone. ops: for the sampler. starter: makes draws while the host goes on, None where the host draws.
    factories: of logits processors.
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
        store: Store | None = None,
        recompute: bool = False,
        images: ImageStore | None = None,
        ops: LogitOps = TORCH_OPS,
        starter: Starter | None = None,
        factories: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        self._images, self._ops, self._starter = images, ops, None if recompute else starter
        self._flight: _Flight | None = None
        self._store, self._recompute = store, recompute
        self._model, self._attention, self._device, self._poison = model, attention, device, poison
        self._probe_page, self._page_size, self._groups = probe_page, layout.page_size, len(layout.groups)
        self._mirror = Mirror(rows, len(layout.groups), layout.page_size, recompute, factories)
        self._results: deque[StepResult] = deque()
        self._computing = 0.0  # seconds of the model and the sampler, since the start

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done."""
        return self._starter is not None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        if len(plan.given):  # in place of what was drawn last
            self._land()
        launched, computing = time.perf_counter(), self._computing
        began = launched
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
        for fill in (join.fill for join in plan.joins):
            if fill is not None:
                self._attention.import_pages(fill.pages, torch.from_numpy(fill.content))
        swapped += time.perf_counter() - began
        if self._starter is not None and (flight := self._start(plan, self._starter)):
            packing = time.perf_counter() - launched - swapped - (self._computing - computing)
            self._flight = replace(flight, lost=lost, swapping=swapped, packing=packing)
            return
        self._land()
        result = self._run(plan)
        packing = time.perf_counter() - launched - swapped - (self._computing - computing)
        self._results.append(replace(result, lost_pages=lost, swap_seconds=swapped, packing_seconds=packing))

    @torch.inference_mode()
    def export(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Pages that no step in flight writes to, in canonical form, [n, page_bytes] on the host. Between two calls of
        `launch`.
        """
        content: NDArray[np.uint8] = self._attention.export(pages).cpu().numpy()
        return content

    @torch.inference_mode()
    def collect(self) -> StepResult:
        if not self._results:
            self._land()
        return self._results.popleft()

    def _start(self, plan: StepPlan, starter: Starter) -> "_Flight | None":
        """The step in flight, behind which the one before has landed; None for one that the host has to see through."""
        work = Work.of(plan)
        packed = self._mirror.pack(work)
        if packed.prompts or packed.images:
            return None
        try:
            attention = self._attention.plan(packed.shape)
            began = time.perf_counter()
            shape = packed.shape
            logits = self._logits(packed.tokens, shape.positions, packed.wanted, attention, before=self._flight)
            self._computing += time.perf_counter() - began
        except Exception as error:  # `_run` finds out whose it is
            log.warning("a step of %d slices raised %s, it is run again", len(plan.slices), type(error).__name__)
            return None
        if self._land():
            return None  # the probe's logits may lie where these did
        began = time.perf_counter()
        try:
            drawing = starter(logits, self._mirror.controls, packed.rows, packed.positions)
        except Exception as error:  # likewise
            log.warning("the draws of a step raised %s, it is run again", type(error).__name__)
            return None
        self._computing += time.perf_counter() - began
        self._mirror.expect(packed.rows)
        return _Flight(plan, work, drawing)

    def _land(self) -> bool:
        """Waits for the step in flight, if there is one, and takes in what came of it. Whether that took a probe."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        began = time.perf_counter()
        drawn = flight.drawing.fetch()
        self._computing += time.perf_counter() - began
        found = _Found.of(len(drawn.tokens), drawn.logprobs.top.shape[1])
        found.take(flight.work, drawn)
        lost_all = len(found.faults) == len(flight.plan.slices)
        if lost_all:
            self.probe()
        self._mirror.arrived(found.tokens)
        self._results.append(
            StepResult(
                flight.plan.step, found.tokens, found.logprobs, tuple(found.faults), flight.lost, flight.swapping,
                packing_seconds=flight.packing,
            )
        )  # fmt: skip
        return lost_all

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
        shape = StepShape(np.array([[0, 0, 1]], np.int32), zero, slots, table, zero)
        if not torch.isfinite(self._logits(zero, zero, zero, self._attention.plan(shape))).all():
            raise RuntimeError("the model's logits for token 0 alone are not finite")

    def _run(self, plan: StepPlan) -> StepResult:
        drawing = plan.logits[:, 1].astype(np.int64)
        found = _Found.of(len(drawing), int(self._mirror.controls.top_logprobs[drawing].max(initial=0)))
        work, encoded = Work.of(plan), self._encoded
        self._compute(work.from_the_start() if self._recompute else work, found)
        if len(found.faults) == len(plan.slices):
            self.probe()  # all failed: is it the device?
        self._mirror.drew(drawing, found.tokens)
        return StepResult(
            plan.step,
            found.tokens,
            found.logprobs,
            tuple(found.faults),
            prompt_parts=tuple(found.prompt_parts),
            images_encoded=self._encoded - encoded,
        )

    @property
    def _encoded(self) -> int:
        return 0 if self._images is None else self._images.encoded

    def _compute(self, work: Work, found: "_Found") -> None:
        """Fills in what the work gives; collects the rows that cannot be computed."""
        try:
            drawn, prompt_parts = self._forward(work)
        except RankLost:  # not one of the sequences is to blame
            raise
        except Exception as error:  # whatever a sequence makes the model raise ends that sequence alone
            if len(work.slices) == 1:
                row = int(work.slices[0, 0])
                log.exception("row %d cannot be computed", row)
                said = str(error) if isinstance(error, RequestFault) else ""
                found.faults.append((row, said or f"{type(error).__name__} while computing this sequence"))
                return
            log.warning("a step of %d slices raised %s, running it in halves", len(work.slices), type(error).__name__)
            for half in work.halves():
                self._compute(half, found)
            return
        found.prompt_parts.extend(prompt_parts)
        if drawn is not None:
            found.take(work, drawn)

    def _forward(self, work: Work) -> tuple[Drawn | None, list[PromptLogprobs]]:
        packed = self._mirror.pack(work)
        plan = self._attention.plan(packed.shape)
        began = time.perf_counter()
        logits = self._logits(packed.tokens, packed.shape.positions, packed.wanted, plan, packed.images)
        n = len(packed.rows)
        drawn = None
        if n:
            drawn = sample(logits[:n], self._mirror.controls, packed.rows, packed.positions, self._ops)
        parts = self._prompt_logprobs(logits[n:], packed.prompts)
        self._computing += time.perf_counter() - began
        return drawn, parts

    def _prompt_logprobs(self, logits: torch.Tensor, prompts: list[PromptSlice]) -> list[PromptLogprobs]:
        """logits: of the slices' tokens, one after the other."""
        parts: list[PromptLogprobs] = []
        for prompt in prompts:
            mine, logits = logits[: len(prompt.tokens)], logits[len(prompt.tokens) :]
            wanted = np.maximum(self._mirror.controls.top_logprobs[[prompt.row]], 0).repeat(len(mine))
            tokens = prompt.tokens.astype(np.int64)
            parts.append((prompt.row, prompt.start, logprobs_of(mine, tokens, wanted, self._ops.summary(mine))))
        return parts

    def _logits(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        wanted: NDArray[np.int64],
        plan: Any,
        images: Sequence[ImagePart] = (),
        before: "_Flight | None" = None,
    ) -> torch.Tensor:
        """plan: of attention. before: the step that draws what `Mirror.expect` says."""
        device_tokens, places, last = (self._to_device(array) for array in (tokens, positions[None], wanted))
        if before is not None:
            drawn = before.drawing.tokens
            there = drawn[(-1 - device_tokens).clamp(0, len(drawn) - 1)] if len(drawn) else device_tokens
            device_tokens = torch.where(device_tokens < 0, there, device_tokens)
        features = self._images.of_step(images) if images and self._images is not None else None
        batch = ForwardBatch(device_tokens, places, last, self._attention, plan, features)
        return self._model.forward(batch).logits

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step that the device computes. lost, swapping, packing: as in `StepResult`."""

    plan: StepPlan
    work: Work
    drawing: Drawing
    lost: tuple[int, ...] = ()
    swapping: float = 0.0
    packing: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Results of a step as they come in: see `StepResult`."""

    tokens: NDArray[np.int32]
    logprobs: Logprobs
    faults: list[tuple[int, str]]
    prompt_parts: list[PromptLogprobs]

    @staticmethod
    def of(n: int, k: int) -> "_Found":
        """For n draws, of which each may ask for k alternatives."""
        ids, top = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
        logprobs = Logprobs(np.zeros(n, np.float32), np.zeros(n, np.int32), ids, top)
        return _Found(np.full(n, FAULTED, np.int32), logprobs, [], [])

    def take(self, work: Work, drawn: Drawn) -> None:
        """What the work's draws gave, at their places."""
        places, k = work.draws[:, 2], drawn.logprobs.top.shape[1]
        self.tokens[places] = drawn.tokens
        self.logprobs.chosen[places] = drawn.logprobs.chosen
        self.logprobs.rank[places] = drawn.logprobs.rank
        self.logprobs.top_ids[places, :k] = drawn.logprobs.top_ids
        self.logprobs.top[places, :k] = drawn.logprobs.top
        for i in np.flatnonzero(~np.isfinite(drawn.logprobs.chosen)).tolist():
            self.tokens[places[i]] = FAULTED
            self.faults.append((int(work.slices[work.draws[i, 0], 0]), "the model's logits are not finite"))
