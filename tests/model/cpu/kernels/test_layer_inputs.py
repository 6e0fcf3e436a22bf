"""Kernels of layers' own inputs, beside `model.layer_inputs`' statement in plain torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.layer_inputs import write_input_gates, write_layer_inputs
from model.cpu.kernels.linear import ACTIVATIONS
from model.cpu.kernels.program import Call, Machine
from model.layers import gelu_tanh

ROWS = 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


@pytest.mark.parametrize(("layers", "width"), [(1, 16), (3, 48), (35, 256)])
def test_inputs_of_all_layers(machine: Machine, layers: int, width: int) -> None:
    projected, found, weights = (
        random(ROWS, layers * width),
        random(ROWS, layers * width, seed=1),
        random(width, seed=2),
    )
    source, made, rows = Buffer.copy_of(projected, FLOAT), Buffer.copy_of(found, FLOAT), torch.tensor([ROWS])
    arguments = (
        rows, source.tensor, source.stride, made.tensor, made.stride, layers, width, weights, 0.125, 1e-2, 0.75,
    )  # fmt: skip
    machine.program([Call("layer_inputs", write_layer_inputs, arguments)]).run()
    normed = F.rms_norm(projected.view(ROWS, layers, width) * 0.125, (width,), weights, 1e-2)
    expected = (normed + found.view_as(normed)) * 0.75
    torch.testing.assert_close(made.tensor[:, : layers * width], expected.flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda element: element.name)
def test_gates_multiply_the_input_of_their_layer(machine: Machine, element: Element) -> None:
    width, layer = 48, 2
    gates, inputs = random(ROWS, width), random(ROWS, 4 * width, seed=1)
    source, of_layers, rows = Buffer.copy_of(gates, FLOAT), Buffer.copy_of(inputs, FLOAT), torch.tensor([ROWS])
    y = Buffer.of(ROWS, width, element)
    arguments = (
        rows, source.tensor, source.stride, of_layers.tensor[:, layer * width :], of_layers.stride, y.tensor, y.stride,
        width,
    )  # fmt: skip
    write = write_input_gates(ACTIVATIONS["gelu_tanh"], element)
    machine.program([Call(f"input_gates_gelu_tanh_{element.name}", write, arguments)]).run()
    expected = gelu_tanh(gates) * inputs[:, layer * width : (layer + 1) * width]
    near = 1e-5 if element is FLOAT else 1e-2
    torch.testing.assert_close(y.tensor[:, :width].float(), expected, atol=near, rtol=near)
