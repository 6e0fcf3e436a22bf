"""compressed-tensors computes, bit for bit, what a model with the plain weights computes that its tensors stand for."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.settings import ModelSettings
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format
from model.weights import Checkpoint
from rpc.cli.estimate import estimate
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW
from tests.model.families.styles import edit_config, edit_tensors
from tests.model.test_weights import load_it
from tests.model.weight_formats.compressed import Recipe, compress, config_of, half_scales
from tests.model.weight_formats.recipes import (
    ATTENTION,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8,
    INT8_TENSOR,
    INT8_ZEROS,
    NAIVE_FP8,
    OTHERS,
    W4,
    W4_CHANNEL,
    W4_ORDER,
    W4_ZEROS,
    W4_ZEROS_ORDER,
    W8,
    W8_32,
    W8_CHANNEL,
)
from tests.model.weight_formats.test_group_kernels import run
from tests.model.weight_formats.test_groups import bits, divided, linears
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
CASES: dict[str, tuple[str, tuple[Recipe, ...]]] = {
    "biases": ("llama-biases", (W4,)),
    "order": ("llama-biases", (W4_ORDER,)),
    "two schemes": ("llama-biases", (ATTENTION, OTHERS)),
    "naive float": ("llama-biases", (NAIVE_FP8,)),
    "naive int": ("llama-biases", (INT8_TENSOR,)),
    "fused": ("phi3", (W4_ZEROS,)),
    "fused, order": ("phi3", (W4_ZEROS_ORDER,)),
    "fused, blocks": ("phi3", (FP8_BLOCK,)),
    "experts": ("mixtral", (W4_CHANNEL,)),
    "experts, float": ("mixtral", (FP8_TENSOR,)),
    "small experts": ("qwen3-moe", (W8,)),
    "latent attention": ("deepseek-v2", (W8,)),
    "small experts, blocks": ("qwen3-moe", (FP8_BLOCK,)),
    "int groups": ("gemma2", (INT8_ZEROS,)),
    "int": ("gemma2", (INT8,)),
    "no gate": ("starcoder2", (W8_CHANNEL,)),
    "heads one by one": ("gpt-neox", (FP8_CHANNEL,)),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("compressed"))


def copies(case: str, shelf: Shelf, root: Path) -> tuple[Path, Path, list[str]]:
    """The checkpoint twice, and its linears."""
    source = shelf.checkpoint(BY_NAME[case])
    return Path(shutil.copytree(source, root / "a")), Path(shutil.copytree(source, root / "b")), linears(source)


def twins(case: str, recipes: Sequence[Recipe], shelf: Shelf, root: Path) -> tuple[Path, Path]:
    """The compressed checkpoint, and one with the plain weights that it stands for."""
    compressed, plain, names = copies(case, shelf, root)
    compress(compressed, plain, names, recipes, ignore=("lm_head", "embed_out"))
    return compressed, plain


@few("ranks", [1, 2], [1])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_bits_are_those_of_the_plain_weights(name: str, ranks: int, shelf: Shelf, tmp_path: Path) -> None:
    compressed, plain = twins(*CASES[name], shelf, tmp_path)
    assert bits(compressed, ranks) == bits(plain, ranks)


KERNELS: dict[str, tuple[str, tuple[Recipe, ...]]] = {
    "packed": ("llama-biases", (W4,)),
    "packed, zero points": ("phi3", (W4_ZEROS,)),
    "packed, experts": ("mixtral", (W8_32,)),
    "int": ("llama-biases", (INT8,)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_are_near_the_plain_weights(
    name: str, shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compressed, plain = twins(*KERNELS[name], shelf, tmp_path)
    with caplog.at_level(logging.INFO, "quire.model"):
        found = run(compressed, "auto", "float32", None, FEW)
    assert "kernels are not used" not in caplog.text
    for key, logits in run(plain, "reference", "float32", None, FEW).logits.items():
        np.testing.assert_allclose(found.logits[key], logits, atol=2e-3)


INPUTS = {
    "int": (INT8, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
    "float": (FP8_CHANNEL, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
    "groups": (W4, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_kernels_round_activations(
    name: str, shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the reference back end does. Sums in another order bring some activations to the next integer, so that logits
    are near on average alone: much nearer than those of activations that are not rounded.
    """
    recipe, inputs = INPUTS[name]
    compressed, plain = twins("llama-biases", [replace(recipe, inputs=inputs)], shelf, tmp_path)
    with caplog.at_level(logging.INFO, "quire.model"):
        found = run(compressed, "auto", "float32", None, FEW)
    assert "kernels are not used" not in caplog.text
    expected, unrounded = (run(one, "reference", "float32", None, FEW).logits for one in (compressed, plain))

    def distance(logits: dict[tuple[int, int], np.ndarray]) -> float:
        """Returns the mean for the first token of all prompts: later ones may follow another."""
        return float(np.mean([np.abs(logits[key] - expected[key]).mean() for key in expected if key[1] == 0]))

    assert distance(found.logits) < distance(unrounded) / 4
    alone = run(compressed, "auto", "float32", 3, FEW[:1])
    assert alone.logits_of(FEW[0]) == found.logits_of(FEW[0])


