"""Measures the device memory that steps take beside weights and KV, so that the KV pool gets what is left.

The largest steps of text are run once before the pool is allocated, on a page of their own, as vLLM does it. What the
sampler takes is computed: that of draws by their number, that of prompts' logprobs by the size of a part. Images take
more. Ranks then make their first exchanges, whose buffers are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cache_manager.layout import KVLayout
from model.attention.backend import NONE, StateSegments, StepShape
from model.backend import StepSizes
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.gpu.attention_backend import TritonAttention
from model.gpu.cutoff import scratch_bytes
from model.logit_parts import LOGIT_BYTES, rows_of_part
from model.parallel.collective import Collective


class DeviceMemory(Protocol):
    """Memory of a device."""

    def peak_of(self, work: Callable[[], object]) -> int:
        """Runs work, and returns the bytes that it takes at most beside what is allocated already."""


class CudaMemory:
    """`DeviceMemory` of the current CUDA device, as torch's allocator takes it."""

    def peak_of(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_reserved() - before
        torch.cuda.empty_cache()
        return taken

    def lasting(self, work: Callable[[], object]) -> int:
        """Runs work, and returns the bytes that it takes for good beside torch's allocator, as libraries do."""
        before = self._outside()
        work()
        return max(0, self._outside() - before)

    def _outside(self) -> int:
        """Returns the bytes of the device that torch's allocator of this process has not taken."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def exchange_first(collective: Collective, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Makes a small sum of ranks and the largest: NCCL takes its buffers at the first exchange of a kind and size."""
    for rows in (1, tokens):
        collective.sum(torch.zeros((rows, hidden), dtype=dtype, device=device))


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes beside weights and KV.

    Attributes:
        step: Activations of the largest step, and partial results of attention.
        graphs: Memory that CUDA graphs keep.
        sampler: Copies of logits, of draws or of a part of prompts' logits, whichever takes more.
    """

    step: int
    graphs: int
    sampler: int

    @property
    def total(self) -> int:
        return self.step + self.graphs + self.sampler


def measure_steps(
    decoder: Decoder, attention: Callable[[], TritonAttention], layout: KVLayout, axes: int, memory: DeviceMemory,
    sizes: StepSizes, graph_tokens: int,
) -> WorkingMemory:  # fmt: skip
    """Measures the memory of the largest steps.

    Args:
        decoder: The decoder, with its kernels.
        attention: Makes attention over a page.
        layout: Layout of its pool.
        axes: Axes of rotary positions.
        memory: Memory of the device.
        sizes: Most of what a step has.
        graph_tokens: Most tokens of a step with a graph; 0 without graphs.
    """

    def run(count: int) -> None:
        made = attention()
        made.keep_parts()
        shape = largest_step(layout, sizes, count)
        device = decoder.embedding.tokens.device
        positions = torch.from_numpy(shape.positions).to(device).expand(1 if axes == 1 else 1 + axes, -1)
        wanted = torch.arange(len(shape.slices), device=device)
        decoder.forward(ForwardBatch(torch.zeros_like(positions[0]), positions, wanted, made, made.plan(shape)))

    vocabulary = decoder.embedding.tokens.vocabulary
    kept = memory.peak_of(lambda: run(graph_tokens)) + 4 * sizes.rows * vocabulary if graph_tokens else 0
    draws = sizes.rows * vocabulary * LOGIT_BYTES + scratch_bytes(sizes.rows, vocabulary)
    # A part is done before the draws' logits are computed, so the two are never held together.
    part = min(rows_of_part(vocabulary), sizes.tokens) * vocabulary * LOGIT_BYTES
    return WorkingMemory(memory.peak_of(lambda: run(sizes.tokens)), kept, max(draws, part))


def largest_step(layout: KVLayout, sizes: StepSizes, tokens: int) -> StepShape:
    """Returns a step of as many sequences as can be, from their first token on, which all write to page 0.

    Args:
        layout: Layout of the KV pool.
        sizes: Most of what a step has.
        tokens: Tokens of the step; less where sequences cannot have so many.
    """
    tokens = min(tokens, sizes.rows * sizes.context)
    sequences = min(sizes.rows, tokens)
    counts = np.full(sequences, tokens // sequences)
    counts[: tokens % sequences] += 1
    offsets = np.cumsum(counts) - counts
    positions = np.arange(tokens) - np.repeat(offsets, counts)
    slices = np.stack((np.arange(sequences), np.zeros_like(counts), counts), axis=1).astype(np.int32)
    pages = -(-int(counts.max()) // layout.page_size)
    groups, states = len(layout.groups), layout.states.pages
    slots = np.broadcast_to(positions % layout.page_size, (groups, tokens))
    tables = np.zeros((groups, sequences, pages), np.int32)
    none = np.full((states, sequences), NONE, np.int32)
    segments = StateSegments(offsets, counts, none, none, np.zeros(sequences, np.bool_)) if states else None
    return StepShape(slices, positions, slots, tables, np.zeros(sequences, np.int64), segments)
