"""Products whose parts are in several layouts, and inputs that are ordered by activation, beside float64."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from model.cpu.group_order import in_order
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, ELEMENTS, FLOAT, Element
from model.cpu.kernels.prepared import NONE
from model.cpu.kernels.product import KernelLinear
from model.cpu.kernels.program import Machine
from model.cpu.weight_formats import group_weights
from model.layers import silu
from model.weight_formats.groups import GroupWeights, NotGrouped, bring_back
from model.weight_formats.levels import E2M1, INT4, INT6, INT8
from model.weight_formats.plain import PlainFormat, plain_weight
from model.weight_formats.stored import StoredWeight
from tests.model.cpu.kernels.test_group_linear import drawn


class Given(PlainFormat):
    """`GroupFormat` of weights that a test made; those that it does not know are plain."""

    name = "given"

    def __init__(self, known: Mapping[str, GroupWeights]) -> None:
        self._known = known

    def groups(self, weight: StoredWeight) -> GroupWeights:
        if weight.name not in self._known:
            raise NotGrouped("plain")
        return self._known[weight.name]


def product_of(
    machine: Machine, parts: list[GroupWeights | Tensor], element: Element, gated: bool = False
) -> KernelLinear:
    known = {str(i): part for i, part in enumerate(parts) if isinstance(part, GroupWeights)}
    weights = [plain_weight(weights_of(part), str(i)) for i, part in enumerate(parts)]
    made = group_weights(weights, element, Given(known), machine.compiler.has_pairs)
    return KernelLinear(machine, made, torch.arange(sum(weight.outputs for weight in weights)) / 8, gated)


def weights_of(part: GroupWeights | Tensor) -> Tensor:
    return bring_back(part) if isinstance(part, GroupWeights) else part


def near(machine: Machine, parts: list[GroupWeights | Tensor], element: Element, rows: int) -> None:
    product = product_of(machine, parts, element)
    weight = torch.cat([weights_of(part) for part in parts]).double()
    x = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, weight.shape[1]))).float()
    inputs = x.to(element.dtype).double()
    expected = inputs @ weight.T + torch.arange(len(weight)) / 8
    sizes = inputs.abs() @ (weight.abs() + 2).T
    assert ((product(x).double() - expected).abs() <= 2e-6 * sizes + 1e-6 * len(weight)).all()
    whole = product(x)
    assert torch.equal(product(x[-1:]), whole[-1:])  # a row's bits are its own


def shuffled(groups: GroupWeights, seed: int, cut: slice = slice(None)) -> GroupWeights:
    """Returns the same groups with inputs that are in any order, or some of them."""
    rng = np.random.default_rng(seed)
    index = torch.from_numpy(rng.permutation(np.arange(groups.values.shape[1]) // groups.size))[cut]
    return GroupWeights(
        groups.levels, groups.values[:, cut], groups.scales, groups.offsets, groups.size, index.to(torch.int64)
    )


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_parts_in_several_layouts(machine: Machine, element: Element) -> None:
    """Each keeps its own, plain ones too; neighbours that are alike are one."""
    four = [drawn(INT4, 64, 256, 32, torch.float16, torch.int8, seed) for seed in range(2)]
    six, plain = drawn(INT6, 32, 256, 16, torch.float16, None, blocks=16), torch.eye(40, 256).to(element.dtype).float()
    parts = [*four, six, plain]
    for rows in (1, 20):
        near(machine, parts, element, rows)
    apart = product_of(machine, parts, element)
    assert (
        apart.nbytes
        < product_of(machine, [*four, drawn(INT8, 32, 256, 16, torch.float32, None), plain], element).nbytes
    )


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_outputs_that_do_not_fill_a_panel(machine: Machine, element: Element) -> None:
    """The next part overwrites what fills the last panel up."""
    other = E2M1 if machine.compiler.has_pairs else INT8  # a codebook is refused on a CPU without
    parts: list[GroupWeights | Tensor] = [
        drawn(INT4, 40, 256, 32, torch.float16, None), drawn(other, 7, 256, 32, torch.float16, None), torch.eye(20, 256)
    ]  # fmt: skip
    for rows in (1, 20):
        near(machine, parts, element, rows)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
@pytest.mark.parametrize("half", [48, 40])
def test_gates_that_are_stored_in_another_way(machine: Machine, element: Element, half: int) -> None:
    gates, other = drawn(INT4, half, 256, 32, torch.float16, None), drawn(INT8, half, 256, 32, torch.float16, None, 1)
    product = product_of(machine, [gates, other], element, gated=True)
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(9, 256))).to(element.dtype).double()
    rows, y = torch.tensor([9]), Buffer.of(9, half, FLOAT)

    def room(_: str, width: int, element: Element) -> Buffer:
        return Buffer.of(9, width, element)

    source = Buffer.copy_of(x.float(), element)
    machine.program(product.calls(rows.data_ptr(), source, y, room, activation="silu")).run()
    bias = torch.arange(2 * half) / 8
    made = [x @ bring_back(one).double().T + part for one, part in zip((gates, other), bias.chunk(2), strict=True)]
    expected = silu(made[0]) * made[1]
    assert ((y.tensor[:, :half] - expected).abs() <= 1e-3 + 1e-4 * expected.abs()).all()


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
@pytest.mark.parametrize("cut", [slice(None), slice(0, 100), slice(96, 256)], ids=str)
def test_inputs_in_order_of_their_groups(machine: Machine, element: Element, cut: slice) -> None:
    """All of them, or those of a rank, whose groups have any sizes."""
    groups = shuffled(drawn(INT4, 70, 256, 64, torch.float16, torch.int8), 3, cut)
    for rows in (1, 20):
        near(machine, [groups], element, rows)
    near(
        machine, [shuffled(drawn(INT8, 64, 256, 64, torch.float16, None, 1), seed, cut) for seed in (5, 6)], element, 2
    )


def test_groups_are_filled_up_with_inputs_that_are_zero() -> None:
    groups = shuffled(drawn(INT4, 8, 256, 64, torch.float16, torch.int8), 3, slice(0, 100))
    made, places = in_order(groups)
    assert made.index is None
    assert made.values.shape[1] == len(places) == made.size * made.scales.shape[1]
    assert sorted(places[places != NONE].tolist()) == list(range(100))
    whole, index = in_order(shuffled(drawn(INT4, 8, 256, 64, torch.float16, None), 3))
    assert whole.size == 64
    assert NONE not in index


@pytest.mark.parametrize("fault", [1, -1])
def test_an_order_that_is_off_by_one_is_seen(machine: Machine, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.cpu.weight_formats.in_order", lambda groups: _rolled(groups, fault))
    with pytest.raises(AssertionError):
        near(machine, [shuffled(drawn(INT4, 64, 256, 64, torch.float16, None), 3)], BFLOAT, 2)


def _rolled(groups: GroupWeights, by: int) -> tuple[GroupWeights, Tensor]:
    made, places = in_order(groups)
    return made, places.roll(by)
