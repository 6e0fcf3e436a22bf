"""Draws that a GPU makes while the host goes on: they are asked for once, and fetched in one transfer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.sampler import draw, summarise
from model.sampling.sampler import Drawn, Draws, Ints, SamplingRows, draw_from_top, draws_of, largest, on_device
from scheduler.events import Logprobs
from scheduler.step import NO_TOKEN

AT_ONCE = 32
"""Rows: to sort the logits of one for top_k and top_p takes 100 bytes for each."""


@dataclass(frozen=True, slots=True, eq=False)
class GpuDrawing:
    """`model.sampling.sampler.Drawing`. told: on its way to the host, see `_told`; there: what says that it is there,
    None where it is. k: alternatives of each.
    """

    tokens: Tensor
    told: Tensor
    there: torch.cuda.Event | None
    k: int

    def fetch(self) -> Drawn:
        if self.there is not None:
            self.there.synchronize()
        n, k = len(self.tokens), max(self.k, 0)
        best, tokens, chosen, rank, ids, top = np.split(self.told.numpy(), np.cumsum([n, n, n, n, n * k]))
        none = best.view(np.float32) == -np.inf
        logprobs = Logprobs(chosen.view(np.float32), rank, ids.reshape(n, k), top.view(np.float32).reshape(n, k))
        return Drawn(np.where(none, NO_TOKEN, tokens).astype(np.int32), logprobs)


def start_draws(logits: Tensor, controls: SamplingRows, rows: Ints, positions: Ints) -> GpuDrawing:
    """A `model.sampling.sampler.Starter`."""
    adjusted = controls.adjusted.apply(logits, rows, positions)
    best, tokens, normal = summarise(logits)
    if adjusted is not logits:
        best, tokens, _ = summarise(adjusted)
    which, draws = draws_of(controls, rows, positions)
    if len(which):
        tokens = _drawn(adjusted, tokens, which, draws)
    told, k = _told(logits, best, tokens, normal, controls.top_logprobs[rows])
    if logits.device.type != "cuda":
        return GpuDrawing(tokens, told, None, k)
    host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
    host.copy_(told, non_blocking=True)
    there = torch.cuda.Event()
    there.record()
    return GpuDrawing(tokens, host, there, k)


def prepare_draws(vocabulary: int, device: torch.device) -> None:
    """Compiles what draws need, so that no request waits for a compiler."""
    logits, one = torch.zeros((1, vocabulary), device=device), np.zeros(1, np.int64)
    summarise(logits)
    draw(logits, Draws(one, one, np.ones(1), np.zeros(1), one, np.ones(1)))


def _drawn(logits: Tensor, tokens: Tensor, which: Ints, draws: Draws) -> Tensor:
    """tokens, with those that are left to chance in their places `which`."""
    for part, of in ((~draws.cut, draw), (draws.cut, draw_from_top)):
        for some in np.split(np.flatnonzero(part), list(range(AT_ONCE, int(part.sum()), AT_ONCE))):
            if len(some):
                tokens = tokens.index_copy(0, on_device(logits, which[some]), of(logits, draws.of(some)))
    return tokens


def _told(
    logits: Tensor, best: Tensor, tokens: Tensor, normal: Tensor, wanted: NDArray[np.int64]
) -> tuple[Tensor, int]:
    """int32: largest logits, tokens, logprobs, ranks, ids and logprobs of alternatives, one after the other; and how
    many of these each has. Floats are told by their bits.
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
