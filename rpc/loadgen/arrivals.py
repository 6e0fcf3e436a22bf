"""Arrival times of an open loop, whose requests do not wait for each other."""

from collections.abc import Iterator

import numpy as np


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yields arrival times in seconds from the start, without end; the first is 0.

    The gaps have a gamma distribution with mean 1/rate and variance 1/(burstiness rate^2), like vLLM's benchmark.

    Args:
        rate: Requests a second on average.
        burstiness: Shape of the distribution: 1 is a Poisson process, less comes in bursts, more is even.
        seed: Equal seeds give equal times.

    Raises:
        ValueError: Rate or burstiness is not above 0.
    """
    if not (0 < rate < float("inf") and 0 < burstiness < float("inf")):
        raise ValueError(f"a rate of {rate} with burstiness {burstiness}: both must be above 0")
    source, at = np.random.default_rng(seed), 0.0
    while True:
        yield at
        at += float(source.gamma(burstiness, 1 / (rate * burstiness)))
