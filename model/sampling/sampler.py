"""Sampling: logits to tokens. Order: logits processors, then greedy, or temperature, min_p, top_k, top_p and a draw.

Order and edge cases are vLLM's. top_k keeps all ties with the k-th token. top_p works on the probabilities that are
left, and keeps the token that crosses p. Logprobs are of the raw logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.builtin_processors import Penalties
from model.sampling.few_tokens import Cuts, draws_few
from model.sampling.processor_rows import ProcessorRows
from model.sampling.random import gumbel, row_keys
from model.sampling.sources import NO_SOURCES, ProcessorSources
from model.structured.forbidding import forbid
from scheduler.events import Logprobs
from scheduler.step import NO_TOKEN, Join

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SamplingRows:
    """Controls of each batch row, as arrays. A join sets all of a row.

    Attributes:
        top_logprobs: [rows] int64. Alternatives to report; -1 where no logprobs are asked for.
        index: [rows] int64. Index of the sequence in its request.
        processors: Logits processors of the rows.
    """

    def __init__(self, rows: int, sources: ProcessorSources = NO_SOURCES) -> None:
        """Makes rows with default controls.

        Args:
            rows: The number of rows.
            sources: Sources of logits processors.
        """
        self.temperature = np.zeros(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows)
        self.seed = np.zeros(rows, np.uint64)
        self.index = np.zeros(rows, np.int64)
        self.top_logprobs = np.full(rows, -1, np.int64)
        self.prompt_logprobs = np.zeros(rows, np.bool_)
        self.processors = ProcessorRows(rows, sources)

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
        self.processors.join(join)

    def among_all(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns which draw the likeliest token, or among all: without top_k, top_p and min_p. rows: [n] int64."""
        cut = (self.top_k[rows] > 0) | (self.top_p[rows] < 1) | (self.min_p[rows] > 0)
        return (self.temperature[rows] == 0) | ~cut

    def among_few(self, rows: Ints) -> NDArray[np.bool_]:
        """Returns which draw among the few tokens that top_k or min_p leaves. rows: [n] int64."""
        return draws_few(self.temperature[rows], self.top_k[rows], self.min_p[rows])

    def cuts(self, rows: Ints, places: Ints) -> Cuts:
        """Returns the cut-offs of some of the rows.

        Args:
            rows: [n] int64. Batch rows.
            places: [m] int64. Which of them.
        """
        cut = rows[places]
        return Cuts.of(places, self.temperature[cut], self.top_k[cut], self.min_p[cut])


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Results of a step's draws.

    Attributes:
        tokens: [n] int32. NO_TOKEN where a row's own controls leave none.
        logprobs: Logprobs of the tokens; `chosen` is NaN where a logit was.
    """

    tokens: NDArray[np.int32]
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Largest logits and normalisers of n rows, on the host.

    Attributes:
        best: [n] float32. Largest logit.
        tokens: [n] int64. Its id, the lowest of several.
        normal: [n] float32. Log of the sum of e^logit; NaN where a logit is.
    """

    best: NDArray[np.float32]
    tokens: Ints
    normal: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Random draws and their controls, as arrays [n].

    Attributes:
        rows: Index of the row of logits of each draw.
        keys: Keys for `gumbel`.
        temperature: Above 0.
        min_p: 0 is off.
        top_k: 0 is off.
        top_p: 1 is off.
    """

    rows: Ints
    keys: Ints
    temperature: Floats
    min_p: Floats
    top_k: Ints
    top_p: Floats

    def of(self, which: Ints | NDArray[np.bool_]) -> "Draws":
        """Returns a selection of the draws."""
        return Draws(*(getattr(self, column.name)[which] for column in fields(self)))

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Whether each has a top_k or a top_p, [n] bool."""
        return (self.top_k > 0) | (self.top_p < 1)


class Drawing(Protocol):
    """Draws that a device makes while the host goes on."""

    @property
    def tokens(self) -> Tensor:
        """Drawn tokens on the device, [n] int64; some id of the vocabulary where none could be drawn."""

    def fetch(self) -> Drawn:
        """Waits for the draws."""


