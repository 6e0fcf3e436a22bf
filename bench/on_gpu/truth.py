"""What kernels have to give, in plain torch and float64, and how far from it they may be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.sampling.random import gumbel

EIGHT_BIT = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""By name: elements of a page, and the largest of them."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """most: of any element's error. whole: of the error's norm, as a part of the result's."""

    most: float
    whole: float


ATTENTION = {
    "float32": Tolerance(3e-5, 1e-5),
    "float16": Tolerance(5e-3, 2e-3),
    "bfloat16": Tolerance(5e-2, 1e-2),
}
"""Of queries, keys and values with a deviation of 1.5."""
ROWS = {"float32": Tolerance(1e-5, 3e-6), "float16": Tolerance(2e-3, 5e-4), "bfloat16": Tolerance(2e-2, 4e-3)}
"""Of what layers do with a token by itself; `most` is a part of the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Error:
    """most: the largest of an element. whole: its norm, as a part of the expected one. NaN where a result has one that
    is not expected.
    """

    most: float
    whole: float

    @staticmethod
    def of(found: Tensor, expected: Tensor) -> "Error":
        """Raises ValueError where shapes differ."""
        if found.shape != expected.shape:
            raise ValueError(f"the result has shape {list(found.shape)}, {list(expected.shape)} is expected")
        wrong = found.double() - expected.double()
        norm = expected.double().norm().clamp_min(1e-300)
        return Error(float(wrong.abs().max()), float(wrong.norm() / norm))

    def within(self, allowed: Tolerance) -> bool:
        return self.most <= allowed.most and self.whole <= allowed.whole  # NaN is not

    @staticmethod
    def worst(errors: list["Error"]) -> "Error":
        """Of several; NaN wherever one has it."""
        both = torch.tensor([[error.most, error.whole] for error in errors], dtype=torch.float64).amax(0)
        return Error(*both.tolist())


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None, cap: float | None = None
) -> Tensor:
    """Causal, of the queries of one sequence, which stand at positions from `start` on.

    queries: [tokens, heads, head_dim]. keys, values: [start + tokens, kv_heads, head_dim]. window: tokens that one
    sees, itself included. cap: of the scores. Returns float64, the queries' shape.
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
    return torch.einsum("hgqk,khd->qhgd", weights, values.double()).reshape(queries.shape)


def eight_bits(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """rows: [..., head_dim]. Their elements as bytes, and float32 scales [..., 1]: the largest magnitude of a row is
    the largest number of the kind, what is between two numbers goes to the nearer one, halves to the even one.
    """
    dtype, largest = EIGHT_BIT[kind]
    scale = rows.float().abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = rows.float() / scale
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype).view(torch.uint8), scale


def stored(rows: Tensor, kind: str | None) -> Tensor:
    """What is read back from pages of this kind, float64; None keeps rows as they are."""
    if kind is None:
        return rows.double()
    elements, scale = eight_bits(rows, kind)
    return elements.view(EIGHT_BIT[kind][0]).double() * scale.double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim]. cos, sin: [tokens, pairs]."""
    pairs = cos.shape[1]
    c, s = cos.double()[:, None], sin.double()[:, None]
    low, high, rest = x.double().split((pairs, pairs, x.shape[2] - 2 * pairs), 2)
    return torch.cat((low * c - high * s, high * c + low * s, rest), 2)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) x up."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def noisy(logits: Tensor, keys: Tensor, temperature: float, min_p: float) -> Tensor:
    """logits: [draws, vocabulary], those of each draw. keys: int64 [draws]. What a draw takes the largest of; -inf
    where min_p forbids.
    """
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    if min_p:
        scaled = scaled.masked_fill(scaled < torch.tensor(min_p, dtype=torch.float64).log(), -torch.inf)
    return scaled + gumbel(keys, torch.arange(logits.shape[1], device=logits.device))
