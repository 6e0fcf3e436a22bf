"""Products with weights in groups, beside float64; the bits of a row whatever stands beside it; planted faults."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llvmlite.binding import FeatureMap, get_host_cpu_features
from torch import Tensor

from model.cpu.kernels import group_panels, group_sums, group_words
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.group_panels import Factors, FactorTypes, GroupPanels, PanelGroups, panels_of
from model.cpu.kernels.group_words import GroupWords, can_decode
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.product import KernelGroups, KernelLinear
from model.cpu.kernels.program import Machine
from model.cpu.kernels.team import Team
from model.weight_formats.groups import GroupBlocks, GroupWeights, bring_back
from model.weight_formats.levels import E2M1, E4M3, INT3, INT4, INT5, INT6, INT8, UINT2, UINT4, UINT5, Levels
from tests.support.examples import examples
from tests.support.kernels import the_machine
from tests.support.planted import plant

ROWS = (1, 2, 7, 8, 9, 19, 140)
KINDS = (UINT2, INT3, INT4, UINT5, INT6, INT8, E2M1, E4M3)


def drawn(
    levels: Levels,
    out: int,
    width: int,
    size: int,
    scales: torch.dtype,
    offsets: torch.dtype | None,
    seed: int = 0,
    blocks: int = 0,
) -> GroupWeights:
    """Draws weights. Integer dtypes are multiples: of the scales, or of the numbers of `blocks` groups each."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(0, len(levels.numbers), (out, width)).astype(np.uint8))
    if levels is E4M3:
        values[(values & 127) == 127] = 0  # NaN
    groups = -(-width // size)

    def numbers(low: float, high: float, dtype: torch.dtype, count: int) -> Tensor:
        if not dtype.is_floating_point:
            return torch.from_numpy(rng.integers(-9, 64, (out, count))).to(dtype)
        return torch.from_numpy(rng.uniform(low, high, (out, count))).to(dtype)

    scale = numbers(0.01, 0.1, torch.int8 if blocks else scales, groups)
    offset = None if offsets is None else numbers(-1, 1, torch.int8 if blocks else offsets, groups)
    if not blocks:
        return GroupWeights(levels, values, scale, offset, size)
    count = groups // blocks
    of_blocks = None if offsets is None else numbers(-0.1, 0.1, scales, count)
    return GroupWeights(
        levels, values, scale, offset, size, blocks=GroupBlocks(numbers(0.001, 0.01, scales, count), of_blocks, blocks)
    )


def skip_without_pairs(machine: Machine, levels: Levels) -> None:
    """Skips a codebook on a CPU without AVX512-BF16, where `can_decode` refuses it."""
    if levels == E2M1 and not machine.compiler.has_pairs:
        pytest.skip("this CPU has no product of bfloat16 pairs")


def product_of(machine: Machine, groups: GroupWeights, element: Element, gated: bool = False) -> KernelLinear:
    panels = panels_of(groups, element)
    assert panels is not None
    return KernelLinear(machine, [KernelGroups(panels, groups)], gated=gated)


def near(machine: Machine, groups: GroupWeights, element: Element, rows: int) -> None:
    x = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, groups.values.shape[1]))).float()
    weight = bring_back(groups).double()
    expected = x.to(element.dtype).double() @ weight.T
    # Rounding of float32, of sums that are as large as the sums of sizes.
    sizes = x.abs().double() @ (weight.abs() + 2).T
    found = product_of(machine, groups, element)(x).double()
    assert ((found - expected).abs() <= 2e-6 * sizes + 1e-6).all()


@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
@pytest.mark.parametrize(
    ("element", "size", "offsets"),
    [
        (BFLOAT, 32, torch.float16),
        *(
            pytest.param(element, size, offsets, marks=pytest.mark.slow)
            for element, size, offsets in product((FLOAT, BFLOAT), (32, 4096), (None, torch.float16))
            if (element, size, offsets) != (BFLOAT, 32, torch.float16)
        ),
    ],
)
def test_equals_the_product_of_what_the_groups_stand_for(
    machine: Machine, element: Element, levels: Levels, size: int, offsets: torch.dtype | None
) -> None:
    skip_without_pairs(machine, levels)
    groups = drawn(levels, 70, 512, size, torch.float16, offsets)
    for rows in ROWS:
        near(machine, groups, element, rows)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([FLOAT, BFLOAT]),
    st.sampled_from(KINDS),
    st.integers(1, 100),
    st.sampled_from([(32, 3), (16, 5), (8, 9), (64, 4), (128, 3), (200, 2), (512, 1), (24, 1)]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int16]),
    st.sampled_from(ROWS),
    st.integers(0, 2**16),
)
def test_any_shape(
    element: Element,
    levels: Levels,
    out: int,
    shape: tuple[int, int],
    scales: torch.dtype,
    offsets: torch.dtype | None,
    rows: int,
    seed: int,
) -> None:
    size, count = shape
    assume(levels != E2M1 or the_machine().compiler.has_pairs)
    if size % GroupWords(element, levels).inputs == 0:
        near(the_machine(), drawn(levels, out, size * count, size, scales, offsets, seed), element, rows)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([FLOAT, BFLOAT]),
    st.sampled_from([UINT2, INT3, INT4, UINT4, UINT5, INT6]),
    st.integers(1, 100),
    st.sampled_from([(16, 16, 1), (32, 8, 2), (32, 4, 3)]),
    st.sampled_from([None, torch.float16]),
    st.sampled_from(ROWS),
    st.integers(0, 2**16),
)
def test_any_blocks(
    element: Element,
    levels: Levels,
    out: int,
    shape: tuple[int, int, int],
    offsets: torch.dtype | None,
    rows: int,
    seed: int,
) -> None:
    size, together, count = shape
    if size % GroupWords(element, levels).inputs == 0:
        width = size * together * count
        near(the_machine(), drawn(levels, out, width, size, torch.float16, offsets, seed, together), element, rows)


@pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda e: e.name)
@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
@pytest.mark.parametrize("offsets", [None, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 4096])
def test_bits_of_a_row_are_its_own(
    machine: Machine, element: Element, levels: Levels, offsets: torch.dtype | None, width: int
) -> None:
    """In any number of rows, at any place, with any number of threads, cut into blocks or not."""
    product = product_of(machine, drawn(levels, 160, width, 32, torch.float16, offsets), element)
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(140, width))).float()
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


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.slow
def test_other_cpus_have_the_numbers_too(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a product of pairs, and without registers of 512 bits."""
    if cpu == "x86-64-v4" and not get_host_cpu_features().get("avx512f"):
        pytest.skip("this machine is older itself: it has no registers of 512 bits")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap({}))
    machine = Machine(Compiler(None), Team())
    for levels in (UINT2, INT3, INT4, UINT4, INT5, INT6, INT8, E4M3):
        assert can_decode(levels, has_pairs=False)
        for element in (FLOAT, BFLOAT):
            groups = drawn(levels, 40, 96, 32, torch.float16, torch.float16)
            near(machine, groups, element, 1)
            near(machine, groups, element, 19)


def test_levels_that_need_a_table_need_wide_registers() -> None:
    assert not can_decode(E2M1, has_pairs=False)
    assert can_decode(E2M1, has_pairs=True)


@pytest.mark.parametrize(
    ("width", "size", "element", "expected"),
    [
        (512, 32, BFLOAT, 32),
        (512, 512, BFLOAT, 256),
        (576, 4096, BFLOAT, 192),  # one group, whose parts are equal
        (96, 32, FLOAT, 32),
        (100, 32, BFLOAT, None),  # the last group is smaller
        (28, 4, BFLOAT, None),  # too small
        (40, 20, FLOAT, None),  # eight are decoded at once
    ],
)
def test_inputs_of_a_run(width: int, size: int, element: Element, expected: int | None) -> None:
    panels = panels_of(drawn(INT4, 1, width, size, torch.float16, None), element)
    assert (panels.inputs if panels else None) == expected


def test_groups_of_a_block_that_is_cut_have_no_kernel() -> None:
    assert panels_of(drawn(INT4, 1, 256, 32, torch.float16, None, blocks=8), BFLOAT) is not None
    groups = drawn(INT4, 1, 256, 32, torch.float16, None, blocks=4)
    assert groups.blocks is not None
    assert panels_of(replace(groups, blocks=replace(groups.blocks, groups=3)), BFLOAT) is None


Right = Callable[..., Any]


def other_half(load: Right) -> Right:
    def other(*given: object) -> Factors:
        made = load(*given)
        return replace(made, scales=made.scales[::-1])

    return other


def swapped(laid: Right) -> Right:
    def other(*given: object) -> Tensor:
        made = laid(*given)
        return made << 4 | made >> 4

    return other


def shifted(heads: Right) -> Right:
    return lambda *given: heads(*given).roll(1, 1)


def without_offsets(of_run: Right) -> Right:
    return lambda *given: replace(of_run(*given), offsets=None)


def without_block(of_run: Right) -> Right:
    return lambda of, code, run, _: of_run(of, code, run, None)


def of_other_half(joined: Right) -> Right:
    def other(code: Any, address: Any, half: int) -> Any:
        return [
            own & group_words.LOWER_PLANE | wrong & ~group_words.LOWER_PLANE
            for own, wrong in zip(joined(code, address, half), joined(code, address, 1 - half), strict=True)
        ]

    return other


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scales of other outputs": lambda patch: plant(patch, FactorTypes, "load", other_half),
    "nibbles in another order": lambda patch: plant(patch, GroupWords, "laid", swapped),
    "scales of the neighbouring group": lambda patch: plant(patch, group_panels, "_beside", shifted),
    "offsets left out": lambda patch: plant(patch, GroupPanels, "of_run", without_offsets),
    "the scale of a block left out": lambda patch: plant(patch, GroupPanels, "of_run", without_block),
    "a zero point off by one": lambda patch: patch.setattr(
        GroupPanels, "laid", lambda of, groups: REAL_LAID(of, replace(groups, values=(groups.values + 1) & 15))
    ),
    "upper bits of the neighbouring input": lambda patch: patch.setattr(group_words, "SHIFTS_UP", 3),
    "third bits of the other outputs": lambda patch: plant(patch, group_words, "_joined_planes", of_other_half),
    "sums of the first row's inputs for all": lambda patch: patch.setattr(group_sums, "MOST_RUNS", 0),
}
REAL_LAID: Callable[[GroupPanels, PanelGroups], Tensor] = GroupPanels.laid


def near_both(machine: Machine, *weights: GroupWeights) -> None:
    for groups in weights:
        near(machine, groups, FLOAT, 9)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_harness_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Compiler(None), Team())  # compiles anew
    FAULTS[fault](monkeypatch)
    four = drawn(INT4, 64, 256, 32, torch.float16, torch.float16)
    five = drawn(UINT5, 64, 256, 32, torch.float16, torch.float16, blocks=8)
    three = drawn(INT3, 64, 256, 16, torch.float16, None, blocks=16)
    with pytest.raises(AssertionError):
        near_both(machine, four, five, three)
