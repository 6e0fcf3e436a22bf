"""Functions of infinities and NaNs."""

from collections.abc import Callable

import pytest
import torch

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.values import FLOATS, LANES, Value

FUNCTIONS = [math.sigmoid, math.tanh, math.erf, math.silu, math.gelu, math.gelu_tanh, math.quick_gelu, math.relu]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nan_stays_nan_and_alone(machine: Machine, function: Callable[[Code, Value], Value]) -> None:
    def write(code: Code) -> None:
        source, out = code.arguments(2)
        code.store(function(code, code.load(source, FLOATS)), out)

    x, y = torch.linspace(-9, 9, LANES), torch.empty(LANES)
    x[3] = torch.nan
    machine.program([Call(f"one_{function.__name__}", write, (x, y))]).run(1)
    assert y.isnan().tolist() == [lane == 3 for lane in range(LANES)]
