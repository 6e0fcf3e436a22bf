"""When requests come that do not wait for each other."""

from collections.abc import Iterator

import numpy as np


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start, without end; the first request comes at 0.

    rate: requests a second on average. burstiness: shape of the gamma distribution of the gaps, whose mean is 1/rate
    and whose variance 1/(burstiness rate^2), as vLLM's benchmark has it: 1 is a Poisson process, below it requests come
    in bursts, above it more evenly. The same seed gives the same times. Raises ValueError.
    """
    if not (0 < rate < float("inf") and 0 < burstiness < float("inf")):
        raise ValueError(f"a rate of {rate} with burstiness {burstiness}: both must be above 0")
    source, at = np.random.default_rng(seed), 0.0
    while True:
        yield at
        at += float(source.gamma(burstiness, 1 / (rate * burstiness)))
