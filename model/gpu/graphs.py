"""Steps as CUDA graphs: the launches of a step are recorded when a model is loaded, and then replayed as one.

Launch by launch a layer takes the host 500 us, more than a GPU takes for hundreds of tokens.

Decodes: a graph is recorded for each of some numbers of sequences, and a step is padded to the next of them. For many
sequences a second graph has the launch for keys that several share. Other steps, of at most MIXED_TOKENS, are padded
likewise by their tokens. Their graphs end with the last layer: which rows' logits are wanted depends on the step.

Exchanges of ranks are recorded too. So all ranks replay the same graph of a step: which one depends on the step's shape
alone, and on what `model.loading` sees to be the same on all ranks.

Invariant: everything that a graph reads keeps its address: tokens, positions, the plan of attention and states
(`model.gpu.plan.Places`), the KV pool. All other steps run launch by launch.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass

import torch

from cache_manager.layout import KVLayout
from model.attention.sharing import SHARERS
from model.backend import StepSizes
from model.blocks import Experts
from model.decoder import Decoder
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder
from model.gpu.attention_backend import TritonAttention
from model.gpu.pieces import FEW, SHARED
from model.gpu.plan import MIXED
from model.parallel.collective import Gathered, Summed
from model.rope import Rope

log = logging.getLogger("quire.model")

MIXED_TOKENS = 2048
"""Most tokens of a step with a graph: with them a model of 0.6 billion parameters takes as long as the host."""
WARM_UPS = 2
"""Steps before one is recorded, in which libraries allocate memory and choose their kernels."""


def sizes_of_graphs(most: int) -> tuple[int, ...]:
    """Returns the numbers of sequences of graphs: powers of 2 and the numbers half way between.

    A third of the sequences of a padded step are padding at most.
    """
    sizes, power = {1, 2, most}, 4
    while power < most:
        sizes |= {power, min(power * 3 // 2, most)}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))


def sizes_of_steps(most: int) -> tuple[int, ...]:
    """Returns the tokens of graphs for any step: multiples of 16, then of 64, so that padding costs little."""
    sizes = {*range(16, 128, 16), *range(128, most, 64), most}
    return tuple(sorted(size for size in sizes if size <= most))


def most_graph_tokens(sizes: StepSizes) -> int:
    """Returns the most tokens of a step with a graph."""
    return min(MIXED_TOKENS, sizes.tokens)


def graph_tokens(decoder: object, layout: KVLayout, sizes: StepSizes) -> int:
    """Returns the most tokens of a step with a graph of this model; 0 where it has none."""
    if why_not(decoder):
        return 0
    return sizes.rows if layout.states.pages else most_graph_tokens(sizes)


def why_not(part: object) -> str | None:
    """Returns why a model, or a part of one, cannot be recorded. None if it can."""
    if isinstance(part, Experts):
        return "which experts a step needs is known only when it runs"
    if isinstance(part, Rope) and part.axes:
        return "its rotary embedding turns by several axes, graphs have the position in the sequence alone"
    if isinstance(part, Summed | Gathered) and not part.collective.runs_ahead:
        return f"it is divided among ranks, and {part.collective.name} does not put exchanges on the device's stream"
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
    """`Model` of a decoder that replays steps as graphs."""

    def __init__(self, decoder: Decoder, attention: TritonAttention, step_sizes: StepSizes, recorder: Recorder) -> None:
        """Records the graphs.

        Args:
            decoder: The decoder.
            attention: Its attention, whose plans get fixed places.
            step_sizes: Most of what a step has.
            recorder: Records work.
        """
        self._decoder, self._attention = decoder, attention
        device, vocabulary = decoder.embedding.tokens.device, decoder.embedding.tokens.vocabulary
        most = step_sizes.rows
        sizes = sizes_of_graphs(most)
        tokens = sizes_of_steps(most_graph_tokens(step_sizes)) if attention.can_mix else ()
        # Tokens, positions, and the rows whose logits are wanted.
        self._inputs = torch.zeros((3, max(most, *tokens, 0)), dtype=torch.int64, device=device)
        self._logits = torch.empty((most, vocabulary), dtype=torch.float32, device=device)
        self._residual = torch.empty(0)
        attention.fix(sizes, tokens, step_sizes.context)
        began = time.perf_counter()
        # The largest graphs come first: smaller ones use their memory.
        self._steps = {rows: recorder(self._step(rows)) for rows in reversed(tokens)}
        self._decodes = {
            (rows, shares): recorder(self._decode(rows, shares))
            for rows in reversed(sizes)
            for shares in ((True, False) if rows >= SHARERS else (False,))
        }
        log.info(
            "%d CUDA graphs: decodes of up to %d sequences, steps of up to %d tokens; in %.1f s",
            len(self._steps) + len(self._decodes), most, max(tokens, default=0), time.perf_counter() - began,
        )  # fmt: skip

    @property
    def vision(self) -> ImageEncoder | None:
        return self._decoder.vision

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Computes the batch. See `model.forward.Model`. The result holds until the next call."""
        plan, wanted = batch.plan, batch.wanted
        replay = self._steps.get(plan.rows) if plan.mixed else self._decodes.get((plan.rows, plan.shares))
        # Graphs have one axis of positions; those of decodes write the wanted logits alone.
        recorded = batch.images is None and len(batch.positions) == 1
        more = batch.hidden or batch.parts is not None or len(wanted) > plan.rows
        if replay is None or not recorded or (more and not plan.mixed):
            return self._decoder.forward(batch)
        for place, given in zip(self._inputs, (batch.tokens, batch.positions[0], wanted), strict=True):
            if not (plan.mixed and given is wanted):
                place[: len(given)].copy_(given)
        if plan.mixed:
            replay()
            return self._decoder.read_out(self._residual, batch)
        self._inputs[2, len(wanted) : plan.rows].zero_()  # indices of an earlier step may be past these rows
        replay()
        return ForwardOutput(self._logits[: len(wanted)])

    def _step(self, rows: int) -> Work:
        """Returns any step of `rows` tokens, up to the last layer, on the fixed inputs and outputs."""
        plan = self._attention.empty_plan(rows, MIXED)
        tokens, positions, wanted = (place[:rows] for place in self._inputs)

        def work() -> None:
            made = self._decoder.residual(ForwardBatch(tokens, positions[None], wanted, self._attention, plan))
            if len(self._residual) < rows:
                self._residual = torch.empty_like(made)
            self._residual[:rows].copy_(made)

        return work

    def _decode(self, rows: int, shares: bool) -> Work:
        """Returns a decode of `rows` sequences, on the fixed inputs and outputs."""
        plan = self._attention.empty_plan(rows, (FEW, SHARED) if shares else (FEW,))
        tokens, positions, wanted = (place[:rows] for place in self._inputs)
        out = self._logits[:rows]
        # A new batch for each run: a batch keeps its rotary angles, but a replay must look them up.
        return lambda: self._decoder.forward(ForwardBatch(tokens, positions[None], wanted, self._attention, plan), out)
