"""Sums in matrix registers: beside float64, with the bits of a row alone, wherever rows lie."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite.binding import FeatureMap, get_host_cpu_features
from torch import Tensor

from model.cpu.kernels import native, tiles
from model.cpu.kernels.element import BFLOAT, FLOAT
from model.cpu.kernels.linear import pack
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.panels import PANEL, Int8Panels, PlainPanels
from model.cpu.kernels.program import Machine
from model.cpu.kernels.sides import MOST_ROWS
from model.cpu.kernels.sums import sums_kernel
from model.cpu.kernels.team import Team
from model.cpu.kernels.tiles import STEPS
from tests.model.cpu.kernels import test_linear as linear
from tests.model.cpu.kernels.test_linear import each_kind, random

WIDTHS = (32, 256, 288, 1536)  # inputs: a tile, as many as are copied at once, and more
PLAIN = PlainPanels(BFLOAT)


@pytest.fixture(name="compiler", scope="module")
def compiler_with_tiles(machine: Machine) -> Compiler:
    if not machine.compiler.has_tiles:
        pytest.skip("this process has no matrix registers (AMX)")
    return machine.compiler


def sums_of(compiler: Compiler, places: list[int], x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sums [places, 32] of rows of x with one panel. places: the row of x that each is."""
    panels, steps = pack(weight, PLAIN), x.shape[1] // 2
    addresses = np.array([x.data_ptr() + row * x.stride(0) * 2 for row in places])
    sums = torch.full((MOST_ROWS, PANEL), torch.nan)
    arguments = np.array([addresses.ctypes.data, sums.data_ptr(), 0, steps, len(places), panels.data_ptr()])
    kernel = sums_kernel(PLAIN, steps, has_tiles=True)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(compiler.kernel(kernel.name, kernel.write))
    function(arguments.ctypes.data, 0, 1)
    return sums[: len(places)]


@pytest.mark.parametrize("inputs", WIDTHS)
@given(data=st.data())
def test_rows_may_lie_anywhere(compiler: Compiler, inputs: int, data: st.DataObject) -> None:
    """One after the other, in any order, at even distances or not; the sums of each are those of it alone."""
    x = random(MOST_ROWS * 4, inputs, seed=inputs).bfloat16()
    weight = (random(PANEL, inputs, seed=1) / inputs**0.5).bfloat16()
    count = data.draw(st.integers(1, MOST_ROWS))
    step = data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, 4 * MOST_ROWS - 1 - step * (count - 1)))
    even = [start + step * i for i in range(count)]
    places = data.draw(st.one_of(st.just(even), st.permutations(even), st.just([*even[:-1], 0])))
    found = sums_of(compiler, places, x, weight)
    np.testing.assert_allclose(found.double(), x[places].double() @ weight.double().T, atol=2e-5, rtol=1e-5)
    some = data.draw(st.integers(0, count - 1))
    assert torch.equal(found[some : some + 1], sums_of(compiler, places[some : some + 1], x, weight))


def test_rows_that_are_not_finite_stay_alone_in_their_tile(compiler: Compiler) -> None:
    x, weight = random(40, 64).bfloat16(), random(PANEL, 64, seed=1).bfloat16()
    before = sums_of(compiler, list(range(40)), x, weight)
    x[3], x[20, 5] = torch.nan, torch.inf
    found = sums_of(compiler, list(range(40)), x, weight)
    others = [row for row in range(40) if row not in (3, 20)]
    assert torch.equal(found[others], before[others])
    assert found[3].isnan().all()
    assert not found[20].isfinite().any()


def test_what_a_tile_had_before_is_in_no_sum(compiler: Compiler) -> None:
    """Rows of a tile beyond the last one keep the inputs of other rows."""
    x, weight = random(128, 64).bfloat16(), random(PANEL, 64, seed=1).bfloat16()
    x[64:] = torch.nan
    before = sums_of(compiler, [1, 0, 2], x, weight)
    sums_of(compiler, [127, *range(64, 127)], x, weight)
    assert torch.equal(sums_of(compiler, [1, 0, 2], x, weight), before)


@pytest.mark.usefixtures("compiler")
def test_a_stride_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: rows are taken to lie one after the other."""
    monkeypatch.setattr(tiles, "common_stride", lambda code, rows, count: code.integer(64 * 2))
    faulty, x, weight = Compiler(None), random(64, 64).bfloat16(), random(PANEL, 64, seed=1).bfloat16()
    places = list(range(0, 40, 2))
    expected = x[places].double() @ weight.double().T
    assert not torch.allclose(sums_of(faulty, places, x, weight).double(), expected, atol=1e-2)


def test_they_are_for_bfloat16_whose_panels_fill_them() -> None:
    def name(weights: PlainPanels | Int8Panels, steps: int, has_tiles: bool) -> str:
        return sums_kernel(weights, steps, has_tiles).name

    assert name(PLAIN, 2 * STEPS, has_tiles=True) == "sums_bf16_tiles"
    assert name(PLAIN, 2 * STEPS, has_tiles=False) == "sums_bf16"
    assert name(PLAIN, 2 * STEPS + 1, has_tiles=True) == "sums_bf16"
    assert name(PlainPanels(FLOAT), 2 * STEPS, has_tiles=True) == "sums_f32"
    assert name(Int8Panels(BFLOAT), 2 * STEPS, has_tiles=True) == "sums_int8_bf16"


def test_a_process_that_may_not_use_them_has_other_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    features = get_host_cpu_features() | {"amx-tile": True, "amx-bf16": True}
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap(features))
    made = dict[bool, str]()
    for granted in (False, True):
        monkeypatch.setattr(native, "may_use_tiles", lambda granted=granted: granted)
        compiler = Compiler(None)
        assert compiler.has_tiles == granted
        made[granted] = compiler.made_from
    assert made[False] != made[True]


@pytest.mark.usefixtures("compiler")
@each_kind
def test_without_them(quantized: bool) -> None:
    """The same CPU with vectors alone, as where Linux does not grant tiles."""
    machine = Machine(Compiler(None), Team())
    machine.compiler.has_tiles = False
    linear.test_equals_the_product(machine, BFLOAT, quantized, 576, 70, bias=True)
    linear.test_endings(machine, BFLOAT, "silu", gated=True, bias=False, quantized=quantized)
    linear.test_bits_of_a_row_are_its_own(machine, BFLOAT, quantized, 64)
