"""Executor of one device: runs step plans on a model and its paged attention.

A forward pass that raises is run again in halves, down to the sequence that makes it raise. Only that one is reported
as a fault. Running a half again is safe: KV writes are the same bytes into the same slots, and nothing else was
changed.

On a device that computes while the host goes on, a step's draws stay on the device at first. The next step is packed
and launched before the host has them, and reads them there. Then the host fetches them (`_land`): that step is over on
the device, and its result waits for `collect`. So the scheduler's two steps in flight are one here whose draws are on
the device, and one whose result waits.
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
from model.attention.backend import NONE, AttentionBackend, StateSegments, StepShape
from model.errors import RankLost, RequestFault
from model.forward import ForwardBatch, Model
from model.images import ImagePart, ImageStore
from model.input_batch import InputBatch, StepSlices
from model.logit_parts import LogitParts
from model.page_moves import PageMoves
from model.page_store import Store
from model.sampling.prompt_logprobs import PromptLogprobs, PromptReader
from model.sampling.sampler import TORCH_OPS, Drawing, Drawn, LogitOps, Starter, sample
from model.sampling.sources import NO_SOURCES, ProcessorSources
from scheduler.events import Logprobs
from scheduler.step import FAULTED, StepPlan, StepResult

log = logging.getLogger("quire.runner")


class Runner:
    """`Executor` for one model on one device.

    Invariant: at most one step has draws that the host has not fetched (`_flight`). Results leave in the order in which
    steps were launched.

    Attributes:
        model: The model that it runs.
        attention: Back end that owns the KV pool.
        batch: Rows as the executor knows them.
        page_moves: Moves of pages around a step.
        starter: Draws while the host goes on; None where the host draws.
        runs_ahead: Whether `launch` returns before the step is done.
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
        sources: ProcessorSources = NO_SOURCES,
        rotary_axes: int = 1,
    ) -> None:
        """Makes a runner; the model and the KV pool are loaded and allocated already.

        Args:
            model: The model that is run.
            attention: Back end that owns the KV pool.
            layout: Layout of the KV pool.
            rows: The number of batch rows.
            device: Device of the model.
            probe_page: A page that no sequence gets, for `probe`.
            poison: Fill freed pages with NaN (a debugging aid).
            store: Memory that pages are swapped to. None without swapping.
            recompute: Each step computes all tokens of its sequences, and reads no KV that it has not written itself.
            images: Features of images. None for a model of text alone.
            ops: Operations of the sampler.
            starter: Draws while the host goes on. None where the host draws.
            sources: Sources of logits processors.
            rotary_axes: Axes of rotary positions, as in `model.multimodal.Vision`.
        """
        self._images, self._ops, self.starter = images, ops, None if recompute else starter
        self._flight: _Flight | None = None
        self.page_moves = PageMoves(attention, layout, probe_page + 1, poison, store)
        self.model, self.attention, self._device, self._recompute = model, attention, device, recompute
        self._probe_page, self._page_size, self._groups = probe_page, layout.page_size, len(layout.groups)
        self._state_pages, states = layout.states.pages, (layout.states.pages, layout.interval)
        self.batch = InputBatch(rows, layout.tables, layout.page_size, recompute, sources, rotary_axes, *states)
        self._position_rows = 1 if rotary_axes == 1 else 1 + rotary_axes  # of `ForwardBatch.positions`
        self._results: deque[StepResult] = deque()
        self._grammars = sources.grammars
        # Whether `_start` has launched a part of the step that `_run` gets. Recurrent states, which are written in
        # place, are spoilt then.
        self._may_have_run = False
        self._computing = 0.0  # seconds of the model and the sampler, since the start

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done."""
        return self.starter is not None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Applies a plan's changes, then computes its slices or starts to."""
        # Forced tokens replace the last draws, so those have to be known on the host first.
        if len(plan.forced):
            self._land()
        launched, computing = time.perf_counter(), self._computing
        lost, swapped = self.page_moves.apply(plan)
        self.batch.apply(plan)
        if self.starter is not None and (flight := self._start(plan, self.starter)):
            packing = time.perf_counter() - launched - swapped - (self._computing - computing)
            self._flight = replace(flight, lost=lost, swapping=swapped, packing=packing)
            return
        self._land()
        result = self._run(plan)
        packing = time.perf_counter() - launched - swapped - (self._computing - computing)
        lost += result.lost_pages
        self._results.append(replace(result, lost_pages=lost, swap_seconds=swapped, packing_seconds=packing))

    @torch.inference_mode()
    def export(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copies pages to the host. Called between two calls of `launch`.

        Args:
            pages: [n] int32. Pages that no step in flight writes to.

        Returns:
            [m, page_bytes] uint8, pages in canonical form (`AttentionBackend.export`): all n, or where the device lacks
                memory those before the first that it could not copy.
        """
        return self.page_moves.export(pages)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Waits for the oldest step whose result was not collected, and returns that result."""
        if not self._results:
            self._land()
        return self._results.popleft()

    def _start(self, plan: StepPlan, starter: Starter) -> "_Flight | None":
        """Launches a step without waiting for it, then takes in the one before.

        Returns:
            The step in flight. None where the host has to run it: it has prompt logprobs or images, it raised, or all
                draws of the step before failed.
        """
        work, self._may_have_run = StepSlices.of(plan), False
        packed = self.batch.pack(work)
        # `_run` alone returns prompt logprobs, counts encoded images, and looks at draws of constrained outputs.
        if packed.prompts or packed.images or self.batch.controls.processors.needs_host(packed.rows):
            return None
        self._may_have_run = True
        try:
            attention = self.attention.plan(packed.shape)
            began = time.perf_counter()
            logits = self._logits(packed.tokens, packed.token_positions, packed.wanted, attention, before=self._flight)
            self._computing += time.perf_counter() - began
        except RankLost:  # as in `_try`
            raise
        except Exception as error:  # `_run` finds the sequence that causes it
            log.warning("a step of %d slices raised %s, it is run again", len(plan.slices), type(error).__name__)
            return None
        if self._land():
            return None  # the probe's logits may have overwritten these
        began = time.perf_counter()
        try:
            drawing = starter(logits, self.batch.controls, packed.rows, packed.positions)
        except Exception as error:  # likewise
            log.warning("the draws of a step raised %s, it is run again", type(error).__name__)
            return None
        self._computing += time.perf_counter() - began
        self.batch.expect(packed.rows)
        return _Flight(plan, work, drawing)

    def _land(self) -> bool:
        """Waits for the step in flight, if there is one, and stores its result.

        Returns:
            Whether all its slices failed, so that the probe ran.
        """
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
        processors, drawing = self.batch.controls.processors, flight.plan.logits[:, 1].astype(np.int64)
        found.logprobs.chosen[processors.forced(drawing)] = 0.0
        jumps = processors.jumps(self.batch.arrived(found.tokens))
        self._results.append(
            StepResult(
                flight.plan.step, found.tokens, found.logprobs, tuple(found.faults), flight.lost, flight.swapping,
                packing_seconds=flight.packing, jumps=jumps,
            )
        )  # fmt: skip
        return lost_all

    def close(self) -> None:
        """Ends the threads that compile grammars and compute masks, closes the host tier, and frees the memory.

        Here, since a program may keep its `LLM`, and a server's next engine takes what is free. A runner that is closed
        has no attributes.
        """
        if self._grammars is not None:
            self._grammars.close()
        if self.page_moves.store is not None:
            self.page_moves.store.close()
        on_cuda = self._device.type == "cuda"
        vars(self).clear()
        if on_cuda:
            torch.cuda.empty_cache()  # torch would keep it, for this process alone

    @torch.inference_mode()
    def probe(self) -> None:
        """Computes one token on a page of its own, which shows whether the device still works.

        If it raises, no sequence is to blame for a step that failed.

        Raises:
            RuntimeError: The logits are not finite. Errors of the model and the device pass through.
        """
        table = np.full((self._groups, 1, 1), self._probe_page, np.int32)
        slots = np.full((self._groups, 1), self._probe_page * self._page_size, np.int64)
        zero, no_state = np.zeros(1, np.int64), np.full((self._state_pages, 1), NONE, np.int32)
        segments = StateSegments(zero, zero + 1, no_state, no_state, np.zeros(1, np.bool_)) if len(no_state) else None
        shape = StepShape(np.array([[0, 0, 1]], np.int32), zero, slots, table, zero, segments)
        positions = np.zeros((self._position_rows, 1), np.int64)
        if not torch.isfinite(self._logits(zero, positions, zero, self.attention.plan(shape))).all():
            raise RuntimeError("the model's logits for token 0 alone are not finite")

    def _run(self, plan: StepPlan) -> StepResult:
        """Computes a step to its end on this thread."""
        drawing = plan.logits[:, 1].astype(np.int64)
        found = _Found.of(len(drawing), int(self.batch.controls.top_logprobs[drawing].max(initial=0)))
        work, encoded = StepSlices.of(plan), self._encoded
        if self._may_have_run:
            self._spoil(work, found)
        self._may_have_run = False
        self._compute(work.from_the_start() if self._recompute else work, found)
        if len(found.faults) == len(plan.slices):
            self.probe()  # all sequences failed, so the device may be at fault
        processors = self.batch.controls.processors
        found.logprobs.chosen[processors.forced(drawing)] = 0.0
        self.batch.drew(drawing, found.tokens)
        return StepResult(
            plan.step,
            found.tokens,
            found.logprobs,
            tuple(found.faults),
            tuple(found.spoilt),
            prompt_parts=tuple(found.prompt_parts),
            images_encoded=self._encoded - encoded,
            jumps=processors.jumps(drawing),
        )

    @property
    def _encoded(self) -> int:
        return 0 if self._images is None else self._images.encoded

    def _compute(self, work: StepSlices, found: "_Found", known: str | None = None) -> None:
        """Computes the work into `found`, in halves after an error. A row that fails by itself becomes a fault.

        Args:
            work: The work.
            found: Results of the step.
            known: Type of the error of the work that this is a half of; it is not logged again.
        """
        failure = self._try(work, found)
        if failure is None or len(work.slices) == 1:
            return
        # Only here, where the exception is freed: its traceback keeps the activations of the pass alive, and the error
        # may have been that memory ran out.
        if failure != known:
            log.warning("a step of %d slices raised %s, running it in halves", len(work.slices), failure)
        self._spoil(work, found)
        for half in work.halves():
            self._compute(half, found, failure)

    def _try(self, work: StepSlices, found: "_Found") -> str | None:
        """Computes the work into `found`.

        Returns:
            Name of the type of an error, None without one. It becomes a fault of the row if the work has one slice.
        """
        try:
            drawn, prompt_parts = self._forward(work)
        except RankLost:  # a rank failed, no sequence did: halves would fail likewise
            raise
        except Exception as error:  # an error of any type ends the one sequence that causes it
            name = type(error).__name__
            if len(work.slices) == 1:
                row = int(work.slices[0, 0])
                log.exception("row %d cannot be computed", row)
                said = str(error) if isinstance(error, RequestFault) else ""
                found.faults.append((row, said or f"{name} while computing this sequence"))
            return name
        found.prompt_parts.extend(prompt_parts)
        if drawn is not None:
            found.take(work, drawn)
        return None

    def _spoil(self, work: StepSlices, found: "_Found") -> None:
        """Reports the recurrent states of work that has run in part: their rows go on from their last checkpoints.

        A state is written in place, so a second run would go on from the wrong tokens.
        """
        if self._state_pages and not self._recompute:
            segments = self.batch.pack(work).shape.segments
            found.spoilt.extend(segments.targets[0].tolist() if segments is not None else ())

    def _forward(self, work: StepSlices) -> tuple[Drawn | None, list[PromptLogprobs]]:
        """Runs one forward pass and draws; returns the draws, None without any, and the prompts' logprobs."""
        packed = self.batch.pack(work)
        plan = self.attention.plan(packed.shape)
        began = time.perf_counter()
        reader = PromptReader(packed.prompts, self.batch.controls, self._ops)
        parts = LogitParts(self._to_device(packed.prompts_wanted), reader.read) if packed.prompts else None
        logits = self._logits(packed.tokens, packed.token_positions, packed.wanted, plan, packed.images, parts=parts)
        drawn = None
        if len(packed.rows):
            drawn = sample(logits, self.batch.controls, packed.rows, packed.positions, self._ops)
        self._computing += time.perf_counter() - began
        return drawn, reader.found

    def _logits(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        wanted: NDArray[np.int64],
        plan: Any,
        images: Sequence[ImagePart] = (),
        before: "_Flight | None" = None,
        parts: LogitParts | None = None,
    ) -> torch.Tensor:
        """Runs the model.

        Args:
            tokens: [tokens] int64. Token ids. With `before`, -1 - i stands for the token of its i-th draw.
            positions: [axes, tokens] int64, as `ForwardBatch.positions`.
            wanted: [n] int64. Packed offsets of the tokens whose logits are returned.
            plan: The plan that attention made of the step's shape.
            images: Parts of images in this step.
            before: The step in flight whose draws `tokens` refers to (`InputBatch.expect`).
            parts: Tokens whose logits are read in parts, as `ForwardBatch.parts`.

        Returns:
            [n, vocabulary] float32 on the device. The next call may overwrite it.
        """
        device_tokens, places, last = (self._to_device(array) for array in (tokens, positions, wanted))
        if before is not None:
            drawn = before.drawing.tokens
            there = drawn[(-1 - device_tokens).clamp(0, len(drawn) - 1)] if len(drawn) else device_tokens
            device_tokens = torch.where(device_tokens < 0, there, device_tokens)
        features = self._images.of_step(images) if images and self._images is not None else None
        batch = ForwardBatch(device_tokens, places, last, self.attention, plan, features, parts=parts)
        return self.model.forward(batch).logits

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step that the device computes.

    Attributes:
        drawing: The step's draws, on the device.
        lost: Pages that could not be loaded, as `StepResult.lost_pages`.
        swapping: Seconds, as `StepResult.swap_seconds`.
        packing: Seconds, as `StepResult.packing_seconds`.
    """

    plan: StepPlan
    work: StepSlices
    drawing: Drawing
    lost: tuple[int, ...] = ()
    swapping: float = 0.0
    packing: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Results of a step as they come in.

    Attributes:
        tokens: [n] int32. Drawn tokens, FAULTED until drawn.
        logprobs: Logprobs of the tokens.
        faults: Row and message of each sequence that failed.
        prompt_parts: Logprobs of prompts.
        spoilt: Pages of states that were written more than once.
    """

    tokens: NDArray[np.int32]
    logprobs: Logprobs
    faults: list[tuple[int, str]]
    prompt_parts: list[PromptLogprobs]
    spoilt: list[int]

    @staticmethod
    def of(n: int, k: int) -> "_Found":
        """Allocates the results of n draws, each with at most k alternatives."""
        ids, top = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
        logprobs = Logprobs(np.zeros(n, np.float32), np.zeros(n, np.int32), ids, top)
        return _Found(np.full(n, FAULTED, np.int32), logprobs, [], [], [])

    def take(self, work: StepSlices, drawn: Drawn) -> None:
        """Writes the draws of `work`, a part of the step, into their places."""
        places, k = work.draws[:, 2], drawn.logprobs.top.shape[1]
        self.tokens[places] = drawn.tokens
        self.logprobs.chosen[places] = drawn.logprobs.chosen
        self.logprobs.rank[places] = drawn.logprobs.rank
        self.logprobs.top_ids[places, :k] = drawn.logprobs.top_ids
        self.logprobs.top[places, :k] = drawn.logprobs.top
        for i in np.flatnonzero(~np.isfinite(drawn.logprobs.chosen)).tolist():
            self.tokens[places[i]] = FAULTED
            self.faults.append((int(work.slices[work.draws[i, 0], 0]), "the model's logits are not finite"))
