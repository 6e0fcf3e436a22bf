"""From logits to tokens: what a row asks to be changed (`adjust`), then greedy, or temperature, min_p, top_k, top_p and
a draw, in this order.

The order and the edge cases are vLLM's: top_k keeps all ties with the k-th, top_p works on the probabilities that are
left and keeps the token that crosses p. Logprobs are of the raw logits.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.adjust import AdjustedRows
from model.sampling.random import gumbel, row_keys
from scheduler.events import Logprobs
from scheduler.step import NO_TOKEN, Join

Ints = NDArray[np.int64]


class SamplingRows:
    """The controls of each batch row, as arrays. A join sets all of a row."""

    def __init__(self, rows: int) -> None:
        self.temperature = np.zeros(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows)
        self.seed = np.zeros(rows, np.uint64)
        self.index = np.zeros(rows, np.int64)
        self.top_logprobs = np.full(rows, -1, np.int64)
        self.prompt_logprobs = np.zeros(rows, np.bool_)
        self.adjusted = AdjustedRows(rows)

    def join(self, join: Join) -> None:
        row, controls = join.row, join.controls
        self.temperature[row] = controls.temperature
        self.top_p[row] = controls.top_p
        self.top_k[row] = controls.top_k
        self.min_p[row] = controls.min_p
        self.seed[row] = controls.seed
        self.index[row] = join.index
        self.top_logprobs[row] = controls.top_logprobs
        self.prompt_logprobs[row] = controls.prompt_logprobs
        self.adjusted.join(join)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """tokens: [n], NO_TOKEN where a row's own controls leave none. logprobs of them; `chosen` is NaN where the logits
    were.
    """

    tokens: NDArray[np.int32]
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Of the logits of n rows. best: [n] the largest. tokens: int64 [n], its id, the lowest where several have it.
    normal: [n, 1], log of the sum of e^logit; NaN where a logit is.
    """

    best: Tensor
    tokens: Tensor
    normal: Tensor


class LogitOps(Protocol):
    """What goes through whole rows of logits, float32 [n, vocabulary]."""

    def summary(self, logits: Tensor) -> Summary: ...

    def draw(
        self, logits: Tensor, rows: Ints, keys: Ints, temperature: NDArray[np.float64], min_p: NDArray[np.float64]
    ) -> Tensor:
        """A token id for each of these rows, int64 [rows], drawn with its own temperature, above 0, and min_p.

        keys: of `gumbel`.
        """


class TorchOps:
    """`LogitOps` on any device. The draw is in float64."""

    def summary(self, logits: Tensor) -> Summary:
        return Summary(*logits.max(-1), torch.logsumexp(logits, -1, keepdim=True))

    def draw(
        self, logits: Tensor, rows: Ints, keys: Ints, temperature: NDArray[np.float64], min_p: NDArray[np.float64]
    ) -> Tensor:
        device = logits.device
        scaled = _scaled(logits[torch.from_numpy(rows).to(device)], temperature, min_p)
        noise = gumbel(torch.from_numpy(keys).to(device), torch.arange(logits.shape[1], device=device))
        return torch.argmax(scaled + noise, -1)


TORCH_OPS = TorchOps()


def sample(
    logits: Tensor,
    controls: SamplingRows,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    ops: LogitOps = TORCH_OPS,
) -> Drawn:
    """logits: float32 [n, vocabulary] of these batch rows. positions: output position of each token that is drawn."""
    adjusted, summary = controls.adjusted.apply(logits, rows, positions), ops.summary(logits)
    best, tokens = (summary.best, summary.tokens) if adjusted is logits else adjusted.max(-1)
    random = np.flatnonzero(controls.temperature[rows] > 0)
    if len(random):
        keys = row_keys(controls.seed[rows], controls.index[rows], positions)
        sort = (controls.top_k[rows[random]] > 0) | (controls.top_p[rows[random]] < 1)
        whole, cut = random[~sort], random[sort]
        if len(whole):
            which = rows[whole]
            drawn = ops.draw(adjusted, whole, keys[whole], controls.temperature[which], controls.min_p[which])
            tokens[torch.from_numpy(whole).to(logits.device)] = drawn
        if len(cut):
            where = torch.from_numpy(cut).to(logits.device)
            tokens[where] = _draw_from_top(adjusted[where], controls, rows[cut], keys[cut])
    logprobs = logprobs_of(logits, tokens, controls.top_logprobs[rows], summary.normal)
    return Drawn(tokens.masked_fill(best == -torch.inf, NO_TOKEN).cpu().numpy().astype(np.int32), logprobs)


def _column(values: NDArray[np.float64] | NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _scaled(logits: Tensor, temperature: NDArray[np.float64], min_p: NDArray[np.float64]) -> Tensor:
    """float64 logits below the largest, over temperature; -inf where min_p forbids."""
    wide = logits.double()
    # The largest becomes 0 before the division: the smallest temperatures then make the others -inf, never inf.
    scaled = (wide - wide.amax(-1, keepdim=True)) / _column(temperature, logits)
    return scaled.masked_fill(scaled < torch.log(_column(min_p, logits)), -torch.inf)


def _draw_from_top(logits: Tensor, controls: SamplingRows, rows: Ints, keys: Ints) -> Tensor:
    """Token ids [n] of batch rows that have a top_k or a top_p."""
    scaled = _scaled(logits, controls.temperature[rows], controls.min_p[rows])
    scaled, ids = _keep_top(scaled, controls, rows)
    noise = gumbel(torch.from_numpy(keys).to(logits.device), ids)
    return ids.gather(1, torch.argmax(scaled + noise, -1, keepdim=True))[:, 0]


def _keep_top(scaled: Tensor, controls: SamplingRows, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The logits sorted by size, -inf where top_k or top_p forbids, and the token id of each."""
    vocabulary = scaled.shape[1]
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = np.where(controls.top_k[rows] > 0, np.minimum(controls.top_k[rows], vocabulary), vocabulary)
    lowest = ordered.gather(1, _column(top_k - 1, ordered))
    ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    return ordered.masked_fill(before >= _column(controls.top_p[rows], ordered), -torch.inf), ids


def logprobs_of(logits: Tensor, tokens: Tensor, wanted: NDArray[np.int64], normal: Tensor) -> Logprobs:
    """wanted: alternatives of each row; -1 where it asked for no logprobs (its `chosen` still counts for the score).
    normal: as in `Summary`.
    """
    picked = logits.gather(1, tokens[:, None])
    chosen = (picked - normal)[:, 0].cpu().numpy()
    n, k = len(wanted), int(wanted.max(initial=0))
    if not (wanted >= 0).any():
        return Logprobs(chosen, np.zeros(n, np.int32), np.empty((n, 0), np.int32), np.empty((n, 0), np.float32))
    rank = (logits > picked).sum(-1, dtype=torch.int32) + 1
    ids = _largest(logits, min(k, logits.shape[1]))
    top = logits.gather(1, ids) - normal
    return Logprobs(chosen, rank.cpu().numpy(), ids.int().cpu().numpy(), top.cpu().numpy())


def _largest(logits: Tensor, k: int) -> Tensor:
    """Token ids [n, k] of the k largest logits of each row, the lower id first where they are equal.

    topk alone orders ties by k, that is by what others in the batch ask for; so each id is made part of its key.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((ordered << 32) - ids, k, -1).indices