class LogitOps(Protocol):
    """Operations over whole rows of logits, [n, vocabulary] float32."""

    def summary(self, logits: Tensor) -> Summary: ...

    def draw(self, logits: Tensor, draws: Draws) -> Ints:
        """Returns drawn ids [draws], disregarding top_k and top_p."""

    def draw_from_top(self, logits: Tensor, draws: Draws) -> Ints:
        """Returns drawn ids [draws] from the tokens that top_k and top_p leave."""

    def forbid(self, logits: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """Puts forbidden tokens at -inf, as `model.structured.forbidding.Forbid`."""

    def penalise(self, logits: Tensor, rows: Ints, processors: Sequence[Penalties], positions: Ints) -> None:
        """Applies penalties to rows, in place, as `Penalties.apply_rows`, to the bit."""


class TorchOps:
    """`LogitOps` on any device. Draws are in float64."""

    def summary(self, logits: Tensor) -> Summary:
        best, tokens = logits.max(-1)
        return Summary(_host(best), _host(tokens), _host(torch.logsumexp(logits, -1)))

    def draw(self, logits: Tensor, draws: Draws) -> Ints:
        noise = gumbel(on_device(logits, draws.keys), torch.arange(logits.shape[1], device=logits.device))
        return _host(torch.argmax(_scaled(logits, draws) + noise, -1))

    def draw_from_top(self, logits: Tensor, draws: Draws) -> Ints:
        return _host(draw_from_top(logits, draws))

    def forbid(self, logits: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        forbid(logits, rows, bits)

    def penalise(self, logits: Tensor, rows: Ints, processors: Sequence[Penalties], positions: Ints) -> None:
        Penalties.apply_rows(logits, rows, processors, positions)


TORCH_OPS = TorchOps()


def draw_from_top(logits: Tensor, draws: Draws) -> Tensor:
    """Returns drawn ids [draws], on the device of the logits, from the tokens that top_k and top_p leave."""
    scaled = _scaled(logits, draws)
    return draw_among(scaled, torch.arange(logits.shape[1], device=logits.device).expand_as(scaled), draws)


Starter = Callable[[Tensor, SamplingRows, NDArray[np.int64], NDArray[np.int64]], Drawing]
"""`sample` without waiting. When it returns, all work that reads the logits is queued on the device."""


def sample(
    logits: Tensor,
    controls: SamplingRows,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    ops: LogitOps = TORCH_OPS,
) -> Drawn:
    """Draws a token for each row.

    Args:
        logits: [n, vocabulary] float32. Constraints may put forbidden tokens at -inf in it.
        controls: Controls of all batch rows.
        rows: [n] int64. Batch row of each row of logits.
        positions: [n] int64. Output position of each drawn token.
        ops: Operations over rows of logits.
    """
    summary, processors = ops.summary(logits), controls.processors
    if adjusting := bool(processors.asking[rows].any()):
        keeps = bool((controls.top_logprobs[rows] >= 0).any())
        late = processors.late(rows, controls.among_all(rows))
        cuts = controls.cuts(rows, processors.few(rows, controls.among_few(rows)))
        adjusted = processors.apply(logits, rows, positions, keeps, ops.forbid, late, cuts, ops.penalise)
        best, likeliest = map(_host, adjusted.max(-1))
        tokens = _drawn(adjusted, likeliest, controls, rows, positions, ops)
        if len(again := processors.refused(rows, tokens, likeliest, late)):
            masked = processors.masked(adjusted, rows, again, ops.forbid)
            best[again], likeliest = map(_host, masked.max(-1))
            tokens[again] = _drawn(masked, likeliest, controls, rows[again], positions[again], ops)
    else:
        adjusted, best = logits, summary.best
        tokens = _drawn(adjusted, summary.tokens, controls, rows, positions, ops)
    wanted, offered = controls.top_logprobs[rows], logits
    if adjusting:
        tokens = controls.processors.settled(rows, tokens)
        offered = controls.processors.offered(logits, adjusted, rows, wanted)
    logprobs = logprobs_of(logits, tokens, wanted, summary, offered)
    none = best == -np.inf
    logprobs.chosen[none & (summary.best > -np.inf)] = 0.0  # of no token, and no sign of logits that are not finite
    return Drawn(np.where(none, NO_TOKEN, tokens).astype(np.int32), logprobs)


def _drawn(logits: Tensor, likeliest: Ints, controls: SamplingRows, rows: Ints, positions: Ints, ops: LogitOps) -> Ints:
    """Returns tokens [n]: the likeliest of rows without a temperature, draws of the others."""
    random, draws = draws_of(controls, rows, positions)
    if not len(random):
        return likeliest
    tokens = likeliest.copy()
    # Rows without top_k and top_p need no sort; a draw's bits do not depend on which rows are beside it.
    for part, draw in ((~draws.cut, ops.draw), (draws.cut, ops.draw_from_top)):
        if part.any():
            tokens[random[part]] = draw(logits, draws.of(part))
    return tokens


def draws_of(controls: SamplingRows, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> tuple[Ints, Draws]:
    """Returns the indices of rows that draw at random, and their draws. Arguments as of `sample`."""
    random = np.flatnonzero(controls.temperature[rows] > 0)
    which = rows[random]
    return random, Draws(
        random,
        row_keys(controls.seed[which], controls.index[which], positions[random]),
        controls.temperature[which],
        controls.min_p[which],
        controls.top_k[which],
        controls.top_p[which],
    )


def _host(values: Tensor) -> Any:
    return values.cpu().numpy()


def on_device(logits: Tensor, values: NDArray) -> Tensor:
    """Copies values to the device of the logits, without waiting."""
    return torch.from_numpy(values).to(logits.device, non_blocking=True)


def _scaled(logits: Tensor, draws: Draws) -> Tensor:
    """Returns logits minus the largest, over temperature, [draws, vocabulary] float64; -inf where min_p forbids."""
    wide = logits[on_device(logits, draws.rows)].double()
    # The largest becomes 0 before the division: the smallest temperatures then make the others -inf, never inf.
    scaled = (wide - wide.amax(-1, keepdim=True)) / on_device(logits, draws.temperature)[:, None]
    return scaled.masked_fill(scaled < torch.log(on_device(logits, draws.min_p)[:, None]), -torch.inf)


def draw_among(scaled: Tensor, ids: Tensor, draws: Draws, totals: Tensor | None = None) -> Tensor:
    """Draws from the candidates that top_k and top_p leave.

    Args:
        scaled: [draws, candidates] float64. Scaled logits, -inf for no candidate.
        ids: [draws, candidates] int64. Token ids, ascending where scaled logits are equal.
        draws: Controls and keys.
        totals: [draws]. Sums of e^scaled over the whole vocabulary. None where all tokens are candidates.

    Returns:
        [draws] int64.
    """
    count = scaled.shape[1]
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    top_k, top_p = (on_device(scaled, column)[:, None] for column in (draws.top_k, draws.top_p))
    lowest = ordered.gather(1, torch.where(top_k > 0, top_k.clamp(max=count), count) - 1)
    ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    weights = torch.exp(ordered)
    sums = weights.cumsum(-1)
    total = sums[:, -1:]  # a running sum: trailing zeros of what is no candidate do not change its bits
    if totals is not None:
        total = torch.where(top_k > 0, total, totals.double()[:, None])
    ordered = ordered.masked_fill((sums - weights) / total >= top_p, -torch.inf)
    noise = gumbel(on_device(scaled, draws.keys), ids)
    return ids.gather(1, torch.argmax(ordered + noise, -1, keepdim=True))[:, 0]


def logprobs_of(
    logits: Tensor, tokens: Ints, wanted: Ints, summary: Summary, offered: Tensor | None = None
) -> Logprobs:
    """Computes logprobs of drawn tokens and of their alternatives.

    Args:
        logits: [n, vocabulary] float32. Raw logits.
        tokens: [n] int64. Drawn tokens.
        wanted: [n] int64. Alternatives of each row; -1 where it asked for no logprobs. Its `chosen` still counts for
            the score.
        summary: Summary of the logits.
        offered: [n, vocabulary] float32. Logits with those at -inf that are to be no alternative; None: all may be.
    """
    offered = logits if offered is None else offered
    picked = summary.best
    if tokens is not summary.tokens:
        picked = _host(logits.gather(1, on_device(logits, tokens)[:, None]))[:, 0]
    chosen, n, k = picked - summary.normal, len(wanted), int(wanted.max(initial=-1))
    if k < 0:
        return Logprobs(chosen, np.zeros(n, np.int32), np.empty((n, 0), np.int32), np.empty((n, 0), np.float32))
    rank = (logits > on_device(logits, picked)[:, None]).sum(-1, dtype=torch.int32) + 1
    ids = largest(offered, min(k, logits.shape[1]))
    top = offered.gather(1, ids) - on_device(logits, summary.normal)[:, None]
    return Logprobs(chosen, _host(rank), _host(ids.int()), _host(top))


def largest(logits: Tensor, k: int) -> Tensor:
    """Returns the ids [n, k] of the k largest logits of each row, the lower id first among equals.

    torch.topk alone orders ties depending on k, that is on the requests in the batch. So each id is made part of its
    key.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((ordered << 32) - ids, k, -1).indices
