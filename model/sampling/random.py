"""Random numbers without state: a draw depends on (seed, sequence index, output position, token id) only.

So a sequence's tokens are the same isolated or in a batch, before or after a preemption, on this replica or another.
The hash is SplitMix64 (Steele, Lea and Flood, 2014), applied once to each part of the key. The idea is Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Rounds of SplitMix64: shift to the right, factor."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def row_keys(seeds: NDArray[np.uint64], indices: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns one 64-bit key for each (seed, sequence index, output position)."""
    key = _mix_host(seeds)
    key = _mix_host(key ^ indices.astype(np.uint64))
    return _mix_host(key ^ positions.astype(np.uint64)).view(np.int64)


def _mix_host(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = x + np.uint64(GOLDEN)
    for shift, factor in MIXERS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Returns standard Gumbel noise, one number for each row key and token id.

    The arg max of log p + noise is a draw from p (Gumbel-max; Maddison, Tarlow and Minka, 2014).

    Args:
        keys: [rows] int64.
        tokens: [rows, n] or [n] int64.

    Returns:
        [rows, n] float64.
    """
    z = mix(keys[:, None] ^ tokens)
    uniform = (_shift(z, 12).double() + 0.5) * 2.0**-52  # 52 bits: 0 < uniform < 1, so both logarithms are finite
    return -torch.log(-torch.log(uniform))


def mix(x: Tensor) -> Tensor:
    """Computes SplitMix64 on int64 tensors, whose products wrap."""
    z = x + _signed(GOLDEN)
    for shift, factor in MIXERS:
        z = (z ^ _shift(z, shift)) * _signed(factor)
    return z ^ _shift(z, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts to the right logically; torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
