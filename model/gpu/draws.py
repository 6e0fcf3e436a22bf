"""Draws that a GPU makes while the host goes on: queued once, and fetched in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.alternatives import put_alternatives
from model.gpu.cutoff import draw_from_top
from model.gpu.penalties import penalise
from model.gpu.sampler import draw, pack_results, readable, summarise
from model.sampling.builtin_processors import Penalties
from model.sampling.sampler import TORCH_OPS, Drawn, Draws, Ints, SamplingRows, Summary, draws_of
from scheduler.controls import NO_LOGITS_PARAMS
from scheduler.events import Logprobs
from scheduler.step import NO_TOKEN


class GpuOps:
    """`model.sampling.sampler.LogitOps` by kernels."""

    def summary(self, logits: Tensor) -> Summary:
        return Summary(*(part.cpu().numpy() for part in summarise(logits)))

    def draw(self, logits: Tensor, draws: Draws) -> Ints:
        return draw(logits, draws).cpu().numpy()

    def draw_from_top(self, logits: Tensor, draws: Draws) -> Ints:
        return draw_from_top(logits, draws).cpu().numpy()

    def forbid(self, logits: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        TORCH_OPS.forbid(logits, rows, bits)

    def penalise(self, logits: Tensor, rows: Ints, processors: Sequence[Penalties], positions: Ints) -> None:
        penalise(logits, rows, processors, positions)


@dataclass(frozen=True, slots=True, eq=False)
class GpuDrawing:
    """`model.sampling.sampler.Drawing` on a GPU.

    Attributes:
        tokens: [n] int64. Drawn tokens, on the device.
        results: [4 * n + 2 * n * k] int32. Results on their way to the host, see `_packed_results`.
        copied: Event after the copy to the host. None where the results are on the host.
        k: Alternatives of each draw.
    """

    tokens: Tensor
    results: Tensor
    copied: torch.cuda.Event | None
    k: int

    def fetch(self) -> Drawn:
        if self.copied is not None:
            self.copied.synchronize()
        n, k = len(self.tokens), max(self.k, 0)
        best, tokens, chosen, rank, ids, top = np.split(self.results.numpy(), np.cumsum([n, n, n, n, n * k]))
        none = best.view(np.float32) == -np.inf
        logprobs = Logprobs(chosen.view(np.float32), rank, ids.reshape(n, k), top.view(np.float32).reshape(n, k))
        return Drawn(np.where(none, NO_TOKEN, tokens).astype(np.int32), logprobs)


def start_draws(logits: Tensor, controls: SamplingRows, rows: Ints, positions: Ints) -> GpuDrawing:
    """Queues the draws of a step. A `model.sampling.sampler.Starter`."""
    adjusted = controls.processors.apply(logits, rows, positions, penalise=penalise)
    best, tokens, normal = summarise(logits)
    if adjusted is not logits:
        best, tokens, _ = summarise(adjusted)
    which, draws = draws_of(controls, rows, positions)
    if len(which):
        _draw_into(tokens, adjusted, best, which, draws)
    results, k = _packed_results(logits, best, tokens, normal, controls.top_logprobs[rows])
    if logits.device.type != "cuda":
        return GpuDrawing(tokens, results, None, k)
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    host.copy_(results, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return GpuDrawing(tokens, host, copied, k)


def prepare_draws(vocabulary: int, device: torch.device) -> None:
    """Compiles the kernels of draws, so that no request waits for a compiler."""
    logits, one = torch.zeros((1, vocabulary), device=device), np.zeros(1, np.int64)
    draws = Draws(one, one, np.ones(1), np.zeros(1), one, np.ones(1))
    best, tokens, normal = summarise(logits)
    draw(logits, draws)
    draw_from_top(logits, draws)
    penalise(logits, one, [Penalties(replace(NO_LOGITS_PARAMS, presence=1.0), np.zeros(1, np.int32))], one)
    _packed_results(logits, best, tokens, normal, one)


def _draw_into(tokens: Tensor, logits: Tensor, best: Tensor, which: Ints, draws: Draws) -> None:
    """Makes random draws in place of the likeliest tokens.

    Args:
        tokens: [n] int64, on the device. Changed in place.
        logits: [n, vocabulary] float32, after all logits processors.
        best: [n] float32. Largest logit of each row.
        which: [m] int64. Places in `tokens` of the draws.
        draws: The draws, [m].
    """
    cut = draws.cut
    for part, draw_part in ((~cut, draw), (cut, draw_from_top)):
        if part.all():
            draw_part(logits, draws, best, (tokens, which))
        elif part.any():
            draw_part(logits, draws.of(part), best, (tokens, which[part]))


def _packed_results(logits: Tensor, best: Tensor, tokens: Tensor, normal: Tensor, wanted: Ints) -> tuple[Tensor, int]:
    """Packs the results of draws for one transfer.

    Args:
        logits: [n, vocabulary] float32, raw.
        best: [n] float32. Largest logit of each row, after all logits processors; -inf where nothing can be drawn.
        tokens: [n] int64. Drawn tokens.
        normal: [n] float32. See `model.sampling.sampler.Summary`.
        wanted: [n] int64. Alternatives that each row asks for; -1 for no logprobs.

    Returns:
        [4 * n + 2 * n * k] int32: largest logits, tokens, logprobs, ranks, then ids and logprobs of alternatives.
            Floats are copied by their bits. And k, the number of alternatives of a draw; -1 where no row asks for
            logprobs.
    """
    n, k = len(tokens), min(int(wanted.max(initial=-1)), logits.shape[1])
    packed = torch.empty(4 * n, dtype=torch.int32, device=logits.device)
    if k > 0:  # rows that ask for none have zeros
        packed = torch.zeros(4 * n + 2 * n * k, dtype=torch.int32, device=logits.device)
    logits = readable(logits)
    pack_results[(n,)](logits, best, tokens, normal, packed, logits.stride(0))
    if k >= 0:
        put_alternatives(packed, logits, normal, tokens, np.flatnonzero(wanted >= 0), k)
    return packed, k
