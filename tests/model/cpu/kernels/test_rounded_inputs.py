"""Products whose rows are rounded to 8 bits (W8A8, FP8), beside float64: integers exactly, floats as groups."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.cpu.kernels import linear, prepared
from model.cpu.kernels.element import ELEMENTS, FLOAT, Element
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.cpu.kernels.program import Machine
from model.cpu.kernels.team import Team
from model.cpu.weight_formats import rounded_weights
from model.weight_formats.activations import RoundedFormat, RowRounding
from model.weight_formats.groups import GroupWeights, bring_back
from model.weight_formats.levels import E4M3, INT4, INT8
from model.weight_formats.plain import plain_weight
from tests.model.cpu.kernels.test_group_linear import drawn
from tests.model.cpu.kernels.test_mixed_products import Given
from tests.support.planted import plant

ROWS = (1, 8, 9, 70)
each_element = pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)


class Rounded(RoundedFormat):
    """Rounds the rows of products with weights that a test made."""

    def __init__(self, groups: GroupWeights, rounding: RowRounding) -> None:
        self.weights = Given({"": groups})
        self.name, self._rounding, self._scale_key = "rounded", rounding, "" if rounding.scale else None

    def _rounding_of(self, weight: object) -> RowRounding:
        return self._rounding


def product_of(machine: Machine, groups: GroupWeights, rounding: RowRounding, element: Element) -> KernelLinear:
    weights, form = [plain_weight(bring_back(groups))], Rounded(groups, rounding)
    return KernelLinear(machine, rounded_weights(weights, element, form, machine.compiler))


def inputs(rows: int, width: int, element: Element) -> Tensor:
    """Returns rows, one of them zeros."""
    x = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, width))).to(element.dtype).float()
    x[rows // 2] *= rows == 1
    return x


def near(machine: Machine, groups: GroupWeights, rounding: RowRounding, element: Element, rows: int) -> None:
    """Integers are multiplied exactly, where the CPU can; others are rounded to the element once more."""
    x, weight = inputs(rows, groups.values.shape[1], element), bring_back(groups).double()
    rounded = rounding(x)
    if rounding.floating or groups.scales.shape[1] > 1 or not machine.compiler.has_octets:
        rounded = rounded.to(element.dtype)
    rounded = rounded.double()
    product = product_of(machine, groups, rounding, element)
    found = product(x)
    sizes = rounded.abs() @ (weight.abs() + 2).T
    assert ((found.double() - rounded @ weight.T).abs() <= 2e-6 * sizes + 1e-6).all()
    for row in range(0, rows, 7):
        assert torch.equal(product(x[row : row + 1]), found[row : row + 1])  # a row's bits are its own


@each_element
@pytest.mark.parametrize("scale", [None, 0.01], ids=["dynamic", "static"])
def test_integers(machine: Machine, element: Element, scale: float | None) -> None:
    groups = drawn(INT8, 70, 576, 576, torch.float32, None)
    for rows in ROWS:
        near(machine, groups, RowRounding(False, scale=scale), element, rows)


@each_element
@pytest.mark.parametrize("scale", [None, 0.01], ids=["dynamic", "static"])
def test_floats(machine: Machine, element: Element, scale: float | None) -> None:
    groups = drawn(E4M3, 70, 256, 256, torch.float32, None)
    for rows in (1, 9):
        near(machine, groups, RowRounding(True, scale=scale), element, rows)


def test_integers_that_have_several_scales(machine: Machine) -> None:
    for levels in (INT4, INT8):
        near(machine, drawn(levels, 40, 256, 32, torch.float32, None), RowRounding(False), FLOAT, 3)


def test_a_row_that_is_no_number_stays_one_and_alone(machine: Machine) -> None:
    for levels, floating in ((INT8, False), (E4M3, True)):
        for scale in (None, 0.5):
            product = product_of(
                machine, drawn(levels, 32, 64, 64, torch.float32, None), RowRounding(floating, scale=scale), FLOAT
            )
            x = inputs(3, 64, FLOAT)
            whole, x[1, 5] = product(x), torch.nan
            found = product(x)
            assert not found[1].isfinite().any()
            assert torch.equal(found[::2], whole[::2])


def test_what_has_no_kernel(machine: Machine) -> None:
    eight = drawn(INT8, 32, 64, 64, torch.float32, None)
    with pytest.raises(NotCompiled, match="several scales"):
        product_of(machine, eight, RowRounding(False, size=32), FLOAT)
    with pytest.raises(NotCompiled, match="no multiple of 16"):
        product_of(machine, drawn(INT8, 32, 40, 40, torch.float32, None), RowRounding(False), FLOAT)


Right = Callable[..., Any]


def with_other_zeros(of_octets: Right) -> Right:
    return lambda code, sums, row, panel: of_octets(code, sums, row, replace(panel, zeros=panel.scales))


def with_the_next_scale(of_octets: Right) -> Right:
    return lambda code, sums, row, panel: of_octets(code, sums, row + 640, panel)


@pytest.mark.parametrize("fault", ["zeros", "another row's scale", "an octet off by one"])
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Compiler(None), Team())  # compiles anew
    if not machine.compiler.has_octets:
        pytest.skip("this CPU has no product of octets")
    if fault == "zeros":
        plant(monkeypatch, linear, "_of_octets", with_other_zeros)
    elif fault == "another row's scale":
        plant(monkeypatch, linear, "_of_octets", with_the_next_scale)
    else:
        monkeypatch.setattr(prepared, "ZERO", 127)
    with pytest.raises(AssertionError):
        near(machine, drawn(INT8, 70, 576, 576, torch.float32, None), RowRounding(False), FLOAT, 9)
