"""The largest logit and the normaliser of each row, beside torch's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model.kernels.program import Machine
from model.kernels.summary import Summariser
from model.sampling.sampler import summarise


def random(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape)).float() * 5


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 17, 320, 50257])
def test_equals_torch(machine: Machine, rows: int, vocabulary: int) -> None:
    logits, summary_of = random(rows, vocabulary), Summariser(machine)
    for given in (logits, random(rows, vocabulary + 40)[:, 3 : vocabulary + 3], logits.T.contiguous().T, logits - 200):
        found, expected = summary_of(given), summarise(given)
        assert torch.equal(found.best, expected.best)
        assert torch.equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.normal, expected.normal, atol=2e-5, rtol=2e-6)


def test_of_equal_ones_the_first(machine: Machine) -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 41, 99]] = 7.0
    logits[2, [97, 18, 34]] = 7.0
    assert Summariser(machine)(logits).tokens.tolist() == [0, 40, 18]


def test_rows_do_not_depend_on_each_other(machine: Machine) -> None:
    logits, summary_of = random(9, 1000), Summariser(machine)
    whole = summary_of(logits)
    for i in range(9):
        assert torch.equal(summary_of(logits[i : i + 1]).normal, whole.normal[i : i + 1])


def test_what_is_not_finite_shows(machine: Machine) -> None:
    logits = random(4, 50)
    logits[0, 3], logits[1, 49], logits[2, 7] = torch.nan, torch.inf, -torch.inf
    normal = Summariser(machine)(logits).normal[:, 0]
    assert normal.isfinite().tolist() == [False, False, True, True]
    np.testing.assert_allclose(normal[2:], torch.logsumexp(logits[2:], -1), rtol=1e-6)
