"""Activations in 8 bits: rows are rounded as numpy states it, each by itself."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model import config as config_file
from model.config import STORED_FORMATS, read_config
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.weight_formats import registry
from model.weight_formats.activations import RowRounding
from model.weight_formats.groups import GroupFormat
from model.weight_formats.registry import open_weight_format
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import edit_tensors
from tests.model.test_weights import load_it
from tests.model.weight_formats.compressed import Recipe, compress
from tests.model.weight_formats.recipes import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8, W4
from tests.model.weight_formats.stated import Stated, state
from tests.model.weight_formats.statements import round_rows
from tests.model.weight_formats.test_groups import bits, divided, linears
from tests.support.engines import make_request, make_rig

pytestmark = pytest.mark.sample(3)

TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
GROUPS = {"num_bits": 8, "strategy": "group", "group_size": 16, "dynamic": True, "symmetric": True}
INT, FLOAT = {"type": "int"}, {"type": "float"}

W8A8 = replace(INT8, inputs=TOKEN | INT)
W8A8_STATIC = replace(INT8, inputs=STATIC | INT)
W4A8 = replace(W4, inputs=TOKEN | FLOAT)
FP8_DYNAMIC = replace(FP8_CHANNEL, inputs=TOKEN | FLOAT)
FP8_WHOLE = replace(FP8_TENSOR, inputs=STATIC | FLOAT | {"strategy": "tensor", "dynamic": True})
FP8_STATIC = replace(FP8_TENSOR, inputs=STATIC | FLOAT)
FP8_BLOCKS = replace(FP8_BLOCK, inputs=GROUPS | FLOAT)

CASES: dict[str, tuple[str, Recipe, int]] = {
    "W8A8": ("llama-biases", W8A8, 1),
    "W8A8, fused": ("phi3", W8A8, 1),
    "W8A8 static": ("llama-biases", W8A8_STATIC, 1),
    "W8A8 static, 2 ranks": ("llama-biases", W8A8_STATIC, 2),
    "W4A8": ("llama-biases", W4A8, 1),
    "FP8 dynamic, experts": ("mixtral", FP8_DYNAMIC, 1),
    "FP8 dynamic, a scale of a tensor": ("llama-biases", FP8_WHOLE, 1),
    "FP8 static, heads one by one": ("gpt-neox", FP8_STATIC, 1),
    "FP8 static, 2 ranks": ("qwen3-moe", FP8_STATIC, 2),
    "FP8 blocks": ("qwen3-moe", FP8_BLOCKS, 1),
    "FP8 blocks, 2 ranks": ("phi3", FP8_BLOCKS, 2),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STORED, "stated", Stated)
    monkeypatch.setattr(config_file, "STORED_FORMATS", (*STORED_FORMATS, "stated"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("activations"))


def twins(case: str, recipe: Recipe, shelf: Shelf, root: Path) -> tuple[Path, Path]:
    """The compressed checkpoint, and the plain weights that it stands for with the rounding that it stands for."""
    source = shelf.checkpoint(BY_NAME[case])
    compressed, plain = (Path(shutil.copytree(source, root / name)) for name in ("compressed", "plain"))
    made = compress(compressed, plain, linears(source), [recipe], ("lm_head", "embed_out"))
    assert recipe.inputs is not None
    state(plain, recipe.inputs["type"], recipe.inputs.get("group_size"), {n: one.scale for n, one in made.items()})
    return compressed, plain


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_bits_are_those_of_rounded_rows_and_plain_weights(name: str, shelf: Shelf, tmp_path: Path) -> None:
    case, recipe, ranks = CASES[name]
    compressed, plain = twins(case, recipe, shelf, tmp_path)
    assert bits(compressed, ranks) == bits(plain, ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", [W8A8, FP8_BLOCKS], ids=["W8A8", "FP8 blocks"])
@pytest.mark.sample(3)
def test_alone_is_as_in_a_batch(recipe: Recipe, dtype: str, shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", recipe, shelf, tmp_path)
    rigs = [
        make_rig(compressed, 16, 2048, SchedulerSettings(), True, dtype=dtype, prefix_cache=False) for _ in range(2)
    ]
    rigs[0].run({place: make_request(rigs[0], PROMPTS[place], 8) for place in FEW})
    for place in FEW:
        rigs[1].run({place: make_request(rigs[1], PROMPTS[place], 8)})
        assert rigs[1].results[place].tokens == rigs[0].results[place].tokens
        assert rigs[1].logits_of(place) == rigs[0].logits_of(place)


FAULTS: dict[str, tuple[Recipe, Callable[[RowRounding, Tensor], Tensor]]] = {
    "no rounding": (W8A8, lambda _, x: x),
    "a scale of the batch": (W8A8, lambda self, x: true_rounding(self, x.reshape(1, -1)).view_as(x)),
    "a scale of the row for groups": (FP8_BLOCKS, lambda self, x: true_rounding(replace(self, size=None), x)),
    "another linear's scale": (W8A8_STATIC, lambda self, x: true_rounding(replace(self, scale=0.02), x)),
    "int8 for float8": (FP8_DYNAMIC, lambda self, x: true_rounding(replace(self, floating=False), x)),
}
true_rounding = RowRounding.__call__


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, wrong = FAULTS[fault]
    compressed, plain = twins("llama-biases", recipe, shelf, tmp_path)
    monkeypatch.setattr(RowRounding, "__call__", wrong)
    assert bits(compressed, 1) != bits(plain, 1)


rows = st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32 - 1), st.floats(-30, 30)


@given(st.booleans(), st.sampled_from([None, 1, 8, 16]), st.sampled_from([None, 0.01, 1.0]), *rows)
def test_rounding_is_the_statement(
    floating: bool, size: int | None, scale: float | None, count: int, width: int, seed: int, power: float
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, width)) * 2.0**power).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[rng.random(count) < 0.2] = 0
    rounding = RowRounding(floating, size, scale)
    made = rounding(torch.from_numpy(x))
    assert np.array_equal(made.numpy(), round_rows(x, "float" if floating else "int", size, scale))
    alone = [rounding(torch.from_numpy(x[i : i + 1])) for i in range(count)]
    assert torch.equal(torch.cat(alone), made)


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(floating: bool, value: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = value
    made = RowRounding(floating)(x)
    assert not torch.isfinite(made[1]).all()
    assert torch.equal(made[::2], torch.ones(2, 8))


def test_no_back_end_multiplies_with_the_weights_alone(shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", W8A8, shelf, tmp_path)
    form = open_weight_format(read_config(compressed)).for_linear("model.layers.0.mlp.up_proj")
    assert not isinstance(form, GroupFormat)


def test_a_scale_of_all_inputs_is_refused_where_ranks_share_them(shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", W8A8, shelf, tmp_path)
    message = r"o_proj: the inputs of a token .* a rank that has 32 of them does not know; use --tensor-parallel 1"
    with pytest.raises(ValueError, match=message):
        divided(compressed, 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_named(value: float, shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", FP8_STATIC, shelf, tmp_path)
    name = "model.layers.1.self_attn.k_proj.input_scale"
    edit_tensors(compressed, lambda tensors: tensors | {name: torch.tensor([value])})
    with pytest.raises(CheckpointError, match=f"{name} is {value}, must be a number above 0"):
        load_it(compressed, backend="reference")


def test_static_scales_change_no_estimate(shelf: Shelf, tmp_path: Path) -> None:
    static, _ = twins("llama-biases", FP8_STATIC, shelf, tmp_path / "static")
    dynamic, _ = twins("llama-biases", FP8_WHOLE, shelf, tmp_path / "dynamic")
    assert weight_bytes(read_config(static), "float32") == weight_bytes(read_config(dynamic), "float32")
