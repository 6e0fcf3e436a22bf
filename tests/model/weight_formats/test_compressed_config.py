"""compressed-tensors' config: what it means, and what is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.compressed_tensors import CompressedTensors
from model.weight_formats.plain import PLAIN
from tests.model.weight_formats.compressed import Recipe, config_of
from tests.model.weight_formats.recipes import (
    ATTENTION,
    FP8_BLOCK,
    INT8,
    OTHERS,
    W4,
    W4_ZEROS,
    W8_CHANNEL,
)

pytestmark = pytest.mark.sample(3)


def opened(values: dict[str, Any]) -> CompressedTensors:
    return CompressedTensors(Fields(Path("config.json"), values))


def group(recipe: Recipe = W4, **changes: Any) -> dict[str, Any]:
    return {"format": recipe.form, "config_groups": {"group_0": recipe.group | changes}}


def weights(recipe: Recipe = W4, **changes: Any) -> dict[str, Any]:
    return group(recipe, weights=recipe.group["weights"] | changes)


def inputs(**changes: Any) -> dict[str, Any]:
    return group(INT8, input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"} | changes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config_groups": None}, "'config_groups' is None, must have 1 to 256 groups"),
    ({"config_groups": []}, r"'config_groups' is \[\], must be of type dict"),
    ({"config_groups": {"W4A16": ["Linear"]}}, r"'W4A16' is \['Linear'\], must be of type dict"),
    ({"format": "marlin-24"}, "format 'marlin-24', not served: its weights are sparse"),
    ({"format": "nvfp4-pack-quantized"}, r"'nvfp4-pack-quantized', not served: use the model in W4A16"),
    ({"format": "mxfp4-pack-quantized"}, r"'mxfp4-pack-quantized', not served: use the model in W4A16"),
    ({"format": "dense"}, "'dense', not served: .* save it compressed"),
    ({"format": "mixed-precision"}, "'mixed-precision', not served: and a group of 'config_groups' names no format"),
    ({"format": "zip"}, "'zip', not served: must be one of pack-quantized"),
    ({"quantization_status": "frozen"}, "'quantization_status' is 'frozen', must be 'compressed'"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'format' is 'sparse-24-bitmask', of 'sparsity_config'"),
    ({"transform_config": {"config_groups": {"u": {}}}}, "'transform_config' is set: rotations of weights"),
    ({"ignore": "lm_head"}, "'ignore' is 'lm_head', must be of type list"),
    ({"ignore": [7]}, r"'ignore' is \[7\], must be a list"),
    ({"ignore": ["re:" + "a" * 501]}, "not served: it has 501 characters, may have 500"),
    ({"ignore": ["re:a"] * 257}, "'ignore' has 257 patterns, may have 256"),
    ({"ignore": ["re:("]}, r"'ignore' has the pattern '\(', which is not served: a group is not closed"),
    (group(targets=["Embedding"]), r"'targets' is \['Embedding'\], embeddings must be plain"),
    (group(weights=None), "group_0 quantizes activations alone"),
    (group(output_activations={"num_bits": 8}), "'output_activations' is .* outputs are not quantized"),
    (weights(num_bits=3), "'num_bits' is 3, pack-quantized of type int is served with 4 or 8 bits"),
    (weights(type="float"), "'type' is 'float', pack-quantized has int"),
    (weights(dynamic=True), "'dynamic' is True, weights must have scales that are stored"),
    (weights(strategy="tensor_group"), "'strategy' is 'tensor_group', must be tensor, channel, group or block"),
    (weights(group_size=0), "'group_size' is 0, must be at least 1"),
    (weights(group_size="many"), "'group_size' is 'many', must be of type int"),
    (weights(W8_CHANNEL, actorder="group"), "'actorder' is 'group', the strategy 'channel' has no groups"),
    (weights(W4_ZEROS, strategy="tensor"), "'symmetric' is False, zero points are served for integers"),
    (weights(strategy="block", block_structure=[96, 128]), r"'block_structure' is \[96, 128\], blocks may have a div"),
    (weights(strategy="block", block_structure="1x"), "'block_structure' is '1x', must be outputs and inputs"),
    (inputs(num_bits=4), "'num_bits' is 4, activations are served in 8 bits"),
    (inputs(symmetric=False), "'symmetric' is False, activations must be symmetric"),
    (inputs(dynamic="local"), "'dynamic' is 'local', activations must be true or false"),
    (inputs(dynamic=False), "'strategy' is 'token', scales that are stored must be of a tensor"),
    (inputs(strategy="attn_head"), "'strategy' is 'attn_head', must be token, tensor or group"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}"):
        opened(config_of([W4], ["lm_head"]) | changes)


def test_old_words_of_the_config() -> None:
    """No strategy, blocks as a text, types in capitals; a sparsity config that says dense, empty transforms."""
    old = weights(FP8_BLOCK, strategy=None, block_structure=None, type="FLOAT")
    values = config_of([FP8_BLOCK], []) | old | {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    assert [one.shape for one in opened(values).for_linear("model.layers.0.a").tensors(4, 4)] == [(1,), (4, 4)]
    assert opened(values | weights(FP8_BLOCK, block_structure="16x32")).blocks == (16, 32)


def test_targets_and_ignored_names() -> None:
    """A name or a pattern comes before the class of all; what is ignored is plain, also in vision-language models."""
    named = replace(W8_CHANNEL, targets=("model.layers.0.mlp.up_proj",), own_form=True)
    ignore = ["lm_head", "re:.*gate$", "language_model.model.layers.7.mlp.up_proj", "model.language_model.layers.8.q"]
    form = opened(config_of([OTHERS, ATTENTION, named], ignore))
    others, attention, one = form.schemes
    assert form.for_linear("model.layers.0.mlp.up_proj") is one
    assert form.for_linear("model.layers.1.mlp.up_proj") is others
    assert form.for_linear("model.layers.1.self_attn.q_proj") is attention
    for name in ("lm_head", "model.layers.2.mlp.gate", "model.layers.7.mlp.up_proj", "model.layers.8.q"):
        assert form.for_linear(name) is PLAIN
    assert form.for_linear("model.layers.2.mlp.gate_proj") is others


def test_blocks_are_those_of_all_schemes() -> None:
    recipes = [replace(W4_ZEROS, own_form=True), replace(FP8_BLOCK, own_form=True, targets=("re:.*mlp",))]
    assert opened(config_of(recipes, [])).blocks == (16, 32)


PATTERNS = [
    r"re:.*self_attn\.(q|k|v|o)_proj$",
    r"re:.*layers\.\d+\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj.*",
    "re:model.layers.(" + "|".join(map(str, range(64))) + r")\.mlp\..*",
    r"re:^(?!.*lm_head).*$",
    r"re:.*(self_)?attn.*",
    r"re:.*router.*|.*gate$|.*shared_expert_gate.*|visual.*",
]


def test_patterns_as_people_write_them() -> None:
    for pattern in PATTERNS:
        opened(config_of([W4], [pattern]))
    opened(config_of([W4], PATTERNS))


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["Linear", "re:.*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
GROUP, ARGS = "config_groups.group_0", ("weights", "input_activations")
PLACES = [
    *("format", "ignore", "config_groups", "quantization_status", "sparsity_config", "transform_config", GROUP),
    *(f"{GROUP}.{key}" for key in ("targets", "weights", "input_activations", "output_activations", "format")),
    *(f"{GROUP}.{args}.{key}" for args in ARGS for key in (*W4.group["weights"], "block_structure")),
]
"""Fields of the config, by their path."""


@given(st.sampled_from([W4, FP8_BLOCK, INT8]), st.dictionaries(st.sampled_from(PLACES), json, max_size=3))
def test_any_config_is_read_or_refused(recipe: Recipe, changes: dict[str, Any]) -> None:
    values = config_of([replace(recipe, inputs={"num_bits": 8, "dynamic": True, "strategy": "token"})], ["lm_head"])
    for place, value in sorted(changes.items()):
        *path, last = place.split(".")
        inner: Any = values
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = value
    try:
        form = opened(values).for_linear("model.layers.0.mlp.up_proj")
    except CheckpointError:
        return
    form.tensors(40, 96)