def test_rows_that_are_rounded_by_groups_have_no_kernels(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "dynamic": True}
    compressed, _ = twins("llama-biases", [replace(INT8, inputs=inputs)], shelf, tmp_path)
    with caplog.at_level(logging.INFO, "quire.model"):
        assert bits(compressed, 1, "auto") == bits(compressed, 1)
    assert "kernels are not used: there are none for rows that are rounded with several scales" in caplog.text


def test_an_output_layer_that_is_not_ignored_is_quantized(shelf: Shelf, tmp_path: Path) -> None:
    compressed, plain, names = copies("llama-biases", shelf, tmp_path)
    compress(compressed, plain, [*names, "lm_head.weight"], [W8_CHANNEL], ignore=[])
    assert bits(compressed, 2) == bits(plain, 2)


def test_linears_that_no_target_names_are_plain(shelf: Shelf, tmp_path: Path) -> None:
    compressed, plain, names = copies("llama-biases", shelf, tmp_path)
    compress(compressed, plain, [name for name in names if "mlp" in name], [W4], [])
    values = config_of([replace(W4, targets=("re:.*mlp.*",))], [])
    edit_config(compressed, lambda old: old | {"quantization_config": values})
    assert bits(compressed, 1) == bits(plain, 1)


@pytest.mark.parametrize("recipe", [W4_ZEROS, W4_ZEROS_ORDER, W8_CHANNEL, INT8_TENSOR, FP8_BLOCK], ids=str)
def test_the_estimate_is_what_is_held(recipe: Recipe, shelf: Shelf, tmp_path: Path) -> None:
    """With scales in 16 bits, which most writers store: config.json does not say it."""
    compressed, plain = twins("llama-biases", [recipe], shelf, tmp_path)
    edit_tensors(compressed, half_scales)
    config = read_config(compressed)
    tensors = Tensors(Checkpoint(compressed), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")
    assert estimate(compressed, ModelSettings(str(compressed)))["quantization"] == "compressed-tensors"


def damage(directory: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = change(tensors[name].clone())
        return {key: tensor for key, tensor in tensors.items() if key != name} | ({} if made is None else {name: made})

    edit_tensors(directory, edited)


def last_is(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


DOWN = "model.layers.1.mlp.down_proj"
DAMAGES: list[tuple[Recipe, str, Callable[[Tensor], Tensor | None], str]] = [
    (W4, "weight_shape", last_is(64), r"weight_shape is \[64, 64\], config.json needs 64 outputs and 96 inputs"),
    (W4, "weight_scale", last_is(float("nan")), "weight_scale holds values that are infinite or not a number"),
    (W4, "weight_scale", lambda t: t[:, :-1], r"weight_scale in .* has shape \[64, 2\], config.json needs \[64, 3\]"),
    (W4, "weight_packed", lambda t: t.long(), "weight_packed .* is of torch.int64, must be torch.int32"),
    (W4, "weight_packed", lambda _: None, "weight_packed is missing"),
    (W4_ZEROS, "weight_zero_point", lambda _: None, "weight_zero_point is missing"),
    (W4_ORDER, "weight_g_idx", last_is(3), "weight_g_idx holds 0 to 3, must be groups 0 to 2"),
    (W4_ORDER, "weight_g_idx", last_is(-1), "weight_g_idx holds -1 to 2, must be groups 0 to 2"),
    (FP8_CHANNEL, "weight", last_is(float("nan")), "weight holds float8 values that are not a number"),
    (FP8_CHANNEL, "weight", lambda t: t.float(), "weight .* is of torch.float32, must be torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("recipe", "key", "change", "message"), DAMAGES)
def test_damaged_tensors_are_named(
    recipe: Recipe, key: str, change: Callable[[Tensor], Tensor | None], message: str, shelf: Shelf, tmp_path: Path
) -> None:
    compressed, _ = twins("llama-biases", [recipe], shelf, tmp_path)
    damage(compressed, f"{DOWN}.{key}", change)
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.{message}"):
        load_it(compressed, backend="reference")


def test_a_shape_that_is_cut_is_checked_as_far_as_it_is_known(shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", [W4], shelf, tmp_path)
    damage(compressed, f"{DOWN}.weight_shape", last_is(64))
    with pytest.raises(CheckpointError, match=r"weight_shape is \[64, 64\], config.json needs 64 .* about 96 inputs"):
        divided(compressed, 2)


def test_zero_points_that_config_does_not_name_are_left_over(shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", [W4_ZEROS], shelf, tmp_path)
    values = config_of([replace(W4_ZEROS, symmetric=True)], ["lm_head"])
    edit_config(compressed, lambda old: old | {"quantization_config": values})
    with pytest.raises(CheckpointError, match=r"weight_zero_point in model.safetensors and .* more is not part of the"):
        load_it(compressed, backend="reference")


def test_parts_of_one_product_in_several_schemes_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    compressed, _ = twins("llama-biases", [replace(ATTENTION, targets=("re:.*q_proj",)), OTHERS], shelf, tmp_path)
    message = "q_proj compressed-tensors group_0, self_attn.k_proj compressed-tensors group_1"
    with pytest.raises(CheckpointError, match=message):
        load_it(compressed, backend="reference")


def test_degrees_that_would_cut_a_group_are_refused_with_those_that_do_not(shelf: Shelf, tmp_path: Path) -> None:
    """Heads of 16: two to a group. In the order of activations a group is no run, and is not cut."""
    compressed, _ = twins("llama-biases", [W4], shelf, tmp_path)
    with pytest.raises(ValueError, match="compressed-tensors keeps 1 outputs and 32 inputs together; 1 or 2 can be"):
        divided(compressed, 4)
    ordered, plain = twins("llama-biases", [W4_ORDER], shelf, tmp_path / "ordered")
    assert bits(ordered, 4) == bits(plain, 4)


def test_scales_of_a_kv_cache_are_not_used(shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compressed, plain = twins("llama-biases", [FP8_CHANNEL], shelf, tmp_path)
    at = "model.layers.1.self_attn"
    names = [f"{at}.k_scale", f"{at}.v_scale", f"{at}.k_proj.output_scale"]
    edit_tensors(compressed, lambda tensors: tensors | {name: torch.tensor([0.5]) for name in names})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    values = config_of([FP8_CHANNEL], ["lm_head"]) | {"kv_cache_scheme": scheme}
    edit_config(compressed, lambda old: old | {"quantization_config": values})
    with caplog.at_level(logging.INFO, "quire.model"):
        assert bits(compressed, 1) == bits(plain, 1)
    assert "3 scales of the checkpoint's KV cache are not used: --kv-cache-dtype" in caplog.text
