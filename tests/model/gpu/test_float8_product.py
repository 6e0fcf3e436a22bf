"""Rows and weights in float8 are multiplied as float8 where rows are many. A CPU multiplies them too."""

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
from model.gpu.float8_product import Float8Product, can_multiply
from model.gpu.group_linear import MOST_ROWS, GroupProduct, PackedGroups
from model.weight_formats.activations import RoundedProduct, RowRounding, SideBySide
from model.weight_formats.groups import bring_back
from model.weight_formats.scratch import Scratch
from model.weights import Checkpoint
from tests.model.families.conftest import Shelf
from tests.model.weight_formats.compressed import Recipe
from tests.model.weight_formats.test_activations import (
    FP8_BLOCKS,
    FP8_DYNAMIC,
    FP8_STATIC,
    FP8_WHOLE,
    W8A8,
    twins,
)

CPU = torch.device("cpu")
IN_FLOAT8 = {"a scale of a row": FP8_DYNAMIC, "and of all weights": FP8_WHOLE, "a scale of all rows": FP8_STATIC}
NOT = {"int8": W8A8, "a scale of 16 inputs": FP8_BLOCKS}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("float8"))


def loaded(recipe: Recipe, shelf: Shelf, place: Path) -> tuple[Any, Any]:
    """The same model with a GPU's products, and with the reference back end's. In float32, which shows most."""
    compressed, _ = twins("llama-biases", recipe, shelf, place)
    config, dtype = read_config(compressed), torch.float32
    maker = TritonBackend("float32", "float32", CPU, Scratch(dtype, CPU)).maker

    def load(own: Any) -> Decoder:
        return load_model(config, Checkpoint(compressed), dtype, CPU, None, own)

    return load(maker), load(None)


def parts_of(product: Any) -> list[Any]:
    return list(product.parts) if isinstance(product, SideBySide) else [product]


@pytest.mark.parametrize("name", IN_FLOAT8)
def test_many_rows_are_those_of_rounded_rows(name: str, shelf: Shelf, tmp_path: Path) -> None:
    ours, theirs = loaded(IN_FLOAT8[name], shelf, tmp_path)
    generator = torch.Generator().manual_seed(0)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for part, reference in (
            (layer.attention.qkv, other.attention.qkv),
            (layer.attention.output, other.attention.output),
            (layer.mlp.gate_up, other.mlp.gate_up),
            (layer.mlp.down, other.mlp.down),
        ):
            assert {type(one) for one in parts_of(part)} == {Float8Product}
            width = 96 if part is layer.mlp.down else 64
            x = torch.randn(MOST_ROWS + 7, width, generator=generator)
            x[3] = 0.0
            made = part(x)
            torch.testing.assert_close(made, reference(x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(made, torch.cat((part(x[:-1]), made[-1:])), rtol=1e-6, atol=1e-6)


def unpacked_by_torch(product: GroupProduct, part: PackedGroups, block: slice) -> Tensor:
    """The weights that the kernel would bring back on a GPU."""
    return bring_back(part.unpacked(block, product.inputs), product.table)


@pytest.mark.parametrize("name", NOT)
def test_others_are_rounded_and_scaled_back(
    name: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupProduct, "unpack", unpacked_by_torch)
    ours, theirs = loaded(NOT[name], shelf, tmp_path)
    part, x = ours.layers[0].mlp.down, torch.randn(MOST_ROWS + 1, 96)
    assert {type(one) for one in parts_of(part)} == {RoundedProduct}
    torch.testing.assert_close(part(x), theirs.layers[0].mlp.down(x), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_so(shelf: Shelf, tmp_path: Path) -> None:
    ours, _ = loaded(FP8_DYNAMIC, shelf, tmp_path)
    x = torch.randn(MOST_ROWS + 1, 64)
    x[2, 5] = torch.nan
    made = ours.layers[0].attention.output(x)
    assert made[2].isnan().all()
    assert made[[0, 1, *range(3, len(x))]].isfinite().all()


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_devices_without_float8_round(
    capability: tuple[int, int], can: bool, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = loaded(FP8_DYNAMIC, shelf, tmp_path)
    product = ours.layers[0].mlp.down.product
    assert isinstance(product, GroupProduct)
    monkeypatch.setattr(float8_product, "capability_of", lambda _: capability)
    assert can_multiply(RowRounding(True), product, torch.device("cuda")) is can
    assert not can_multiply(RowRounding(False), product, torch.device("cuda"))
    assert not can_multiply(RowRounding(True, 16), product, torch.device("cuda"))
