"""Checks the other kernels: norms, rotation, gates, a whole attention layer, the join of parts, and the sampler."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.on_gpu import truth
from bench.on_gpu.check_attention import AttentionCase, Pool
from bench.on_gpu.check_recurrence import recurrence_checks
from bench.on_gpu.mixtures import mixture_checks
from bench.on_gpu.pages import picked, poisoned
from bench.on_gpu.truth import Error, Tolerance
from model.forward import ForwardBatch
from model.gpu.draws import GpuOps
from model.gpu.parts import KernelGatedMLP, KernelNorm, KernelSelfAttention
from model.layers import silu
from model.rope import Rope, frequencies
from model.sampling.random import row_keys
from model.sampling.sampler import TORCH_OPS, Draws

EPS = 1e-5
ROUNDED = 1e-4  # largest distance of a draw in float32 below the largest number in float64

Check = tuple[str, Callable[[], Error], Tolerance]
"""Name of a check, a function that returns its error, and the tolerance."""


class Noted:
    """An `AttentionBackend` that only records its arguments."""

    name = "noted"

    def __init__(self) -> None:
        self.keys = self.values = self.queries = torch.empty(0)

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:  # noqa: ARG002 - the protocol's
        self.keys, self.values = keys, values

    def attend(self, layer: int, queries: Tensor, plan: Any, sinks: Tensor | None = None) -> Tensor:  # noqa: ARG002
        self.queries = queries
        return queries


def unchanged(x: Tensor, _: ForwardBatch | None = None) -> Tensor:
    """Returns its argument: a linear layer without work."""
    return x


class RandomTensors:
    """Makes random tensors of a seed, on a device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self._made = device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._made).to(dtype).to(self.device)


def checks(device: torch.device, dtypes: tuple[str, ...], vocabulary: int = 128_256) -> Iterator[Check]:
    """Yields all checks, those of layers for each of `dtypes`."""
    for name in dtypes:
        yield from layer_checks(RandomTensors(device), name)
        yield from mixture_checks(device, name)
    yield from recurrence_checks(device)
    yield "parts of attention are joined", partial(joined, device), Tolerance(1e-5, 3e-6)
    yield "sampler: largest, its token, sum", partial(summary, device, vocabulary), Tolerance(1e-4, 3e-6)
    yield "sampler: draws from the top", partial(cut_draws, device, vocabulary), Tolerance(0.0, 0.0)
    for temperature, min_p in ((1.0, 0.0), (0.3, 0.1)):
        yield (
            f"sampler: draws, temperature {temperature:g}, min_p {min_p:g}",
            partial(draws, device, vocabulary, temperature, min_p),
            Tolerance(ROUNDED, ROUNDED),
        )


def cut_draws(device: torch.device, vocabulary: int) -> Error:
    """Counts draws from what top_k and top_p leave that are not those of a sort."""
    logits, n = 4 * RandomTensors(device)(16, vocabulary), 16
    logits[8:] = logits[8:].bfloat16().float()  # with ties
    keys = row_keys(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64), np.arange(n))
    top_k, top_p = np.array([0, 20, 3000, 1] * 4), np.array([0.9, 1.0, 0.7, 0.5, 0.999] * 4)[:n]
    wanted = Draws(np.arange(n), keys, np.full(n, 0.9), np.zeros(n), top_k, top_p)
    with poisoned():
        found = GpuOps().draw_from_top(logits, wanted)
    different = float((found != TORCH_OPS.draw_from_top(logits.cpu(), wanted)).sum())
    return Error(different, different)


def layer_checks(random: RandomTensors, name: str) -> Iterator[Check]:
    dtype = getattr(torch, name)
    allowed = truth.ROWS[name]
    for width in (576, 4096):
        yield f"norm of {width}, {name}", partial(norm, random, width, dtype), allowed
        yield f"norm of a sum of {width}, {name}", partial(norm_of_sum, random, width, dtype), allowed
    yield f"norm of heads, {name}", partial(norm_of_heads, random, dtype), allowed
    for pairs in (64, 32, 24):
        yield f"rotation of {pairs} pairs, {name}", partial(rotation, random, pairs, dtype), allowed
    for width in (1536, 14336):
        yield f"gate of {width}, {name}", partial(gate, random, width, dtype), allowed
    yield f"a layer's attention, {name}", partial(attention_layer, random, name), truth.ATTENTION[name]


