"""Draws that a GPU makes while the host goes on: queued once, and fetched in one transfer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.sampler import AT_ONCE, draw, summarise
from model.sampling.sampler import Drawn, Draws, Ints, SamplingRows, draw_from_top, draws_of, largest, on_device
from scheduler.events import Logprobs
from scheduler.step import NO_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class GpuDrawing:
    """`model.sampling.sampler.Drawing` on a GPU.

    Attributes:
        tokens: [n] int64. Drawn tokens, on the device.
        results: int32. Results on their way to the host, see `_packed_results`.
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
    adjusted = controls.processors.apply(logits, rows, positions)
    best, tokens, normal = summarise(logits)
    if adjusted is not logits:
        best, tokens, _ = summarise(adjusted)
    which, draws = draws_of(controls, rows, positions)
    if len(which):
        tokens = _drawn(adjusted, tokens, which, draws)
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
    summarise(logits)
    draw(logits, Draws(one, one, np.ones(1), np.zeros(1), one, np.ones(1)))


def _drawn(logits: Tensor, tokens: Tensor, which: Ints, draws: Draws) -> Tensor:
    """Returns the tokens, with random draws in their places `which`."""
    for part, of in ((~draws.cut, draw), (draws.cut, draw_from_top)):
        for some in np.split(np.flatnonzero(part), list(range(AT_ONCE, int(part.sum()), AT_ONCE))):
            if len(some):
                tokens = tokens.index_copy(0, on_device(logits, which[some]), of(logits, draws.of(some)))
    return tokens


def _packed_results(
    logits: Tensor, best: Tensor, tokens: Tensor, normal: Tensor, wanted: NDArray[np.int64]
) -> tuple[Tensor, int]:
    """Packs the results of draws for one transfer.

    Returns:
        int32: largest logits, tokens, logprobs, ranks, then ids and logprobs of alternatives. Floats are copied by
            their bits. And the number of alternatives of each draw.
    """
    picked = logits.gather(1, tokens[:, None])[:, 0]
    k = min(int(wanted.max(initial=-1)), logits.shape[1])
    rank = torch.zeros(len(tokens), dtype=torch.int32, device=logits.device)
    parts = [best.view(torch.int32), tokens.int(), (picked - normal).view(torch.int32), rank]
    if k >= 0:
        parts[3] = (logits > picked[:, None]).sum(-1, dtype=torch.int32) + 1
        ids = largest(logits, k)
        top = logits.gather(1, ids) - normal[:, None]
        parts += [ids.int().flatten(), top.view(torch.int32).flatten()]
    return torch.cat(parts), k
