"""Models that see, as tiny checkpoints that can be written: one `Case` each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

TEXT = {
    "vocab_size": 420,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 0.02,
    "bos_token_id": 321,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 0.02,
}
FINE = {"patch_size": 4}  # 8 x 8 patches
GRID_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "depth": 4,
    "num_heads": 4,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
QWEN = (
    hf.Qwen2VLConfig, hf.Qwen2_5_VLConfig, hf.Qwen3VLConfig, hf.Qwen3VLMoeConfig, hf.Qwen3_5Config, hf.Qwen3_5MoeConfig,
)  # fmt: skip
GEMMA4_TEXT = {
    "head_dim": 16, "num_hidden_layers": 4, "global_head_dim": 32, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1, "pad_token_id": 0,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 420,
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 200,
    "rms_norm_eps": 0.02,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
GRIDS = (*QWEN, hf.Gemma4Config)
"""Those whose images have any resolution."""
IMAGE = 320  # the first id that the byte tokenizer leaves free


@dataclass(frozen=True, eq=False)
class Case:
    """text, tower: 'model_type's, and what they say beside TEXT and TOWER. top: of the whole config. processor: of
    images, what its files say. covers: what it stands for, for docs/reference/families.md.
    """

    name: str
    covers: str
    kind: type[hf.PretrainedConfig]
    text: str
    tower: str
    processor: type[Any]
    images: Mapping[str, Any]
    more_text: Mapping[str, Any] = field(default_factory=dict)
    more_tower: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def config(self) -> hf.PretrainedConfig:
        if self.kind in QWEN:
            return self.kind(
                text_config={**TEXT, "model_type": self.text, "rope_parameters": ROPE, **self.more_text},
                vision_config={**GRID_TOWER, "model_type": self.tower, **self.more_tower},
                dtype="float32",
                image_token_id=IMAGE,
                **self.top,
            )
        if self.kind is hf.Gemma4Config:
            return self.kind(
                text_config={**TEXT, "model_type": self.text, **GEMMA4_TEXT, **self.more_text},
                vision_config={**GEMMA4_TOWER, "model_type": self.tower, **self.more_tower},
                dtype="float32",
                **{"image_token_id": IMAGE, "video_token_id": 418, "audio_token_id": 419, **self.top},
            )
        key = "image_token_id" if self.kind in (hf.Idefics3Config, hf.SmolVLMConfig) else "image_token_index"
        return self.kind(
            text_config={**TEXT, "model_type": self.text, **self.more_text},
            vision_config={**TOWER, "model_type": self.tower, **self.more_tower},
            dtype="float32",
            **{key: IMAGE},
            **self.top,
        )


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
SQUARE = {"size": {"height": 32, "width": 32}}
CROPPED = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
SPLIT = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
PIXELS = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
HALF_TURNED = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
TAPPED = {"num_position_embeddings": 25, "deepstack_visual_indexes": [2, 0]}
BUDGET = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
GEMMA = {"head_dim": 16, "num_key_value_heads": 1}

CASES = (
    Case("paligemma", "Gemma, positions from 1",
         hf.PaliGemmaConfig, "gemma", SIGLIP, hf.SiglipImageProcessorPil,
         SQUARE | {"image_seq_length": 16}, GEMMA, {"vision_use_head": False}, {"projection_dim": 64}),
    Case("paligemma2", "Gemma 2 with a soft cap and its own query scale",
         hf.PaliGemmaConfig, "gemma2", SIGLIP, hf.SiglipImageProcessorPil,
         SQUARE | {"image_seq_length": 16}, GEMMA | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 9.0},
         {"vision_use_head": False}, {"projection_dim": 64}, seed=1),
    Case("llava-clip", "CLIP and Llama, images cropped",
         hf.LlavaConfig, "llama", CLIP, hf.CLIPImageProcessorPil, CROPPED),
    Case("llava-pad", "images padded to squares, CLIP's first feature kept, tied embeddings",
         hf.LlavaConfig, "llama", CLIP, hf.LlavaImageProcessorPil, CROPPED | {"do_pad": True},
         {"tie_word_embeddings": True}, top={"vision_feature_select_strategy": "full"}, seed=2),
    Case("llava-layers", "features of several layers, Mistral, no projector biases",
         hf.LlavaConfig, "mistral", CLIP, hf.CLIPImageProcessorPil, CROPPED,
         {"sliding_window": None}, top={"vision_feature_layer": [-2, 1], "multimodal_projector_bias": False}, seed=3),
    Case("llava-siglip", "SigLIP and Qwen2, an image size that is no multiple of a patch",
         hf.LlavaConfig, "qwen2", SIGLIP, hf.SiglipImageProcessorPil,
         {"size": {"height": 35, "width": 35}}, more_tower={"image_size": 35},
         top={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, seed=4),
    Case("idefics3", "tiles and the whole image",
         hf.Idefics3Config, "llama", "idefics3_vision", hf.Idefics3ImageProcessorPil, SPLIT,
         more_tower=FINE, seed=5),
    Case("idefics3-positions", "tiles smaller than the encoder's image",
         hf.Idefics3Config, "llama", "idefics3_vision", hf.Idefics3ImageProcessorPil,
         {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 24}}, more_tower=FINE, seed=6),
    Case("smolvlm", "squares of 16 patches a feature, tied embeddings",
         hf.SmolVLMConfig, "llama", "smolvlm_vision", hf.SmolVLMImageProcessorPil, SPLIT,
         {"tie_word_embeddings": True}, FINE, {"scale_factor": 4, "tie_word_embeddings": True}, seed=7),
    Case("smolvlm-whole", "no tiles",
         hf.SmolVLMConfig, "llama", "smolvlm_vision", hf.SmolVLMImageProcessorPil,
         SPLIT | {"do_image_splitting": False}, more_tower=FINE, seed=8),
    Case("qwen2-vl", "any resolution, axes in sections",
         hf.Qwen2VLConfig, "qwen2_vl_text", "qwen2_vl_vision", hf.Qwen2VLImageProcessorPil, PIXELS,
         more_tower={"embed_dim": 32, "mlp_ratio": 2}, seed=9),
    Case("qwen2.5-vl", "windows in the encoder, tied embeddings, windows in the text model",
         hf.Qwen2_5_VLConfig, "qwen2_5_vl_text", "qwen2_5_vl_vision", hf.Qwen2VLImageProcessorPil, PIXELS,
         {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
         {"window_size": 24, "fullatt_block_indexes": [1, 3]}, {"tie_word_embeddings": True}, seed=10),
    Case("qwen3-vl", "interleaved axes, learned positions, features added in several layers",
         hf.Qwen3VLConfig, "qwen3_vl_text", "qwen3_vl_vision", hf.Qwen2VLImageProcessorPil, PIXELS,
         {"head_dim": 16}, TAPPED, seed=11),
    Case("qwen3-vl-moe", "a mixture of experts, squares of 9 patches, other sections",
         hf.Qwen3VLMoeConfig, "qwen3_vl_moe_text", "qwen3_vl_moe_vision", hf.Qwen2VLImageProcessorPil,
         PIXELS | {"merge_size": 3, "temporal_patch_size": 1},
         {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 48,
          "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}},
         TAPPED | {"spatial_merge_size": 3, "temporal_patch_size": 1}, seed=12),
    Case("qwen3.5-vl", "recurrent layers, a part of each head turned by three axes",
         hf.Qwen3_5Config, "qwen3_5_text", "qwen3_5_vision", hf.Qwen2VLImageProcessorPil, PIXELS,
         DELTA | {"rope_parameters": HALF_TURNED}, {"num_position_embeddings": 25}, seed=13),
    Case("qwen3.5-vl-moe", "recurrent layers, experts beside a shared one",
         hf.Qwen3_5MoeConfig, "qwen3_5_moe_text", "qwen3_5_moe_vision", hf.Qwen2VLImageProcessorPil, PIXELS,
         DELTA | {"rope_parameters": HALF_TURNED, "num_experts": 6, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
         {"num_position_embeddings": 25}, seed=14),
)  # fmt: skip
CASES += (
    Case("gemma4-vision", "any resolution, pooled squares, inputs of layers beside images, shared KV",
         hf.Gemma4Config, "gemma4_text", "gemma4_vision", hf.Gemma4ImageProcessorPil, BUDGET,
         top={"boi_token_id": 361, "eoi_token_id": 362}, seed=15),
    Case("gemma4-vision-clipped", "bounds of products, features with bias and scale, experts beside MLPs",
         hf.Gemma4Config, "gemma4_text", "gemma4_vision", hf.Gemma4ImageProcessorPil,
         BUDGET | {"pooling_kernel_size": 3},
         {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48,
          "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
         {"pooling_kernel_size": 3, "position_embedding_size": 300, "use_clipped_linears": True, "standardize": True,
          "num_hidden_layers": 2},
         {"boi_token_id": 361, "eoi_token_id": 362}, seed=19),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
CAUSAL = tuple(case for case in CASES if case.kind is not hf.PaliGemmaConfig)
