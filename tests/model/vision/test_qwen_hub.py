"""Law: config.json of Qwen's vision-language models, as on the Hub, is read as transformers reads it.

Written down from copies in public code and from memory, not from the Hub: a key may be missing or too much.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from model.config import read_config
from model.qwen_vl import GridShape, read_grid_shape

pytestmark = pytest.mark.sample(3)

TOKENS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
          "vision_end_token_id": 151653}  # fmt: skip
FLAT = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "max_position_embeddings": 32768, "num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936, "max_window_layers": 28,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_token_id": 151654, **TOKENS,
}  # fmt: skip
TALL = {"depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3,
        "intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304,
        "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "deepstack_visual_indexes": [5, 11, 17], "initializer_range": 0.02}  # fmt: skip
ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
TEXT3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": ROPE,
    "rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], GridShape]] = {
    "Qwen2-VL-2B": (
        FLAT | {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 1536,
                "intermediate_size": 8960,
                "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                                  "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2,
                                  "spatial_patch_size": 14, "temporal_patch_size": 2}},
        GridShape(2, 2),
    ),
    "Qwen2.5-VL-3B": (
        FLAT | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
                "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 36, "intermediate_size": 11008,
                "max_position_embeddings": 128000, "max_window_layers": 70,
                "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                                  "num_heads": 16, "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14,
                                  "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                                  "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
                                  "temporal_patch_size": 2}},
        GridShape(2, 2, window=4, full=(7, 15, 23, 31)),
    ),
    "Qwen3-VL-2B": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": TEXT3,
         "tie_word_embeddings": True, "vision_config": TALL, **TOKENS},
        GridShape(2, 2, places=48, taps=(5, 11, 17)),
    ),
    "Qwen3-VL-30B-A3B": (
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
         "text_config": TEXT3 | {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": [],
                                 "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
                                 "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
                                 "num_hidden_layers": 48, "tie_word_embeddings": False},
         "tie_word_embeddings": False,
         "vision_config": TALL | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
                                  "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [8, 16, 24]}, **TOKENS},
        GridShape(2, 2, places=48, taps=(8, 16, 24)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_is_read_as_transformers_does(name: str, tmp_path: Path) -> None:
    values, grid = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = read_config(tmp_path), hf.AutoConfig.from_pretrained(tmp_path)
    text, tower = theirs.text_config, theirs.vision_config
    assert (ours.vocabulary, ours.hidden, ours.layers) == (text.vocab_size, text.hidden_size, text.num_hidden_layers)
    assert (ours.heads, ours.kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    assert (ours.context, set(ours.windows)) == (text.max_position_embeddings, {None})
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert (ours.dtype, ours.eos_token_ids) == ("bfloat16", (151645,))
    assert ours.vision is not None
    assert ours.vision.image_token_id == theirs.image_token_id
    shape = ours.vision.tower
    width = tower.embed_dim if hasattr(tower, "embed_dim") else tower.hidden_size
    inner = width * tower.mlp_ratio if hasattr(tower, "mlp_ratio") else tower.intermediate_size
    assert (shape.hidden, shape.intermediate, shape.layers, shape.heads) == (width, inner, tower.depth, tower.num_heads)
    assert (shape.patch, shape.activation) == (tower.patch_size, tower.hidden_act)
    assert read_grid_shape(ours.vision.fields, ours.architecture, shape) == grid
    assert ours.vision.deepstack == tuple(range(len(grid.taps)))
    assert ours.vision.pair_axes == transformers_axes(theirs)


def transformers_axes(config: Any) -> tuple[int, ...]:
    """Axis of each pair: of angles that say their axis, transformers' model chooses one for each pair."""
    with torch.device("meta"):
        small = type(config)(**{**config.to_dict(), "architectures": None})
        small.text_config.num_hidden_layers, small.vision_config.depth = 1, 1
        rotary = hf.AutoModelForImageTextToText.from_config(small).model.language_model.rotary_emb
    pairs = rotary.inv_freq.shape[0]
    chosen = rotary.recomposition_frequencies(torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, pairs).clone())
    return tuple(int(axis) for axis in chosen.flatten()[:pairs])
