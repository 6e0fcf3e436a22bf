"""Rows and weights in float8 are multiplied as float8, by one product that torch accepts on a GPU.

Without a GPU torch's checks are those of its meta kernel, and the product is that of float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.architectures.registry import load_model
from model.config import read_config
from model.decoder import Decoder
from model.gpu import float8_product
from model.gpu.backend import TritonBackend
from model.gpu.float8_product import FEW_ROWS, Float8Product, ScaledFloat8Weights, can_multiply
from model.gpu.group_linear import MOST_ROWS, GroupProduct, PackedGroups
from model.gpu.row_rounding import to_float8
from model.weight_formats.activations import RoundedProduct, RowRounding, SideBySide
from model.weight_formats.groups import bring_back
from model.weight_formats.scratch import Scratch
from model.weights import Checkpoint
from tests.model.families.conftest import Shelf
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED
from tests.model.weight_formats.compressed import Recipe
from tests.model.weight_formats.test_activations import (
    FP8_BLOCKS,
    FP8_DYNAMIC,
    FP8_STATIC,
    FP8_WHOLE,
    W8A8,
    twins,
)

IN_FLOAT8 = {"a scale of a row": FP8_DYNAMIC, "and of all weights": FP8_WHOLE, "a scale of all rows": FP8_STATIC}
NOT = {"int8": W8A8, "a scale of 16 inputs": FP8_BLOCKS}
LARGEST, SMALLEST = 448.0, 2.0**-9


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("float8"))


def accepted(
    rows: Tensor, weights: Tensor, row_scales: Tensor, scales: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Multiplies in float64 what `torch._scaled_mm` accepts on a GPU."""
    on_meta = (one.to("meta") for one in (rows, weights, row_scales, scales))
    made = torch.ops.aten._scaled_mm(*on_meta, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    # The meta kernel leaves out what cuBLAS and CUTLASS check, see aten/src/ATen/native/cuda/ScaledBlas.cpp.
    assert len(rows) % 16 == 0
    assert row_scales.numel() > 1
    assert out_dtype == torch.bfloat16
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == scales[0].shape and bias.is_contiguous())
    exact = (rows.double() * row_scales) @ (weights.double() * scales)
    exact = (exact if bias is None else exact + bias).to(out_dtype)
    assert (exact.shape, exact.dtype) == (made.shape, made.dtype)
    return exact


@pytest.fixture(autouse=True)
def checked_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(torch, "_scaled_mm", accepted)


def drawn(outputs: int, inputs: int, seed: int = 0) -> ScaledFloat8Weights:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    return ScaledFloat8Weights(values.to(DEVICE), (torch.rand(1, outputs, generator=generator) + 0.1).to(DEVICE))


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of several sizes, one of zeros among them."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x *= 4.0 ** (torch.arange(count) % 9 - 4)[:, None]
    x[count // 2] = 0.0
    return x.to(dtype).to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("change", ["weights by row", "odd rows", "scales of rows side by side", "float16"])
def test_what_torch_refuses_is_refused(change: str) -> None:
    """The stand-in can fail."""
    weights, (rows, scales) = drawn(48, 32), to_float8(rows_of(16, 32), 16, None)
    taken: dict[str, Any] = {"bias": None, "out_dtype": torch.bfloat16, "use_fast_accum": False}
    values = weights.values.T
    accepted(rows.cpu(), values.cpu(), scales.cpu(), weights.scales.cpu(), **taken)
    if change == "weights by row":
        values = values.contiguous()
    elif change == "odd rows":
        rows, scales = rows[:15], scales[:15]
    elif change == "scales of rows side by side":
        scales = scales.T
    else:
        taken["out_dtype"] = torch.float16
    with pytest.raises((AssertionError, RuntimeError)):
        accepted(rows.cpu(), values.cpu(), scales.cpu(), weights.scales.cpu(), **taken)


@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 80, 512])
def test_rows_are_rounded_by_the_rule(width: int, dtype: torch.dtype, scale: float | None) -> None:
    x = rows_of(11, width, dtype)
    x[1] = LARGEST * SMALLEST * torch.arange(width, device=DEVICE).to(dtype)  # ties, and numbers below the smallest
    x[2, 3] = -(2.0**15)
    rows, scales = to_float8(x, 16, scale)
    assert (rows.shape, scales.shape) == ((16, width), (16, 1))
    # On the CPU: a GPU's torch divides by a number as it multiplies by its inverse.
    found, expected = rows.float() * scales, RowRounding(True, scale=scale)(x.float().cpu())
    assert torch.equal(found[:11].cpu(), expected)
    assert not found[11:].any()
    assert torch.equal(rows[:11].float(), (x.float() / scales[:11]).clamp(-LARGEST, LARGEST).to(rows.dtype).float())