def scaled(found: Tensor, expected: Tensor) -> Error:
    """Returns the error as a share of the largest magnitude."""
    error = Error.of(found, expected)
    return Error(error.most / float(expected.abs().max()), error.norm)


def norm(random: RandomTensors, width: int, dtype: torch.dtype) -> Error:
    x, weight = random(33, width, dtype=dtype), random(width, dtype=dtype)
    with poisoned():
        found = KernelNorm(weight, EPS)(x)
    return scaled(found, truth.rms_norm(x, weight, EPS))


def norm_of_sum(random: RandomTensors, width: int, dtype: torch.dtype) -> Error:
    x, added, weight = random(33, width, dtype=dtype), random(33, width, dtype=dtype), random(width, dtype=dtype)
    with poisoned():
        found, summed = KernelNorm(weight, EPS).of_sum(x, added)
    # The kernel normalises the rounded sum, which the next part gets.
    return Error.worst(
        [scaled(summed, x.double() + added.double()), scaled(found, truth.rms_norm(summed, weight, EPS))]
    )


def norm_of_heads(random: RandomTensors, dtype: torch.dtype) -> Error:
    """Checks the norm of heads that lie between others in memory."""
    qkv, weight = random(17, 12, 128, dtype=dtype), random(128, dtype=dtype)
    with poisoned():
        found = KernelNorm(weight, EPS)(qkv[:, 2:7])
    return scaled(found, truth.rms_norm(qkv[:, 2:7], weight, EPS))


