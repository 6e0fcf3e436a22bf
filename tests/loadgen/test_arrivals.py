"""Arrivals and lengths have the statistics that they say, and are the same for a seed."""

from itertools import islice

import numpy as np
import pytest

from rpc.loadgen.arrivals import arrival_times
from rpc.loadgen.lengths import Lengths

MANY = 20_000


def gaps(rate: float, burstiness: float, seed: int = 0) -> np.ndarray:
    return np.diff(list(islice(arrival_times(rate, burstiness, seed), MANY + 1)))


@pytest.mark.parametrize(("rate", "burstiness"), [(5.0, 1.0), (0.2, 1.0), (50.0, 0.25), (3.0, 4.0)])
def test_gaps_have_their_mean_and_variance(rate: float, burstiness: float) -> None:
    found = gaps(rate, burstiness)
    assert np.mean(found) == pytest.approx(1 / rate, rel=0.05)
    assert np.var(found) == pytest.approx(1 / (burstiness * rate**2), rel=0.15)


def test_poisson_counts_vary_as_their_mean_and_gaps_are_exponential() -> None:
    found = gaps(10, 1)
    counts = np.bincount(np.floor(np.cumsum(found)).astype(int))[:-1]  # requests in each second
    assert np.mean(counts) == pytest.approx(10, rel=0.05)
    assert np.var(counts) == pytest.approx(10, rel=0.15)
    for t in (0.02, 0.1, 0.3):
        assert np.mean(found > t) == pytest.approx(np.exp(-10 * t), abs=0.01)
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03, "one gap says nothing of the next"


def test_a_seed_gives_the_same_times_and_another_one_others() -> None:
    assert (gaps(2, 1, seed=3) == gaps(2, 1, seed=3)).all()
    assert (gaps(2, 1, seed=3) != gaps(2, 1, seed=4)).any()
    assert next(arrival_times(2, 1, 0)) == 0


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0), (float("inf"), 1)])
def test_rates_that_are_none(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        next(arrival_times(rate, burstiness, 0))


def test_lengths_are_of_their_range_with_equal_chances() -> None:
    source = np.random.default_rng(0)
    drawn = np.bincount([Lengths.parse("4-7", "").draw(source) for _ in range(MANY)])
    assert drawn[:4].sum() == 0
    assert drawn[4:] == pytest.approx(MANY / 4, rel=0.05)
    assert len(drawn) == 8
    assert Lengths.parse("9", "") == Lengths(9, 9)


@pytest.mark.parametrize("text", ["", "0", "-3", "7-4", "1-", "1-2-3", "ten", "1.5", "1e3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--input-tokens"):
        Lengths.parse(text, "--input-tokens")
