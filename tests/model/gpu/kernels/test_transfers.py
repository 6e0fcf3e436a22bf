"""Transfers of numbers to a GPU, and launches, for the draws of a step: as many as kinds of controls, not rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.gpu import alternatives, cutoff, penalties, sampler
from model.gpu.draws import start_draws
from model.sampling.sampler import SamplingRows, on_device
from scheduler.controls import NO_LOGITS_PARAMS, Controls
from scheduler.step import Join
from tests.model.gpu.kernels.device import DEVICE

PLAIN = Controls(1.0, 1.0, 0, 0.0, 0)
GREEDY, CUT = replace(PLAIN, temperature=0.0), replace(PLAIN, top_k=3, top_p=0.9)
PENALISED = replace(PLAIN, logits_params=replace(NO_LOGITS_PARAMS, presence=0.5))
LOGPROBS = replace(GREEDY, top_logprobs=5)


@pytest.mark.parametrize(
    ("asked", "moves"),
    [
        ((GREEDY,), 0),
        ((PLAIN,), 1),
        ((CUT,), 1),
        ((GREEDY, PLAIN, CUT), 2),
        ((PENALISED,), 2),
        ((PENALISED, CUT), 3),
        ((LOGPROBS,), 1),
        ((LOGPROBS, PLAIN), 2),
    ],
)
def test_one_for_each_kind_of_draw(asked: tuple[Controls, ...], moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, rows = list[Any](), np.arange(7)

    def noted(logits: Tensor, values: Any) -> Tensor:
        found.append(values)
        return on_device(logits, values)

    for module in (sampler, cutoff, penalties, alternatives):
        monkeypatch.setattr(module, "on_device", noted)
    controls = SamplingRows(len(rows))
    for row in rows:
        controls.join(Join(int(row), np.arange(9, dtype=np.int32), 9, asked[row % len(asked)]))
    start_draws(torch.randn((7, 300), device=DEVICE), controls, rows, rows).fetch()
    assert len(found) == moves
