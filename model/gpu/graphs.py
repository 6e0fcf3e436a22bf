"""Decodes as CUDA graphs: the launches of a step are recorded when a model is loaded, and then replayed as one.

A graph is recorded for each of some numbers of sequences, and a step is filled up to the next of them. For many
sequences a second graph has the launch for keys that several share.

Invariant: everything that a graph reads keeps its address: tokens, positions, the plan of attention
and states (`model.gpu.plan.Places`), the KV pool. Steps with more than one token a sequence run launch by launch.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass

import torch

from model.attention.sharing import SHARERS
from model.blocks import Experts
from model.decoder import Decoder
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder
from model.gpu.attention_backend import TritonAttention
from model.rope import Rope

log = logging.getLogger("quire.model")

WARM_UPS = 2
"""Steps before one is recorded, in which libraries allocate memory and choose their kernels."""


def sizes_of_graphs(most: int) -> tuple[int, ...]:
    """Returns the numbers of sequences of graphs: powers of 2 and the numbers half way between.

    A step is filled up by a third at most.
    """
    sizes, power = {1, 2, most}, 4
    while power < most:
        sizes |= {power, min(power * 3 // 2, most)}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))


def why_not(part: object) -> str | None:
    """Returns why a model, or a part of one, cannot be recorded. None if it can."""
    if isinstance(part, Experts):
        return "which experts a step needs is known only when it runs"
    if isinstance(part, Rope) and part.axes:
        return "its rotary embedding turns by several axes, graphs have the position in the sequence alone"
    if isinstance(part, list | tuple):
        parts: Sequence[object] = part
    elif is_dataclass(part):
        parts = [getattr(part, field.name) for field in fields(part)]
    else:
        return None
    return next((reason for one in parts if (reason := why_not(one))), None)


Work = Callable[[], object]
Recorder = Callable[[Work], Work]
"""Records work, and returns a function that repeats it."""


class CudaRecorder:
    """Records CUDA graphs that share their memory: the largest comes first, and smaller ones use its memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all: torch keeps workspace for products for each stream, for good
        # The first graph of a process makes state of the random generator. Others must be able to change it, so that
        # it must not consist of inference tensors.
        self._first = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), self._recording(self._first):
            torch.zeros(1, device="cuda")

    def __call__(self, work: Work) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph):
            work()
        return graph.replay

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        """Starts to record on this thread; other threads may use the device meanwhile."""
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


class GraphDecoder:
    """`Model` of a decoder that replays decodes as graphs."""

    def __init__(
        self, decoder: Decoder, attention: TritonAttention, most: int, context: int, recorder: Recorder
    ) -> None:
        """Records the graphs.

        Args:
            decoder: The decoder.
            attention: Its attention, whose plans of decodes get a fixed place.
            most: Most sequences of a decode that is replayed.
            context: Most tokens of a sequence.
            recorder: Records work.
        """
        self._decoder, self._attention = decoder, attention
        device, vocabulary = decoder.embedding.tokens.device, decoder.embedding.tokens.vocabulary
        self._sizes = sizes_of_graphs(most)
        # Tokens, positions, and the rows whose logits are wanted.
        self._inputs = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._logits = torch.empty((most, vocabulary), dtype=torch.float32, device=device)
        attention.fix(self._sizes, context)
        began = time.perf_counter()
        self._replays = {
            (rows, shares): recorder(self._step(rows, shares))
            for rows in reversed(self._sizes)
            for shares in ((True, False) if rows >= SHARERS else (False,))
        }
        seconds = time.perf_counter() - began
        log.info("%d CUDA graphs for decodes of up to %d sequences, in %.1f s", len(self._replays), most, seconds)

    @property
    def vision(self) -> ImageEncoder | None:
        return self._decoder.vision

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Computes the batch. See `model.forward.Model`. The result holds until the next call."""
        plan, wanted = batch.plan, batch.wanted
        replay = self._replays.get((plan.rows, plan.shares))
        # Graphs have one axis of positions and write logits alone.
        recorded = batch.images is None and not batch.hidden and len(batch.positions) == 1
        if replay is None or not recorded or len(wanted) > plan.rows:
            return self._decoder.forward(batch)
        for place, given in zip(self._inputs, (batch.tokens, batch.positions[0], wanted), strict=True):
            place[: len(given)].copy_(given)
        self._inputs[2, len(wanted) : plan.rows].zero_()  # indices of an earlier step may be past these rows
        replay()
        return ForwardOutput(self._logits[: len(wanted)])

    def _step(self, rows: int, shares: bool) -> Work:
        """Returns a decode of `rows` sequences, on the fixed inputs and outputs."""
        plan = self._attention.empty_plan(rows, shares)
        tokens, positions, wanted = (place[:rows] for place in self._inputs)
        out = self._logits[:rows]
        # A new batch for each run: a batch keeps its rotary angles, but a replay must look them up.
        return lambda: self._decoder.forward(ForwardBatch(tokens, positions[None], wanted, self._attention, plan), out)
