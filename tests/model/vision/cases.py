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
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
CAUSAL = tuple(case for case in CASES if case.kind is not hf.PaliGemmaConfig)
