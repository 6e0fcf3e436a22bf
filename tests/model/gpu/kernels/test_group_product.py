"""Products with weights in groups, beside float64; planted faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.gpu import group_linear
from model.gpu.group_linear import MOST_ROWS, GroupNumbers, GroupProduct, PackedGroups, pack_steps, unpack_steps
from model.weight_formats.groups import GroupFormat, GroupWeights, bring_back
from model.weight_formats.int8 import Int8Format, quantize
from model.weight_formats.levels import E2M1, E4M3, INT4, INT8, UINT4, Levels
from model.weight_formats.plain import PlainFormat, plain_weight
from model.weight_formats.scratch import Scratch
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED, compute_in

NF4 = Levels(
    "nf4",
    (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
     0.723, 1.0),
)  # fmt: skip
KINDS = (INT4, INT8, E2M1, E4M3, NF4)
DTYPES = [getattr(torch, compute_in(name)) for name in ("float32", "float16", "bfloat16")]
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Drawn(PlainFormat):
    """`GroupFormat` of weights that are groups already."""

    name = "drawn"

    def __init__(self, levels: Levels, size: int) -> None:
        self._levels, self._size = levels, size

    def groups(self, weight: StoredWeight) -> GroupWeights:
        made = weight.tensors
        return GroupWeights(
            self._levels, made["values"], made["scales"], made.get("offsets"), self._size, made.get("index")
        )


def drawn(
    levels: Levels,
    out: int,
    width: int,
    size: int,
    offsets: bool,
    seed: int = 0,
    indexed: bool = False,
    kinds: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float16),
) -> tuple[Drawn, StoredWeight]:
    """size: -1 for one group. kinds: dtypes of scales and offsets."""
    rng = np.random.default_rng(seed)
    size = width if size < 0 else size
    groups = -(-width // size)
    values = torch.from_numpy(rng.integers(0, len(levels.numbers), (out, width)).astype(np.uint8))
    if levels is E4M3:
        values[(values & 127) == 127] = 0  # NaN
    tensors = {"values": values, "scales": torch.from_numpy(rng.uniform(0.01, 0.1, (out, groups))).to(kinds[0])}
    if offsets:
        tensors["offsets"] = torch.from_numpy(rng.normal(size=(out, groups))).to(kinds[1])
    if indexed:
        tensors["index"] = torch.from_numpy(rng.permutation(width) // size)
    described = [
        StoredTensor(key, tuple(tensor.shape), rows=None if key == "index" else Axis(0))
        for key, tensor in tensors.items()
    ]
    return Drawn(levels, size), StoredWeight("drawn", out, width, described, tensors)


def product_of(
    form: GroupFormat, weights: Sequence[StoredWeight], dtype: torch.dtype, bias: Tensor | None = None
) -> GroupProduct:
    return GroupProduct(form, weights, bias, dtype, Scratch(dtype, DEVICE), DEVICE)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def near(
    form: GroupFormat, weights: Sequence[StoredWeight], dtype: torch.dtype, rows: int, biased: bool = False
) -> None:
    """The weights are rounded once or not at all, and so is the result; the rest is the rounding of sums in float32."""
    x = numbers(rows, weights[0].inputs, seed=rows).to(dtype)
    product = product_of(form, weights, dtype)
    few = rows <= MOST_ROWS
    exact = few and all(part.has_lines for part in product.parts)
    weight = torch.cat([bring_back(form.groups(one)) for one in weights]).to(torch.float32 if exact else dtype).double()
    bias = numbers(len(weight), seed=1).to(dtype) if biased else None
    expected = x.double() @ weight.T + (0.0 if bias is None else bias.double())
    found = product_of(form, weights, dtype, None if bias is None else bias.to(DEVICE))(x.to(DEVICE))
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    sizes = x.double().abs() @ weight.abs().T
    allowed = 2e-6 * sizes + ROUNDING[dtype] * expected.abs() + 1e-6
    if not few and not INTERPRETED:
        allowed += ROUNDING[dtype] / 8 * sizes  # torch may divide a sum, and round each part
    assert ((found.cpu().double() - expected).abs() <= allowed).all()


class Launches:
    """Takes the place of kernels, and counts how often they are launched."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, kernel: Any) -> Any:
        return Counted(self, kernel)


@dataclass(frozen=True)
class Counted:
    launches: Launches
    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches.count += 1
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counting = Launches()
    for name in ("multiply_groups", "multiply_lines"):
        monkeypatch.setattr(group_linear, name, counting.of(getattr(group_linear, name)))
    return counting


