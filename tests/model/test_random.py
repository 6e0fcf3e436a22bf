"""The stateless random numbers: SplitMix64 as published, uniform, independent, and never infinite."""

import math

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.sampling.random import gumbel, row_keys

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
u64 = st.integers(0, MASK)


def splitmix64(state: int) -> int:
    """The output for this state: Steele, Lea and Flood, 2014, in Python's own integers."""
    z = (state + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unmix(output: int) -> int:
    """The state whose output this is."""

    def unshift(z: int, bits: int) -> int:
        x = z
        for _ in range(64 // bits + 1):
            x = z ^ (x >> bits)
        return x

    z = unshift(output, 31)
    z = unshift((z * pow(0x94D049BB133111EB, -1, 2**64)) & MASK, 27)
    z = unshift((z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK, 30)
    return (z - GOLDEN) & MASK


def key_of(seed: int, index: int, position: int) -> int:
    return splitmix64(splitmix64(splitmix64(seed) ^ index) ^ position)


def noise_of(key: int, token: int) -> float:
    """The same 52 bits as `gumbel` takes: with 53, half a step below 1 is no double, and the largest hash gives 1."""
    uniform = ((splitmix64(key ^ token) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def keys_of(seeds: list[int], indices: list[int], positions: list[int]) -> NDArray[np.int64]:
    return row_keys(np.array(seeds, np.uint64), np.array(indices, np.int64), np.array(positions, np.int64))


def test_the_reference_gives_the_published_numbers() -> None:
    """First outputs for the seeds 0 and 1234567; the state goes up by GOLDEN from one to the next."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert [splitmix64((1234567 + i * GOLDEN) & MASK) for i in range(3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


@given(st.lists(st.tuples(u64, st.integers(0, 1024), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_keys_are_splitmix64_of_seed_index_and_position(parts: list[tuple[int, int, int]]) -> None:
    keys = keys_of(*map(list, zip(*parts, strict=True)))
    assert keys.view(np.uint64).tolist() == [key_of(*part) for part in parts]


@given(st.lists(u64, min_size=1, max_size=5), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
@example(keys=[unmix(0), unmix(1 << 11), unmix(1 << 12), unmix(MASK), unmix(MASK - (1 << 11))], tokens=[0])
def test_noise_is_gumbel_of_splitmix64_of_key_and_token(keys: list[int], tokens: list[int]) -> None:
    noise = gumbel(torch.tensor([signed(key) for key in keys]), torch.tensor(tokens))
    expected = [[noise_of(key, token) for token in tokens] for key in keys]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_tokens_may_be_given_for_each_row() -> None:
    keys = torch.tensor([3, 4])
    tokens = torch.tensor([[5, 1], [2, 9]])
    every = gumbel(keys, torch.arange(10))
    assert torch.equal(gumbel(keys, tokens), every.gather(1, tokens))


def test_noise_is_finite_for_the_smallest_hash() -> None:
    assert torch.isfinite(gumbel(torch.tensor([signed(unmix(0))]), torch.tensor([0]))).all()


def test_noise_is_finite_for_the_largest_hash() -> None:
    """Infinite noise would make a token win that top_k, top_p or min_p forbids (-inf + inf is NaN, and NaN wins)."""
    key = unmix(MASK)
    assert splitmix64(key) == MASK
    assert torch.isfinite(gumbel(torch.tensor([signed(key)]), torch.tensor([0]))).all()


def chi_square(counts: NDArray[np.int64]) -> float:
    """Returns chi-square against a uniform distribution, as standard deviations from its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def uniforms(keys: NDArray[np.int64], tokens: int) -> NDArray[np.float64]:
    return np.exp(-np.exp(-gumbel(torch.from_numpy(keys), torch.arange(tokens)).numpy()))


SERIES = {
    "token": lambda n: uniforms(keys_of([5], [0], [0]), n)[0],
    "position": lambda n: uniforms(keys_of([5] * n, [0] * n, list(range(n))), 1)[:, 0],
    "index": lambda n: uniforms(keys_of([5] * n, list(range(n)), [0] * n), 1)[:, 0],
    "seed": lambda n: uniforms(keys_of(list(range(n)), [0] * n, [0] * n), 1)[:, 0],
}


def test_noise_is_uniform_and_neighbours_are_independent() -> None:
    """Along each of the four parts of the key: counts in 64 bins, and of pairs of neighbours in 16 x 16."""
    for name, series in SERIES.items():
        u = series(2**15)
        assert abs(chi_square(np.histogram(u, 64, (0, 1))[0])) < 4, name
        for lag in (1, 2, 64):
            pairs = np.histogram2d(u[:-lag], u[lag:], 16, ((0, 1), (0, 1)))[0]
            assert abs(chi_square(pairs)) < 4, (name, lag)


def test_the_parts_of_a_key_are_not_interchangeable() -> None:
    """A sum or an XOR of the parts would make sequence 1 at position 0 draw as sequence 0 at position 1 does."""
    grid = [(seed, index, position) for seed in range(12) for index in range(12) for position in range(12)]
    keys = keys_of(*map(list, zip(*grid, strict=True)))
    assert len(np.unique(keys)) == len(grid)
    noise = gumbel(torch.from_numpy(keys), torch.arange(12))
    assert len(noise.unique()) == noise.numel()
