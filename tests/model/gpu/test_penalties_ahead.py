"""The kernel of penalties, compiled for a GPU that is not here: each of its operations rounds, as it does in torch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu_ledger.fake_driver import fake_driver
from model.gpu.penalties import BLOCK, penalise, penalise_rows
from model.sampling.builtin_processors import Penalties
from scheduler.controls import NO_LOGITS_PARAMS


def penalties(tokens: int) -> Penalties:
    params = replace(NO_LOGITS_PARAMS, repetition=1.1, frequency=0.2)
    made = Penalties.of(params, np.arange(tokens, dtype=np.int32))
    assert made is not None
    return made


def test_no_product_is_fused_with_a_sum_and_no_quotient_is_approximate() -> None:
    made = list[Any]()
    with fake_driver(lambda kernel, compiled, arguments: made.append(compiled)):
        penalise(torch.zeros(2, 320), np.array([1]), [penalties(5)], np.array([0]))
        assembly = made[0].asm["ptx"]
        assert "div.rn.f32" in assembly
        assert "mul.f32" in assembly or "mul.rn.f32" in assembly
        assert "fma" not in assembly
        arguments = torch.zeros(2, 320), torch.zeros((1, 6), dtype=torch.int64), 320
        penalise_rows[(1, 1)](*arguments, BLOCK=BLOCK)
        assert "fma" in made[1].asm["ptx"], "as it would be otherwise"


def test_it_is_compiled_once() -> None:
    """However many rows and tokens there are."""
    made = list[Any]()
    with fake_driver(lambda kernel, compiled, arguments: made.append(compiled)):
        for rows, tokens in ((1, 1), (3, 16), (16, 300), (2, 5000)):
            which = np.arange(rows)
            penalise(torch.zeros(rows, 6400), which, [penalties(tokens) for _ in which], which)
    assert len({id(one) for one in made}) == 1
