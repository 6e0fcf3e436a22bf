"""Layers that differ in their KV: what config.json says of it, and the pages that they take."""

from pathlib import Path
from typing import Any

import pytest

from cache_manager.layout import KVShape
from model.config import read_config
from tests.model.config_files import CLASSIC, refusal, write

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]
GEMMA4 = {
    **{key: value for key, value in CLASSIC.items() if key not in ("rope_scaling", "rope_theta")},
    "architectures": ["Gemma4ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 8, "layer_types": KINDS, "sliding_window": 512,
}  # fmt: skip
NARROW, WIDE = KVShape(2, 64, 64), KVShape(2, 128, 128)


def test_layers_without_a_window_have_wider_heads(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GEMMA4 | {"global_head_dim": 128}))
    assert config.layer_shapes == tuple(WIDE if kind == FULL else NARROW for kind in KINDS)
    assert config.windows == tuple(None if kind == FULL else 512 for kind in KINDS)
    assert config.of_layer(2).head_dim == 128


@pytest.mark.parametrize(("same", "heads"), [(True, 1), (False, 2)])
def test_keys_that_are_values_may_have_fewer_heads(tmp_path: Path, same: bool, heads: int) -> None:
    said = {"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": same}
    assert read_config(write(tmp_path, GEMMA4 | said)).of_layer(2).kv_heads == heads


def test_both_styles_say_the_same(tmp_path: Path) -> None:
    old = {"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    layers = {str(i): {"head_dim": 128, "num_key_value_heads": 1} for i, kind in enumerate(KINDS) if kind == FULL}
    new = {"attention_k_eq_v": True, "per_layer_config": layers}
    one, other = (read_config(write(tmp_path, GEMMA4 | said)) for said in (old, new))
    assert one == other


def test_the_last_layer_has_no_window(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GEMMA4 | {"layer_types": [SLIDING] * 8}))
    assert config.windows == (512,) * 7 + (None,)


def test_layers_that_read_the_kv_of_others_have_no_pages(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GEMMA4 | {"global_head_dim": 128, "num_kv_shared_layers": 4}))
    assert config.kv_layers == (0, 1, 2, 3, 3, 2, 3, 2)
    layout = config.kv_layout(16, "bfloat16")
    assert sorted(layer for group in layout.groups for layer in group.layers) == [0, 1, 2, 3]
    whole = read_config(write(tmp_path, GEMMA4 | {"global_head_dim": 128})).kv_layout(16, "bfloat16")
    assert layout.token_bytes < whole.token_bytes


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_shared_layers": 8}, "'num_kv_shared_layers' is 8, must be 0 .. 7"),
    ({"num_kv_shared_layers": -1}, "'num_kv_shared_layers' is -1, must be 0 .. 7"),
    (
        {"num_kv_shared_layers": 6},
        "'num_kv_shared_layers' is 6, no layer before layer 2 has its type, 'full_attention'",
    ),
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "8 attention heads cannot share 3 KV heads evenly"),
    ({"global_head_dim": 0}, "'global_head_dim' is 0, must be at least 1"),
    ({"per_layer_config": {"3": {"sliding_window": 7}}}, "'per_layer_config' changes 'sliding_window' in layer 3"),
    ({"per_layer_config": {"3": 5}}, "'3' is 5"),
    ({"num_kv_shared_layers": 3, "per_layer_config": {"7": {"head_dim": 32}}}, "no layer before layer 7 has its type"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(write(tmp_path, GEMMA4 | changes))
