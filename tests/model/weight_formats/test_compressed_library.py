"""Quire reads the tensors, weights and activations that the library compressed-tensors writes and reads back."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from torch import Tensor

from model.fields import Fields
from model.weight_formats.activations import RowRounding
from model.weight_formats.compressed_tensors import CompressedTensors
from model.weight_formats.groups import GroupFormat, bring_back
from model.weight_formats.stored import StoredWeight
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.parity import ask, compare
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.reference import read
from tests.model.weight_formats.compressed import Recipe, compress, config_of
from tests.model.weight_formats.recipes import FP8_BLOCK, INT8, RECIPES, W4, W8_CHANNEL
from tests.model.weight_formats.test_groups import linears

pytestmark = pytest.mark.sample(3)

# The library has dropped actorder "group", which its earlier versions wrote.
WRITTEN = [recipe for recipe in RECIPES if recipe.actorder != "group"]
OUT, WIDTH = 40, 96


def drawn(rows: int, width: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=(rows, width)).astype(np.float32))


def opened(recipe: Recipe, inputs: dict[str, Any] | None = None) -> tuple[QuantizationConfig, CompressedTensors]:
    """The library's reading of a config.json, and Quire's."""
    values = config_of([recipe], ["lm_head"])
    values["config_groups"]["group_0"]["input_activations"] = inputs
    return QuantizationConfig(**values), CompressedTensors(Fields(Path("config.json"), values))


def parameters(weight: Tensor, recipe: Recipe, args: Any) -> tuple[Tensor, Tensor]:
    """Scales of few bits, as where they are stored in float16, and zero points, by the library's rule."""
    rows, columns = recipe.shape_of(*weight.shape)
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    parts = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), args)
    scale = scale.half().float()
    return (scale.view(1), zero.view(1)) if recipe.strategy == "tensor" else (scale, zero)


@pytest.mark.parametrize("recipe", WRITTEN, ids=str)
def test_weights(recipe: Recipe) -> None:
    library, form = opened(recipe)
    (scheme,) = library.config_groups.values()
    linear = form.for_linear("model.layers.0.mlp.up_proj")
    assert isinstance(linear, GroupFormat)
    weight = drawn(OUT, WIDTH)
    scale, zero = parameters(weight, recipe, scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(recipe.form)
    written = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    described = linear.tensors(OUT, WIDTH)
    assert {one.key: one.shape for one in described} == {key: tuple(one.shape) for key, one in written.items()}
    assert all(one.dtype in (None, written[one.key].dtype) for one in described)
    expected = compressor.decompress(dict(written), scheme)["weight"]
    made = bring_back(linear.groups(StoredWeight("a", OUT, WIDTH, described, written)))
    assert torch.equal(made, expected)
    assert (made - weight).abs().max() < weight.abs().max() / (4 if recipe.bits == 4 else 16)


INPUTS: dict[str, tuple[dict[str, Any], RowRounding]] = {
    "float8 of a token": ({"type": "float", "strategy": "token", "dynamic": True}, RowRounding(True)),
    "float8 of a group": (
        {"type": "float", "strategy": "group", "group_size": 16, "dynamic": True},
        RowRounding(True, 16),
    ),
    "float8, stored": ({"type": "float", "strategy": "tensor", "dynamic": False}, RowRounding(True, None, 0.01)),
    "int8, stored": ({"type": "int", "strategy": "tensor", "dynamic": False}, RowRounding(False, None, 0.02)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_activations(name: str) -> None:
    """The library's rule for int8 of a token is another, see `RowRounding`."""
    values, rounding = INPUTS[name]
    library, _ = opened(WRITTEN[0], {"num_bits": 8, "symmetric": True} | values)
    (scheme,) = library.config_groups.values()
    args, x = scheme.input_activations, drawn(1, WIDTH)[:, None]  # a batch of one sequence of one token
    if args.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(WIDTH, OUT))
    else:
        scale, zero = torch.tensor([rounding.scale]), torch.zeros(1)
    assert torch.equal(rounding(x[:, 0]), fake_quantize(x, scale, zero, args)[:, 0])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize(
    ("case", "recipe"),
    [("llama-biases", W4), ("phi3", W8_CHANNEL), ("gemma2", replace(INT8, own_form=True)), ("starcoder2", FP8_BLOCK)],
    ids=str,
)
def test_tokens_are_those_of_transformers(case: str, recipe: Recipe, shelf: Shelf, tmp_path: Path) -> None:
    """It reads the checkpoint with the library.

    Packed zero points are left out, its shapes of them are not packed. Int8 weights need a format of the group's own.
    """
    source = shelf.checkpoint(BY_NAME[case])
    compressed, plain = (Path(shutil.copytree(source, tmp_path / name)) for name in ("compressed", "plain"))
    compress(compressed, plain, linears(source), [recipe])
    compare(ask(compressed, FEW), read(compressed, PROMPTS, FEW))
