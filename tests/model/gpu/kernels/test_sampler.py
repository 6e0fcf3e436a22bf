"""Draws and summaries by kernels, beside torch's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from model.gpu.draws import GpuOps, start_draws
from model.gpu.sampler import gumbel, mixed_bits
from model.sampling.random import gumbel as exact_gumbel
from model.sampling.random import mix, row_keys
from model.sampling.sampler import TORCH_OPS, Draws, SamplingRows, sample
from scheduler.controls import NO_LOGITS_PARAMS, Controls
from scheduler.step import NO_TOKEN, Join
from tests.model.gpu.kernels.device import DEVICE

OPS = GpuOps()


@triton.jit
def tell(keys, ids, bits, noise, n: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.arange(0, n)
    mixed = mixed_bits(tl.load(keys + number).to(tl.uint64, bitcast=True) ^ tl.load(ids + number).to(tl.uint64))
    tl.store(bits + number, mixed.to(tl.int64, bitcast=True))
    tl.store(noise + number, gumbel(mixed))


def test_the_same_bits_and_nearly_the_same_noise() -> None:
    n = 4096
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63, n)).to(DEVICE)
    ids = torch.from_numpy(rng.integers(0, 2**18, n).astype(np.int32)).to(DEVICE)
    bits, noise = torch.zeros_like(keys), torch.zeros(n, device=DEVICE)
    tell[(1,)](keys, ids, bits, noise, n=n)
    assert torch.equal(bits, mix(keys ^ ids.long()))
    exact = torch.cat([exact_gumbel(keys[i : i + 1], ids[i : i + 1].long())[0] for i in range(n)])
    torch.testing.assert_close(noise.double(), exact, atol=2e-6, rtol=2e-6)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return 4 * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draws_of(rows: list[int], temperature: float, min_p: float = 0.0) -> Draws:
    n = len(rows)
    keys = row_keys(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64), np.arange(n))
    return Draws(
        np.array(rows), keys, np.full(n, temperature), np.full(n, min_p), np.zeros(n, np.int64), np.ones(n)
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [1, 320, 4096, 4097, 9000])
def test_summary(vocabulary: int) -> None:
    logits = logits_of(5, vocabulary)
    logits[1] = -torch.inf
    logits[2, ::3] = 11.0  # several are the largest
    logits[3, vocabulary // 2] = torch.nan
    found, expected = OPS.summary(logits), TORCH_OPS.summary(logits)
    sound = [0, 1, 2, 4]
    assert np.array_equal(found.best[sound], expected.best[sound])
    assert np.array_equal(found.tokens[sound[:1] + sound[2:]], expected.tokens[sound[:1] + sound[2:]])
    np.testing.assert_allclose(found.normal, expected.normal, rtol=1e-5, atol=1e-5)
    assert found.tokens.dtype == np.int64
    assert 0 <= found.tokens[3] < vocabulary, "a token that is none"


@pytest.mark.parametrize("vocabulary", [3, 5000])
@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.0), (0.3, 0.1), (2.0, 0.4), (1e-40, 0.0), (5.0, 1.0)])
def test_draws_are_those_of_torch(vocabulary: int, temperature: float, min_p: float) -> None:
    logits = logits_of(6, vocabulary)
    logits[0, 1:] = -torch.inf
    draws = draws_of([0, 5, 3, 3, 1, 2, 4, 4], temperature, min_p)
    assert np.array_equal(OPS.draw(logits, draws), TORCH_OPS.draw(logits, draws))


def test_a_row_s_draw_does_not_depend_on_the_others() -> None:
    logits, draws = logits_of(4, 5000), draws_of([2, 0, 3, 1], 1.5)
    together = OPS.draw(logits, draws)
    summary = OPS.summary(logits)
    for i in range(4):
        assert OPS.draw(logits, draws.of(np.array([i]))).item() == together[i]
        assert OPS.summary(logits[i : i + 1]).normal[0] == summary.normal[i]


def test_top_k_and_no_rows() -> None:
    logits = logits_of(3, 50)
    draws = draws_of([0, 1, 2], 1.0)
    draws.top_k[:] = 1
    assert np.array_equal(OPS.draw_from_top(logits, draws), logits.argmax(-1).cpu())
    assert len(OPS.summary(logits[:0]).tokens) == 0


def test_draws_that_are_fetched_later_are_those_of_torch() -> None:
    """Greedy ones, some that are left to chance, from the top of it too, with a penalty, with alternatives; no numbers
    at all, and nothing that may be drawn.
    """
    asked = [
        Controls(0.0, 1.0, 0, 0.0, 0),
        Controls(0.9, 1.0, 0, 0.0, 1, top_logprobs=3),
        Controls(0.7, 0.8, 20, 0.0, 2),
        Controls(0.0, 1.0, 0, 0.0, 3, logits_params=replace(NO_LOGITS_PARAMS, presence=2.0), top_logprobs=0),
        Controls(1.0, 1.0, 0, 0.05, 4),
        Controls(0.0, 1.0, 0, 0.0, 5, logits_params=replace(NO_LOGITS_PARAMS, allowed=(7,), banned=((7,),))),
    ]
    rows = np.array([4, 1, 0, 3, 5, 2])
    logits = logits_of(len(asked), 5000)
    logits[4] = torch.nan
    kept = logits.clone()
    controls = SamplingRows(len(asked))
    for row, one in enumerate(asked):
        controls.join(Join(row, np.arange(9, dtype=np.int32), 9, one))
    positions = np.arange(len(rows))
    drawing = start_draws(logits, controls, rows, positions)
    logits.fill_(torch.nan)  # as the next step does
    found, expected = drawing.fetch(), sample(kept, controls, rows, positions, TORCH_OPS)
    sound = rows != rows[4]
    assert found.tokens[sound].tolist() == expected.tokens[sound].tolist()
    assert found.tokens[rows == 5].item() == NO_TOKEN
    assert np.isnan(found.logprobs.chosen).tolist() == np.isnan(expected.logprobs.chosen).tolist()
    np.testing.assert_allclose(found.logprobs.chosen[sound], expected.logprobs.chosen[sound], atol=1e-5)
    asking = sound & (controls.top_logprobs[rows] >= 0)
    assert found.logprobs.rank[asking].tolist() == expected.logprobs.rank[asking].tolist()
    assert np.array_equal(found.logprobs.top_ids[asking], expected.logprobs.top_ids[asking])
    np.testing.assert_allclose(found.logprobs.top[asking], expected.logprobs.top[asking], atol=1e-5)
    assert ((drawing.tokens >= 0) & (drawing.tokens < 5000)).all()
    assert drawing.tokens.cpu().numpy()[sound & (rows != 5)].tolist() == found.tokens[sound & (rows != 5)].tolist()