@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize("size", [16, 32, 64, 128, -1])
def test_equals_the_product_of_what_the_groups_stand_for(levels: Levels, offsets: bool, size: int) -> None:
    """The last group is smaller for most sizes, and the last step is."""
    form, weight = drawn(levels, 37, 176, size, offsets)
    near(form, [weight], DTYPES[1], 3, biased=offsets)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
def test_dtypes_of_activations(dtype: torch.dtype, levels: Levels) -> None:
    form, weight = drawn(levels, 33, 130, 32, True)
    near(form, [weight], dtype, 2, biased=True)


@pytest.mark.parametrize(
    ("out", "width", "size"), [(1, 1, 1), (32, 128, 64), (33, 256, 16), (65, 63, 8), (5, 200, 24), (70, 129, 100)]
)
@pytest.mark.parametrize("levels", [INT4, INT8], ids=lambda levels: levels.name)
def test_odd_sizes(levels: Levels, out: int, width: int, size: int) -> None:
    form, weight = drawn(levels, out, width, size, True)
    near(form, [weight], DTYPES[1], 5)


@pytest.mark.parametrize("scales", group_linear.KINDS, ids=str)
@pytest.mark.parametrize("offsets", group_linear.KINDS, ids=str)
def test_dtypes_of_scales(scales: torch.dtype, offsets: torch.dtype) -> None:
    form, weight = drawn(INT4, 40, 128, 16, True, kinds=(scales, offsets))
    near(form, [weight], DTYPES[1], 2)


@pytest.mark.parametrize("levels", [INT4, INT8, E4M3], ids=lambda levels: levels.name)
def test_groups_that_are_not_runs(levels: Levels, launches: Launches) -> None:
    """Two linears, each with an order of its own."""
    form, first = drawn(levels, 20, 144, 32, True, seed=1, indexed=True)
    _, second = drawn(levels, 35, 144, 32, True, seed=2, indexed=True)
    near(form, [first, second], DTYPES[1], 3, biased=True)
    assert launches.count == 2


@pytest.mark.parametrize("rows", [1, 16, 17, MOST_ROWS, MOST_ROWS + 1])
def test_linears_that_are_one_product(rows: int, launches: Launches) -> None:
    """One launch makes it, in several tiles of rows, or torch does, block by block."""
    form, first = drawn(INT4, 150, 96, 32, True, seed=1)
    others = [drawn(INT4, out, 96, 32, True, seed=out)[1] for out in (8, 9)]
    near(form, [first, *others], torch.float32, rows, biased=True)
    assert launches.count == (rows <= MOST_ROWS)


