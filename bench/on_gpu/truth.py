"""Reference results of kernels in plain torch and float64, and their tolerances."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.recurrence import L2_EPS, LinearRecurrence
from model.sampling.random import gumbel

EIGHT_BIT = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""KV dtype to the dtype of its elements and their largest value."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed errors.

    Attributes:
        most: Error of an element.
        norm: Norm of all errors, as a share of the result's norm.
    """

    most: float
    norm: float


ATTENTION = {
    "float32": Tolerance(3e-5, 1e-5),
    "float16": Tolerance(5e-3, 2e-3),
    "bfloat16": Tolerance(5e-2, 1e-2),
}
"""Tolerances by dtype, for queries, keys and values with a standard deviation of 1.5."""
ROWS = {"float32": Tolerance(1e-5, 3e-6), "float16": Tolerance(2e-3, 5e-4), "bfloat16": Tolerance(2e-2, 4e-3)}
"""Tolerances by dtype of the layers that compute each token by itself; `most` is a share of the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of a result; NaN if the result has an unexpected NaN.

    Attributes:
        most: Largest error of an element.
        norm: Norm of all errors, as a share of the expected result's norm.
    """

    most: float
    norm: float

    @staticmethod
    def of(found: Tensor, expected: Tensor) -> "Error":
        """Compares a result with the expected one. Raises ValueError for different shapes."""
        if found.shape != expected.shape:
            raise ValueError(f"the result has shape {list(found.shape)}, {list(expected.shape)} is expected")
        wrong = found.double() - expected.double()
        norm = expected.double().norm().clamp_min(1e-300)
        return Error(float(wrong.abs().max()), float(wrong.norm() / norm))

    def within(self, allowed: Tolerance) -> bool:
        return self.most <= allowed.most and self.norm <= allowed.norm  # NaN is not

    @staticmethod
    def worst(errors: list["Error"]) -> "Error":
        """Returns the largest of several errors; NaN if one is."""
        both = torch.tensor([[error.most, error.norm] for error in errors], dtype=torch.float64).amax(0)
        return Error(*both.tolist())


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None, cap: float | None = None
) -> Tensor:
    """Computes causal attention of one sequence.

    Args:
        queries: [tokens, heads, head_dim], at positions from `start` on.
        keys: [start + tokens, kv_heads, head_dim].
        values: [start + tokens, kv_heads, elements of a value].
        start: Position of the first query.
        window: Tokens that a query sees, its own included; None sees all.
        cap: Soft cap of the scores; None has none.

    Returns:
        [tokens, heads, elements of a value] float64.
    """
    tokens, heads, dim = queries.shape
    group = heads // keys.shape[1]
    q = queries.double().view(tokens, -1, group, dim)
    scores = torch.einsum("qhgd,khd->hgqk", q, keys.double()) / dim**0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    at, to = torch.arange(start, start + tokens)[:, None], torch.arange(len(keys))
    hidden = to > at
    if window is not None:
        hidden |= to <= at - window
    weights = torch.softmax(scores.masked_fill(hidden.to(queries.device), -torch.inf), -1)
    return torch.einsum("hgqk,khd->qhgd", weights, values.double()).reshape(tokens, heads, -1)


def eight_bits(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantizes rows to 8 bits: the largest magnitude of a row becomes the largest number of the kind.

    Values are rounded to the nearest number, ties to even.

    Args:
        rows: [..., head_dim].
        kind: "int8" or "fp8".

    Returns:
        Elements as bytes, [..., head_dim] uint8, and scales, [..., 1] float32.
    """
    dtype, largest = EIGHT_BIT[kind]
    # By a tensor: on a GPU torch divides by a number as it multiplies by its inverse, which rounds otherwise.
    size = rows.float().abs().amax(-1, keepdim=True)
    scale = size / torch.full_like(size, largest)
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = rows.float() / scale
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype).view(torch.uint8), scale


def stored(rows: Tensor, kind: str | None) -> Tensor:
    """Returns rows as they are read back from pages of this KV dtype, float64; None keeps them."""
    if kind is None:
        return rows.double()
    elements, scale = eight_bits(rows, kind)
    return elements.view(EIGHT_BIT[kind][0]).double() * scale.double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x, [tokens, heads, head_dim], by cos and sin, [tokens, pairs]."""
    pairs = cos.shape[1]
    c, s = cos.double()[:, None], sin.double()[:, None]
    low, high, rest = x.double().split((pairs, pairs, x.shape[2] - 2 * pairs), 2)
    return torch.cat((low * c - high * s, high * c + low * s, rest), 2)


def gated(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) x up."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def convolved(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """Convolves each channel with the tokens before it, then SiLU.

    Args:
        x: [tokens, channels] of a whole sequence.
        taps: [channels, taps], the oldest token first.
        bias: [channels].
    """
    count = taps.shape[1]
    padded = torch.cat((x.new_zeros(count - 1, x.shape[1]), x)).double()
    total = sum(padded[tap : tap + len(x)] * taps[:, tap].double() for tap in range(count)) + bias.double()
    return total * torch.sigmoid(total)


def recurred(recurrence: LinearRecurrence) -> Tensor:
    """Computes a recurrence over a whole sequence. Returns [tokens, heads, value_dim] float64."""
    r, shared = recurrence, recurrence.values.shape[1] // recurrence.keys.shape[1]
    queries, keys = (part.double().repeat_interleave(shared, 1) for part in (r.queries, r.keys))
    if r.scale is not None:
        queries, keys = (part / (part.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for part in (queries, keys))
        queries = queries * r.scale
    matrix, made = torch.zeros(1, dtype=torch.float64, device=keys.device), []
    for token, value in enumerate(r.values.double()):
        matrix = matrix * r.kept[token, :, :, None].double()
        known = torch.einsum("hk,hkv->hv", keys[token], matrix) if r.delta and token else 0.0
        written = (value - known) * r.rates[token, :, None].double()
        matrix = matrix + torch.einsum("hk,hv->hkv", keys[token], written)
        result = torch.einsum("hk,hkv->hv", queries[token], matrix)
        made.append(result if r.skip is None else result + value * r.skip[:, None].double())
    return torch.stack(made)


def noisy(logits: Tensor, keys: Tensor, temperature: float, min_p: float) -> Tensor:
    """Returns scaled logits plus Gumbel noise, whose largest is drawn; -inf for tokens that min_p forbids.

    Args:
        logits: [draws, vocabulary], the logits of each draw.
        keys: [draws] int64, the random keys.
        temperature: Temperature, above 0.
        min_p: Least probability, as a share of the largest one; 0 allows all.
    """
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    if min_p:
        scaled = scaled.masked_fill(scaled < torch.tensor(min_p, dtype=torch.float64).log(), -torch.inf)
    return scaled + gumbel(keys, torch.arange(logits.shape[1], device=logits.device))