@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_so(number: float, scale: float | None) -> None:
    """With a scale of all rows what is infinite is the largest element, as `RowRounding` has it."""
    x = rows_of(5, 64)
    x[2, 5] = number
    made = Float8Product(RowRounding(True, scale=scale), drawn(32, 64), None)(x)
    finite = scale is not None and number == number
    assert made[2].isfinite().all() if finite else not made[2].isfinite().any()
    assert made[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("count", [1, 5, FEW_ROWS, FEW_ROWS + 7])
def test_products_are_those_of_rounded_rows(count: int, with_bias: bool, scale: float | None) -> None:
    weights, rounding, x = drawn(96, 256), RowRounding(True, scale=scale), rows_of(count, 256)
    bias = rows_of(3, 96)[0] if with_bias else None
    expected = rounding(x.float()).double() @ (weights.values.double() * weights.scales.T).T
    expected = expected if bias is None else expected + bias
    found = Float8Product(rounding, weights, bias)(x)
    assert (found.dtype, found.shape) == (x.dtype, expected.shape)
    size = expected.abs().amax(1, keepdim=True)
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-12 * size).all()


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(96, 256)] if INTERPRETED else [(96, 256), (6144, 4096), (4096, 14336)]
)
def test_few_rows_have_their_own_bits(outputs: int, inputs: int) -> None:
    """Neither the number of rows nor a row's place among them changes it."""
    product, x = Float8Product(RowRounding(True), drawn(outputs, inputs), None), rows_of(FEW_ROWS, inputs)
    whole = bits(product(x))
    for count in (1, 17) if INTERPRETED else (1, 2, 15, 16, 17, 33, FEW_ROWS - 1):
        assert torch.equal(bits(product(x[:count])), whole[:count]), count
        assert torch.equal(bits(product(x[-count:])), whole[-count:]), count
    order = torch.randperm(FEW_ROWS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(bits(product(x[order])), whole[order])


def parts_of(product: Any) -> list[Any]:
    return list(product.parts) if isinstance(product, SideBySide) else [product]


def loaded(recipe: Recipe, shelf: Shelf, place: Path, dtype: torch.dtype) -> Callable[[bool], Decoder]:
    """Returns what loads a model with a GPU's products, or with the reference back end's."""
    compressed, _ = twins("llama-biases", recipe, shelf, place)
    config, name = read_config(compressed), str(dtype).removeprefix("torch.")
    maker: Any = TritonBackend(name, name, DEVICE, Scratch(dtype, DEVICE)).maker
    return lambda own: load_model(config, Checkpoint(compressed), dtype, DEVICE, None, maker if own else None)


@pytest.mark.parametrize("name", IN_FLOAT8)
def test_checkpoints_are_multiplied_in_float8(name: str, shelf: Shelf, tmp_path: Path) -> None:
    load: Any = loaded(IN_FLOAT8[name], shelf, tmp_path, torch.bfloat16)
    ours, theirs = load(True), load(False)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for part, reference in (
            (layer.attention.qkv, other.attention.qkv),
            (layer.attention.output, other.attention.output),
            (layer.mlp.gate_up, other.mlp.gate_up),
            (layer.mlp.down, other.mlp.down),
        ):
            assert {type(one) for one in parts_of(part)} == {Float8Product}
            width = 96 if part is layer.mlp.down else 64
            for count in (3, FEW_ROWS + 7):
                x = rows_of(count, width)
                found, expected = part(x), reference(x)
                # The reference rounds weights and rows to bfloat16 once more.
                size = expected.float().abs().amax(1, keepdim=True)
                assert ((found.float() - expected.float()).abs() <= 2**-6 * size).all()


def unpacked_by_torch(product: GroupProduct, part: PackedGroups, block: slice) -> Tensor:
    """The weights that the kernel would bring back on a GPU."""
    return bring_back(part.unpacked(block, product.inputs), product.table)


@pytest.mark.parametrize("name", NOT)
def test_others_are_rounded_and_scaled_back(
    name: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupProduct, "unpack", unpacked_by_torch)
    load: Any = loaded(NOT[name], shelf, tmp_path, torch.float32)
    part, x = load(True).layers[0].mlp.down, rows_of(MOST_ROWS + 1, 96, torch.float32)
    assert {type(one) for one in parts_of(part)} == {RoundedProduct}
    torch.testing.assert_close(part(x), load(False).layers[0].mlp.down(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_devices_without_float8_round(capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_product, "capability_of", lambda _: capability)
    cuda, half = torch.device("cuda"), torch.bfloat16
    assert can_multiply(RowRounding(True), half, cuda) is can
    assert not can_multiply(RowRounding(True), torch.float16, cuda)
    assert not can_multiply(RowRounding(False), half, cuda)
    assert not can_multiply(RowRounding(True, 16), half, cuda)
