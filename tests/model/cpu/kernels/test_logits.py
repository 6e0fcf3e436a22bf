"""The largest logit and the normaliser of each row, beside torch's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.logits import LONGS, KernelOps, gumbel
from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.values import LANES
from model.sampling.random import gumbel as exact
from model.sampling.sampler import TORCH_OPS, Draws, LogitOps, TorchOps


def random(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape)).float() * 5


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 17, 320, 50257])
def test_equals_torch(machine: Machine, rows: int, vocabulary: int) -> None:
    logits, summary_of = random(rows, vocabulary), KernelOps(machine).summary
    for given in (logits, random(rows, vocabulary + 40)[:, 3 : vocabulary + 3], logits.T.contiguous().T, logits - 200):
        found, expected = summary_of(given), TORCH_OPS.summary(given)
        assert np.array_equal(found.best, expected.best)
        assert np.array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.normal, expected.normal, atol=2e-5, rtol=2e-6)


def test_of_equal_ones_the_first(machine: Machine) -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 41, 99]] = 7.0
    logits[2, [97, 18, 34]] = 7.0
    assert KernelOps(machine).summary(logits).tokens.tolist() == [0, 40, 18]


def test_rows_do_not_depend_on_each_other(machine: Machine) -> None:
    logits, summary_of = random(9, 1000), KernelOps(machine).summary
    whole = summary_of(logits)
    for i in range(9):
        assert summary_of(logits[i : i + 1]).normal == whole.normal[i]


def test_what_is_not_finite_shows(machine: Machine) -> None:
    logits = random(4, 50)
    logits[0, 3], logits[1, 49], logits[2, 7] = torch.nan, torch.inf, -torch.inf
    normal = KernelOps(machine).summary(logits).normal
    assert np.isfinite(normal).tolist() == [False, False, True, True]
    np.testing.assert_allclose(normal[2:], torch.logsumexp(logits[2:], -1), rtol=1e-6)


def test_draws_are_those_of_torch(machine: Machine) -> None:
    """In float32 the noise is rounded otherwise, which decides between two tokens once in very many draws."""
    rng = np.random.default_rng(0)
    logits, n = random(20, 32_000), 400
    rows, keys = rng.integers(0, 20, n), rng.integers(-(2**63), 2**63 - 1, n)
    temperature, min_p = rng.choice([0.2, 0.7, 1.0, 2.0], n), rng.choice([0.0, 0.05, 0.5], n)
    draws = Draws(rows, keys, temperature, min_p, np.zeros(n, np.int64), np.ones(n))
    found, expected = KernelOps(machine).draw(logits, draws), TORCH_OPS.draw(logits, draws)
    assert np.mean(found == expected) > 0.99
    assert len(set(found.tolist())) > 100


def drawn_from_top(ops: LogitOps, logits: Tensor, top_k: int, top_p: float, n: int = 60) -> np.ndarray:
    rng = np.random.default_rng(1)
    rows, keys = rng.integers(0, len(logits), n), rng.integers(-(2**63), 2**63 - 1, n)
    temperature, min_p = rng.choice([0.2, 0.7, 1.0], n), rng.choice([0.0, 0.05, 0.5], n)
    return ops.draw_from_top(logits, Draws(rows, keys, temperature, min_p, np.full(n, top_k), np.full(n, top_p)))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.999), (50, 1.0), (50, 0.9), (1, 1.0), (5000, 0.9)])
@pytest.mark.parametrize("spread", [8.0, 3.0, 0.3])
@pytest.mark.sample(3)
def test_draws_from_the_top_are_those_of_torch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, top_k: int, top_p: float, spread: float
) -> None:
    """Steep logits, of which the candidates are enough, and flat ones, of which they are not."""
    logits = random(20, 20_000) / 5 * spread
    expected = drawn_from_top(TORCH_OPS, logits, top_k, top_p)
    if spread == 8.0 and top_k < 5000:
        monkeypatch.setattr(TorchOps, "draw_from_top", lambda *_: pytest.fail("all were sorted"))
    found = drawn_from_top(KernelOps(machine), logits, top_k, top_p)
    assert np.mean(found == expected) > 0.96
    assert top_k == 1 or len(set(found.tolist())) > 10


def test_draws_from_the_top_do_not_depend_on_each_other(machine: Machine) -> None:
    logits = torch.cat((random(3, 20_000) * 2, random(3, 20_000) / 10))
    controls = np.full(6, 0.8), np.full(6, 0.01), np.array([0, 40, 0, 0, 40, 0]), np.full(6, 0.95)
    ops, draws = KernelOps(machine), Draws(np.arange(6), np.arange(6), *controls)
    together = ops.draw_from_top(logits, draws)
    for i in range(6):
        assert ops.draw_from_top(logits, draws.of(np.array([i]))).tolist() == [together[i]]


def test_noise_is_that_of_float64(machine: Machine) -> None:
    """Within what float32 can tell, from the smallest to the largest that 200,000 draws have."""

    def write(code: Code) -> None:
        source, out, count = code.arguments(3)
        with code.loop(0, count, LANES) as i:
            code.store(gumbel(code, code.load(source + i * 8, LONGS)), out + i * 4)

    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000))
    out = torch.empty(200_000)
    open_machine(None).program([Call("noise", write, (keys, out, len(keys)))]).run(1)
    expected = exact(keys, torch.zeros(1, dtype=torch.int64))[:, 0]
    np.testing.assert_allclose(out.double(), expected, atol=2e-6, rtol=1e-6)
    assert expected.max() > 10
    assert expected.min() < -2


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 17, 31, 32, 33, 48, 320, 2063])
@pytest.mark.parametrize("more", [0, 3], ids=["masks as wide", "masks wider"])
def test_forbidden_tokens_are_those_whose_bit_is_0(machine: Machine, vocabulary: int, more: int) -> None:
    rng = np.random.default_rng(vocabulary)
    words, rows = -(-vocabulary // 32) + more, np.array([0, 2, 5])
    bits = rng.integers(-(2**31), 2**31 - 1, (3, words)).astype(np.int32)
    bits[2] = -1
    for given in (random(7, vocabulary), random(7, vocabulary + 40)[:, 3 : vocabulary + 3]):
        expected = given.clone()
        for row, mask in zip(rows.tolist(), bits, strict=True):
            for token in range(vocabulary):
                if not mask[token // 32] >> token % 32 & 1:
                    expected[row, token] = -torch.inf
        for ops in (KernelOps(machine), TORCH_OPS):
            found = given.clone()
            ops.forbid(found, rows, bits)
            assert torch.equal(found, expected)
