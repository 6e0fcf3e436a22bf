"""Alternatives to draws by kernels, beside torch's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.gpu import alternatives
from model.gpu.alternatives import put_alternatives
from model.sampling.sampler import largest
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED


def check(logits: Tensor, tokens: Tensor, asking: list[int], k: int) -> None:
    n = len(logits)
    normal = torch.logsumexp(logits, -1)
    results = torch.zeros(4 * n + 2 * n * k, dtype=torch.int32, device=DEVICE)
    put_alternatives(results, logits.to(DEVICE), normal.to(DEVICE), tokens.to(DEVICE), np.array(asking), k)
    expected = torch.zeros_like(results, device="cpu")
    ranks, ids, top = expected[3 * n : 4 * n], expected[4 * n :][: n * k].view(n, k), expected[4 * n + n * k :]
    for row in asking:
        ranks[row] = 1 + int((logits[row] > logits[row, tokens[row]]).sum())
        ids[row] = largest(logits[row : row + 1], k)[0].int()
        top.view(n, k)[row] = (logits[row, ids[row].long()] - normal[row]).view(torch.int32)
    assert results.tolist() == expected.tolist()


@settings(max_examples=20 if INTERPRETED else 300, deadline=None)
@given(st.integers(1, 400), st.integers(0, 8), st.booleans(), st.integers(0, 10**6))
def test_they_are_those_of_torch(vocabulary: int, k: int, coarse: bool, seed: int) -> None:
    """With equal logits, zeros of both signs, and tokens that are forbidden, in blocks of a row and in one."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((4, vocabulary), generator=random)
    logits = logits.round() if coarse else logits
    logits[3, ::2] = -torch.inf
    tokens = torch.randint(0, vocabulary, (4,), generator=random)
    asking = np.flatnonzero(np.random.default_rng(seed).integers(0, 2, 4)).tolist() or [3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternatives, "BLOCK", 64)
        check(logits, tokens, asking, min(k, vocabulary))


def test_a_whole_vocabulary_and_equal_logits() -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    check(torch.zeros((2, 70)), tokens, [0, 1], 70)
    check(torch.arange(9000.0).repeat(2, 1), tokens, [1], 20)


def test_the_law_sees_lists_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = alternatives.merge_largest

    class Swapped:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(logits: Tensor, normal: Tensor, rows: Tensor, *others: Any, **constants: Any) -> None:
                kernel[grid](logits, normal, rows.flip(0), *others, **constants)

            return launch

    logits, tokens = torch.arange(60.0).view(2, 30), torch.zeros(2, dtype=torch.int64)
    logits[0] = logits[0].flip(0)
    check(logits, tokens, [0, 1], 3)
    monkeypatch.setattr(alternatives, "merge_largest", Swapped())
    with pytest.raises(AssertionError):
        check(logits, tokens, [0, 1], 3)
