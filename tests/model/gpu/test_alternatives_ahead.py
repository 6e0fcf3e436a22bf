"""Kernels of alternatives, compiled for a GPU that is not here: once, however many rows ask for however many."""

from typing import Any

import numpy as np
import torch

from bench.gpu_ledger.fake_driver import fake_driver
from model.gpu.alternatives import put_alternatives


def test_they_are_compiled_once() -> None:
    made = list[Any]()
    with fake_driver(lambda kernel, compiled, arguments: made.append(compiled)):
        for n, asking, k in ((1, 1, 1), (3, 2, 5), (16, 16, 16), (32, 1, 0), (20, 20, 20)):
            logits, tokens = torch.zeros(n, 6400), torch.zeros(n, dtype=torch.int64)
            results = torch.zeros(4 * n + 2 * n * k, dtype=torch.int32)
            put_alternatives(results, logits, torch.zeros(n), tokens, np.arange(asking), k)
    assert len(made) == 10
    assert len({id(one) for one in made}) == 2
