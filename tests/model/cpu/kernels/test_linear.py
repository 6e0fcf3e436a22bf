"""Products beside float64, for any shape and ending; the bits of a row whatever stands beside it."""

from itertools import product as product_of
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llvmlite.binding import FeatureMap, get_host_cpu_features
from torch import Tensor

from model import layers
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.product import KernelLinear
from model.cpu.kernels.program import Machine
from model.cpu.kernels.sides import TILE
from model.cpu.kernels.team import Team
from model.cpu.known_parts import ACTIVATIONS
from model.weight_formats.int8 import quantize
from tests.model.cpu.kernels.test_rows import test_rounded_to_the_even_one
from tests.support.kernels import kernel_linear

ELEMENTS = (FLOAT, BFLOAT)
TOLERANCE = {FLOAT: 2e-5, BFLOAT: 2e-2}
ROWS = (1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE + 3, 300)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def run(machine: Machine, product: KernelLinear, x: Tensor, element: Element, y: Buffer, **ending: object) -> None:
    rows = np.array([len(x)])
    machine.program(product.calls(rows.ctypes.data, Buffer.copy_of(x, element), y, lambda *_: y, **ending)).run()


def meant(weight: Tensor, element: Element, quantized: bool) -> Tensor:
    """Returns the weights that a product stands for, in float64."""
    if not quantized:
        return weight.to(element.dtype).double()
    values, scales = quantize(weight)
    return values.double() * scales[:, None]


each_kind = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@each_kind
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 32), (100, 33), (576, 70), (1536, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_product(
    machine: Machine, element: Element, quantized: bool, inputs: int, outputs: int, bias: bool
) -> None:
    weight, given = random(outputs, inputs) / inputs**0.5, random(outputs, seed=1) if bias else None
    parts = weight.split(max(1, outputs // 2))
    product = kernel_linear(machine, parts, given, element, quantized=quantized)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows)
        expected = x.to(element.dtype).double() @ meant(weight, element, quantized).T
        expected = expected if given is None else expected + given
        found = product(x)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.double(), expected, atol=2e-5, rtol=1e-5)


def endings() -> list[Any]:
    """Each combination, which is a kernel of its own.

    Those that are not slow have each activation with each value of the others, and each pair of the others.
    """
    found = []
    for number, activation in enumerate((None, *ACTIVATIONS.values())):
        for element, gated, bias, quantized in product_of(ELEMENTS, (False, True), (False, True), (False, True)):
            chosen = (bias ^ quantized, (element is BFLOAT) ^ gated) == (bool(number & 1), bool(number & 2))
            words = (element.name, activation, gated and "gated", bias and "bias", "int8" if quantized else "plain")
            found.append(
                pytest.param(
                    element, activation, gated, bias, quantized,
                    id="-".join(word for word in words if word), marks=[] if chosen else [pytest.mark.slow],
                )
            )  # fmt: skip
    return found


@pytest.mark.parametrize(("element", "activation", "gated", "bias", "quantized"), endings())
def test_endings(
    machine: Machine, element: Element, activation: str | None, gated: bool, bias: bool, quantized: bool
) -> None:
    """Activations, gates and biases of the sums, beside torch in float64."""
    functions = {name: function for function, name in ACTIVATIONS.items()}
    weight, given = random(96, 64) / 4, random(96, seed=1) if bias else None
    product = kernel_linear(machine, [weight], given, element, gated, quantized)
    x = random(11, 64, seed=2)
    y = Buffer.of(len(x), 96, element)
    run(machine, product, x, element, y, activation=activation)
    sums = x.to(element.dtype).double() @ meant(weight, element, quantized).T
    sums = sums if given is None else sums + given
    first, second = sums.chunk(2, 1) if gated else (sums, torch.ones(()))
    expected = (first if activation is None else functions[activation](first)) * second
    found = y.tensor[: len(x), : expected.shape[1]].double()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[element], rtol=TOLERANCE[element] / 2)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_what_stands_there_is_added_to(machine: Machine, element: Element) -> None:
    product, x, before = kernel_linear(machine, [random(64, 32)], None, element), random(5, 32), random(5, 64)
    y = Buffer.copy_of(before, FLOAT)
    run(machine, product, x, element, y, add=True)
    np.testing.assert_allclose(y.tensor[:5], before + product(x), atol=1e-5)
    assert not y.tensor[5:].any()


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@each_kind
@pytest.mark.parametrize("inputs", [64, 4096])
def test_bits_of_a_row_are_its_own(machine: Machine, element: Element, quantized: bool, inputs: int) -> None:
    """In any number of rows, at any place, with any number of threads, cut into blocks or not."""
    product = kernel_linear(machine, [random(160, inputs)], None, element, quantized=quantized)
    x = random(140, inputs, seed=3)
    whole = product(x)
    for start, end in ((0, 1), (139, 140), (7, 9), (60, 68), (60, 69), (20, 137)):
        assert torch.equal(product(x[start:end]), whole[start:end])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            assert torch.equal(product(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_rows_that_are_not_finite_stay_alone(machine: Machine) -> None:
    product, x = kernel_linear(machine, [random(64, 64)], None, FLOAT), random(20, 64)
    whole, x[3] = product(x), torch.nan
    found = product(x)
    assert found[3].isnan().all()
    assert torch.equal(found[4:], whole[4:])
    assert torch.equal(found[:3], whole[:3])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_integers_of_8_bits_are_exact(machine: Machine, element: Element) -> None:
    """All of them, each multiplied with 1 alone; a scale that is no number of the element is not rounded."""
    values = torch.arange(-127, 128).float()
    weight = torch.stack((values, values * 0.3, torch.zeros(255), values))
    weight[3, 0] = torch.inf
    product = kernel_linear(machine, [F.pad(weight, (0, 1))], None, element, quantized=True)
    found = product(torch.eye(256))[:255].T
    assert torch.equal(found[0], values)
    assert torch.equal(found[1], values * (weight[1].abs().amax() / 127))
    assert not found[2].any()
    assert not found[3].isfinite().any()


def test_weights_of_8_bits_take_a_half(machine: Machine) -> None:
    plain, quantized = (kernel_linear(machine, [random(64, 512)], None, BFLOAT, quantized=q) for q in (False, True))
    assert (plain.nbytes, quantized.nbytes) == (64 * 512 * 2, 64 * 512 + 64 * 4)


def test_functions_are_those_of_torch() -> None:
    assert set(ACTIVATIONS) == set(layers.ACTIVATIONS.values())


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.slow
def test_older_cpus(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a product of bfloat16 pairs, without registers of 512 bits."""
    if cpu == "x86-64-v4" and not get_host_cpu_features().get("avx512f"):
        pytest.skip("this machine is older itself: it has no registers of 512 bits")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap({}))
    machine = Machine(Compiler(None), Team())
    assert not machine.compiler.has_pairs
    for quantized in (False, True):
        test_equals_the_product(machine, BFLOAT, quantized, 576, 70, bias=True)
        test_endings(machine, BFLOAT, "silu", gated=True, bias=False, quantized=quantized)
        test_bits_of_a_row_are_its_own(machine, BFLOAT, quantized, 64)
    test_rounded_to_the_even_one(machine)
