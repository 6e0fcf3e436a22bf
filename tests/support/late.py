"""Draws as a GPU makes them: what they are is known later, and their logits are gone by then."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling.sampler import Drawn, SamplingRows, sample


@dataclass(frozen=True)
class Late:
    tokens: Tensor
    drawn: Drawn

    def fetch(self) -> Drawn:
        return self.drawn


def start_late(logits: Tensor, controls: SamplingRows, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Late:
    """A `model.sampling.sampler.Starter`."""
    drawn = sample(logits, controls, rows, positions)
    logits.fill_(torch.nan)
    return Late(torch.from_numpy(np.maximum(drawn.tokens, 0).astype(np.int64)), drawn)