def rotation(random: RandomTensors, pairs: int, dtype: torch.dtype) -> Error:
    """Checks the rotation of queries and keys; values, and dimensions past the pairs, must not change."""
    heads, kv_heads, dim, context = 8, 2, 128, 400
    rope = Rope(frequencies(2 * pairs, 10_000.0), context, dtype, random.device)
    qkv = random(19, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.arange(0, context, context // 19, device=random.device)[:19]
    noted, before = Noted(), qkv.clone().view(19, -1, dim)
    layer = KernelSelfAttention(0, heads, kv_heads, dim, unchanged, unchanged, rope)
    layer(qkv, ForwardBatch(positions, positions[None], positions, noted, None))  # type: ignore[arg-type]
    cos, sin = (table[positions] for table in rope.tables)
    queries, keys, values = before.split((heads, kv_heads, kv_heads), 1)
    if not torch.equal(noted.values, values):
        raise ValueError("values were changed")
    found = ((noted.queries, queries), (noted.keys, keys))
    return Error.worst([scaled(turned, truth.rotated(was, cos, sin)) for turned, was in found])


def gate(random: RandomTensors, width: int, dtype: torch.dtype) -> Error:
    gate_up = 4 * random(33, 2 * width, dtype=dtype)
    with poisoned():
        found = KernelGatedMLP(unchanged, unchanged, silu)(gate_up)
    return scaled(found, truth.gated(gate_up))


def attention_layer(random: RandomTensors, name: str) -> Error:
    """Checks rotation, writing and attention of a whole layer, with a decode and a prefill in one step."""
    case = AttentionCase(name, 4, 64)
    lengths = ((70, 1), (0, 37))
    pool = Pool(case, lengths, random.device)
    rope = Rope(frequencies(case.head_dim, 10_000.0), 100, getattr(torch, name), random.device)
    now = [(i, before, count) for i, (before, count) in enumerate(lengths)]
    parts = [picked(part, now) for part in (pool.queries, pool.keys, pool.values)]
    shape = pool.book.shape(now)
    positions = torch.from_numpy(shape.positions).to(random.device)
    heads = case.group * case.kv_heads
    layer = KernelSelfAttention(0, heads, case.kv_heads, case.head_dim, unchanged, unchanged, rope)
    with poisoned():
        batch = ForwardBatch(positions, positions[None], positions, pool.attention, pool.attention.plan(shape))
        found = layer(torch.cat(parts, 1).flatten(1), batch).view(len(positions), heads, case.head_dim)
    turns = [table[positions] for table in rope.tables]
    queries, keys = (truth.rotated(part, *turns).to(part.dtype) for part in parts[:2])
    errors, at = [], 0
    for i, (before, count) in enumerate(lengths):
        mine = slice(at, at + count)
        history = torch.cat((pool.keys[i][:before], keys[mine])), torch.cat((pool.values[i][:before], parts[2][mine]))
        errors.append(Error.of(found[mine], truth.attention(queries[mine], *history, before)))
        at += count
    return Error.worst(errors)


def joined(device: torch.device) -> Error:
    """Checks the join of a softmax's parts, some of which have no keys, and of two heads' sinks."""
    from model.gpu.attention import join_parts
    from model.gpu.attention_backend import PARTS_AT_ONCE  # here: a new division fails this alone

    random, heads, dim, count = RandomTensors(device), 4, 96, 37
    tops, totals = 20 * random(count, heads), 1 + random(count, heads).abs()
    parts = random(count, heads, dim)
    tops[3:19], totals[3:19], parts[3:19] = -torch.inf, 0.0, 0.0
    out = torch.full((3, heads, dim), torch.nan, device=device)
    joins = torch.tensor([[1, 0, count, 0]], dtype=torch.int32, device=device)
    sums = torch.stack((tops, totals), -1)
    sinks = torch.tensor([-torch.inf, 30.0, -torch.inf, 30.0], device=device)
    join_parts[(1, heads)](out, parts, sums, sinks, joins, HEAD_DIM=dim, PADDED_DIM=128, PARTS_AT_ONCE=PARTS_AT_ONCE)
    if not (out[0].isnan().all() and out[2].isnan().all()):
        raise ValueError("another token's result was written")
    highest = torch.maximum(tops.amax(0), sinks).double()
    weights = torch.exp2(tops.double() - highest)[..., None]
    whole = (weights[..., 0] * totals).sum(0) + torch.exp2(sinks - highest)
    return scaled(out[1], (weights * parts).sum(0) / whole[:, None])


def summary(device: torch.device, vocabulary: int) -> Error:
    logits = 4 * RandomTensors(device)(17, vocabulary)
    logits[2, ::3] = 30.0  # several are the largest
    with poisoned():
        found = GpuOps().summary(logits)
    expected = logits.cpu().numpy()
    if not np.array_equal(found.tokens, expected.argmax(-1)) or not np.array_equal(found.best, expected.max(-1)):
        raise ValueError("another token is the largest")
    return Error.of(torch.from_numpy(found.normal), torch.logsumexp(logits.double(), -1).cpu())


def draws(device: torch.device, vocabulary: int, temperature: float, min_p: float) -> Error:
    """Checks draws: the distance of each below the largest of scaled logits plus noise in float64.

    It is not always 0: of two nearly equal numbers float32 may take the other.
    """
    logits, n = 4 * RandomTensors(device)(17, vocabulary), 64
    rows = np.arange(n) % len(logits)
    keys = row_keys(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64), np.arange(n))
    wanted = Draws(rows, keys, np.full(n, temperature), np.full(n, min_p), np.zeros(n, np.int64), np.ones(n))
    with poisoned():
        found = torch.from_numpy(GpuOps().draw(logits, wanted))
    chosen = torch.from_numpy(keys)
    if not ((found >= 0) & (found < vocabulary)).all():
        raise ValueError("a token that is none was drawn")
    noisy = truth.noisy(logits.cpu()[torch.from_numpy(rows)], chosen, temperature, min_p)
    drawn = noisy.gather(1, found[:, None])[:, 0]
    return Error.of(drawn, noisy.amax(-1))