@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
@pytest.mark.parametrize("indexed", [False, True], ids=["runs", "indexed"])
def test_many_rows(levels: Levels, indexed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks."""
    monkeypatch.setattr(group_linear, "unpacked_outputs", lambda _: 128)
    form, weight = drawn(levels, 300, 80, 16, True, indexed=indexed)
    near(form, [weight], torch.float32, MOST_ROWS + 6, biased=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("levels", KINDS, ids=lambda levels: levels.name)
@pytest.mark.parametrize(
    ("out", "width", "size", "offsets", "indexed"),
    [(37, 176, 16, True, False), (70, 80, -1, False, False), (33, 130, 24, True, True), (64, 128, 64, False, False)],
)
def test_unpacked_weights_are_those_that_groups_stand_for(
    dtype: torch.dtype, levels: Levels, out: int, width: int, size: int, offsets: bool, indexed: bool
) -> None:
    """To the bit, but for bfloat16 in the interpreter, which cuts bits off, and for GPUs that round a product and a sum
    once.
    """
    form, weight = drawn(levels, out, width, size, offsets, indexed=indexed)
    scratch = Scratch(dtype, DEVICE)
    product = GroupProduct(form, [weight], None, dtype, scratch, DEVICE)
    room, (part,) = scratch.shaped(torch.Size((out * width,))), product.parts
    expected = bring_back(form.groups(weight)).to(dtype)
    allowed = 0.0 if INTERPRETED and dtype != torch.bfloat16 else ROUNDING[dtype]
    for block in (slice(0, out), slice(out // 3, out // 2), slice(out - 1, out)):
        room.fill_(torch.nan)
        found = product.unpack(part, block).cpu()
        assert found.shape == (block.stop - block.start, width)
        torch.testing.assert_close(found, expected[block], rtol=allowed, atol=allowed)
        assert room[found.numel() :].isnan().all(), "weights of other outputs are written too"


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        *((dtype, rows) for dtype in sorted(set(DTYPES), key=str) for rows in (1, 17, MOST_ROWS)),
        (DTYPES[2], MOST_ROWS + 9),
    ],
    ids=str,
)
def test_quantization_int8(dtype: torch.dtype, rows: int, launches: Launches) -> None:
    """Two linears of one product, whose rows differ in size by orders of magnitude, as their scales must."""
    plain = [numbers(out, 200, seed=out) * numbers(out, 1, seed=1).mul(3).exp() for out in (40, 23)]
    plain[0][7] = 0.0
    weights = [plain_weight(one) for one in plain]
    near(Int8Format(), weights, dtype, rows, biased=True)
    assert launches.count == (rows <= MOST_ROWS)
    for one, stated in zip(plain, weights, strict=True):
        values, scales = quantize(one)
        assert torch.equal(bring_back(Int8Format().groups(stated)), values.float() * scales[:, None])


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("width", [96, 64 * 9])
def test_bits_of_a_row_are_its_own(width: int) -> None:
    """As groups, and as lines, of which a program has 16, 32 or 64 rows."""
    form, weight = drawn(INT4, 40, width, 32, True)
    product, x = product_of(form, [weight], DTYPES[1]), numbers(MOST_ROWS, width).to(DTYPES[1]).to(DEVICE)
    assert product.parts[0].has_lines == (width > 96)
    whole = product(x)
    for start, end in ((0, 1), (15, 17), (60, 64), (20, 61)):
        assert torch.equal(product(x[start:end]), whole[start:end])
    assert product(x[:0]).shape == (0, 40)


def test_what_is_not_a_number_stays_so() -> None:
    form, weight = drawn(E4M3, 2, 64, 32, False)
    weight.tensors["values"][1, 5] = 255
    found = product_of(form, [weight], DTYPES[1])(numbers(1, 64).to(DTYPES[1]).to(DEVICE))
    assert found.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("width", [1, 64, 130])
def test_packing_loses_nothing(bits: int, step: int, width: int) -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 2**bits, (7, width)).astype(np.uint8))
    packed = pack_steps(values, bits, step)
    assert packed.shape == (-(-width // step), 7, step * bits // 8)
    assert torch.equal(unpack_steps(packed, bits, width), values)


def test_memory_is_what_is_stored() -> None:
    form, weight = drawn(INT4, 64, 256, 32, True)
    assert product_of(form, [weight], DTYPES[1]).nbytes == 64 * 256 // 2 + 2 * 2 * 64 * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_packing_of_scales_loses_nothing(dtype: torch.dtype, groups: int) -> None:
    scales = numbers(6, groups).to(dtype)
    made = GroupNumbers.empty(scales, 9, torch.device("cpu"))
    made.put(scales, slice(2, 8))
    assert torch.equal(made.unpacked(slice(2, 8)), scales)


def swapped(values: Tensor, bits: int, step: int) -> Tensor:
    made = pack_steps(values, bits, step)
    return made << 4 | made >> 4


def put_with(change: Callable[[GroupWeights], GroupWeights]) -> Callable[[PackedGroups, GroupWeights, int], None]:
    return lambda made, groups, start: REAL_PUT(made, change(groups), start)


def roll(groups: GroupWeights, dim: int) -> GroupWeights:
    return replace(groups, scales=groups.scales.roll(1, dim))


class Changed:
    """A kernel with another constant."""

    def __init__(self, kernel: Any = group_linear.multiply_groups, **changes: Any) -> None:
        self._kernel, self._changes = kernel, changes

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self._kernel[grid](*args, **constants | self._changes)


REAL_PUT, REAL_KERNEL, REAL_PAIRS = PackedGroups.put, group_linear.multiply_groups, group_linear.pack_pairs
REAL_LINES, REAL_JOIN = group_linear.multiply_lines, group_linear.join_sums

FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scales of the neighbouring output": lambda patch: patch.setattr(
        PackedGroups, "put", put_with(lambda groups: roll(groups, 0))
    ),
    "scales of the neighbouring group": lambda patch: patch.setattr(
        PackedGroups, "put", put_with(lambda groups: roll(groups, 1))
    ),
    "nibbles in another order": lambda patch: patch.setattr(group_linear, "pack_steps", swapped),
    "a zero point off by one": lambda patch: patch.setattr(
        PackedGroups, "put", put_with(lambda groups: replace(groups, values=(groups.values + 1) & 15))
    ),
    "offsets left out": lambda patch: patch.setattr(group_linear, "multiply_groups", Changed(OFFSETS=None)),
    "one scale for more inputs than a group has": lambda patch: patch.setattr(
        group_linear, "multiply_groups", Changed(RUN=32)
    ),
    "scales of the other group of a pair": lambda patch: patch.setattr(
        group_linear, "pack_pairs", lambda numbers: (REAL_PAIRS(numbers) << 16) | (REAL_PAIRS(numbers) >> 16 & 65535)
    ),
    "groups as if they were runs": lambda patch: patch.setattr(
        group_linear, "multiply_groups", Changed(INDEXED=False)
    ),
    "no bias": lambda patch: patch.setattr(group_linear, "multiply_groups", Changed(BIAS=False)),
}  # fmt: skip


FAULTS_OF_LINES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "offsets left out": lambda patch: patch.setattr(group_linear, "multiply_lines", Changed(REAL_LINES, OFFSETS=None)),
    "another group's scales": lambda patch: patch.setattr(group_linear, "multiply_lines", Changed(REAL_LINES, SIZE=64)),
    "levels off by one": lambda patch: patch.setattr(group_linear, "multiply_lines", Changed(REAL_LINES, FIRST=-7)),
    "a part left out": lambda patch: patch.setattr(group_linear, "join_sums", Changed(REAL_JOIN, PARTS=2)),
    "no bias": lambda patch: patch.setattr(group_linear, "join_sums", Changed(REAL_JOIN, BIAS=False)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS_OF_LINES)
def test_harness_catches_in_lines(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, weight = drawn(INT4, 40, 64 * 24, 32, True)
    near(form, [weight], DTYPES[1], 2, biased=True)
    FAULTS_OF_LINES[fault](monkeypatch)
    with pytest.raises(AssertionError):
        near(form, [weight], DTYPES[1], 2, biased=True)


@pytest.mark.parametrize("rows", [1, 16, 20, 40, MOST_ROWS])
@pytest.mark.parametrize("levels", [INT4, UINT4, INT8], ids=lambda levels: levels.name)
@pytest.mark.parametrize("size", [32, 128, -1])
def test_lines_of_few_outputs_are_divided(levels: Levels, size: int, rows: int) -> None:
    """Several programs have the steps of an output, the last of them fewer."""
    form, weight = drawn(levels, 70, 128 * 27 + 64, size, levels is UINT4 and size > 0)
    product = product_of(form, [weight], DTYPES[2])
    assert all(part.has_lines for part in product.parts)
    near(form, [weight], DTYPES[2], rows, biased=True)


def test_what_has_no_lines() -> None:
    """Other levels than integers, groups that are no runs or smaller, and an offset for all inputs."""
    for case in (
        (E2M1, 8, 128, 64, False), (INT4, 8, 128, 16, False), (INT4, 8, 128, 48, False), (INT4, 8, 128, -1, True),
        (INT4, 8, 96, 32, False, 0, True),
    ):  # fmt: skip
        form, weight = drawn(*case)
        assert not any(part.has_lines for part in product_of(form, [weight], DTYPES[2]).parts)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [False, True], ids=["bfloat16", "float16"])
@pytest.mark.skipif(INTERPRETED, reason="runs instructions of a device")
def test_levels_by_their_bits(bits: int, half: bool) -> None:
    """Each stored integer becomes its level, with a product by one."""
    dtype, levels = (torch.float16 if half else torch.bfloat16), INT4 if bits == 4 else INT8
    values = torch.arange(256, dtype=torch.uint8).view(1, 256) & (2**bits - 1)
    tensors = {"values": values, "scales": torch.ones(1, 1)}
    described = [StoredTensor(key, tuple(tensor.shape), rows=Axis(0)) for key, tensor in tensors.items()]
    weight = StoredWeight("drawn", 1, 256, described, tensors)
    product = product_of(Drawn(levels, 256), [weight], dtype)
    for start in range(0, 256, MOST_ROWS):
        found = product(torch.eye(256, dtype=dtype, device=DEVICE)[start : start + MOST_ROWS])
        assert found[:, 0].tolist() == [levels.numbers[n] for n in values[0, start : start + MOST_ROWS].tolist()]


@pytest.mark.parametrize("fault", FAULTS)
def test_harness_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, weight = drawn(INT4, 40, 96, 16, True, indexed=fault == "groups as if they were runs")
    near(form, [weight], DTYPES[1], 2, biased=True)
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        near(form, [weight], DTYPES[1], 2, biased=True)


def test_another_constant_is_the_kernel_s() -> None:
    """The kernel has the constants that faults change."""
    assert {"OFFSETS", "INDEXED", "BIAS"} <= set(REAL_KERNEL.arg_names)
