"""Files of checkpoints on the Hugging Face Hub, with the keys and values that they have there, and how each is made
small. Written down from copies in public code and from memory, not from the Hub: a key may be missing or too much.

Keys that they lack are lacking here too. Only ids of tokens are those of the tests' own tokenizer, and what no
program reads is left out (names of paths, versions, the defaults that some hold of generation).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.model.vision.cases import IMAGE

Values = dict[str, Any]

BEGIN, END = 321, 0
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392156862745098}
STEPS = {"do_normalize": True, "do_rescale": True, "do_resize": True}


@dataclass(frozen=True, eq=False)
class Published:
    """The files of one checkpoint.

    Attributes:
        images: The file of its image processor.
        template: Template of conversations.
        smaller: Values of 'text_config' and 'vision_config' in the small one, and `sides` of its images in place of
            those in `images`.
        old_names: Tensors stand under the names of transformers before 4.52.
    """

    name: str
    config: Values
    images: Values
    processor: Values
    text: Values
    tower: Values
    sides: Mapping[int, int]
    generation: Values = field(default_factory=dict)
    template: str | None = None
    old_names: bool = True

    def __str__(self) -> str:
        return self.name

    def small(self) -> tuple[Values, Values]:
        """config.json and preprocessor_config.json."""
        config = self.config | {
            "text_config": self.config["text_config"] | {"vocab_size": 420} | self.text,
            "vision_config": resized(self.config["vision_config"], self.sides) | self.tower,
        }
        top = {"vocab_size": 420, "hidden_size": 64, "projection_dim": 64}
        config |= {key: value for key, value in top.items() if key in config}
        return config, resized(self.images, self.sides)


def resized(values: Values, sides: Mapping[int, int]) -> Values:
    """With other sides of images, wherever they stand."""
    keys = ("height", "width", "shortest_edge", "longest_edge", "image_size")

    def of(key: str, value: object) -> object:
        if isinstance(value, dict):
            return resized(value, sides)
        return sides[value] if key in keys and isinstance(value, int) else value

    return {key: of(key, value) for key, value in values.items()}


TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}

# PaliGemma.


def _siglip_images(side: int, kind: str, **more: object) -> Values:
    size = {"height": side, "width": side}
    return STEPS | HALF | {
        "do_convert_rgb": None, "image_processor_type": "SiglipImageProcessor", "processor_class": kind, "resample": 3,
        "size": size, **more,
    }  # fmt: skip


def _paligemma(name: str, side: int, small_side: int, text: Values, top: Values, smaller: Values) -> Published:
    tokens = (side // 14) ** 2
    tower = {
        "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "num_image_tokens": tokens, "patch_size": 14, "projection_dim": text["hidden_size"],
        "projector_hidden_act": "gelu_fast", "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"], "bos_token_id": BEGIN, "eos_token_id": END,
        "ignore_index": -100, "image_token_index": IMAGE, "model_type": "paligemma", "pad_token_id": 0,
        "text_config": text | {"num_image_tokens": tokens, "vocab_size": 257216},
        "vision_config": tower | ({} if side == 224 else {"image_size": side}),
        **top,
    }  # fmt: skip
    return Published(
        name, config, _siglip_images(side, "PaliGemmaProcessor", image_seq_length=tokens), {}, smaller,
        TOWER | {"image_size": small_side, "projection_dim": 64}, {side: small_side},
        {"_from_model_config": True, "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": 0},
    )  # fmt: skip


GEMMA = {
    "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "torch_dtype": "float32",
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "cache_implementation": "hybrid", "eos_token_id": [END, 107],
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216, "model_type": "gemma2",
    "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
ONE = {"hidden_size": 2048, "projection_dim": 2048, "torch_dtype": "float32", "vocab_size": 257216}
TWO = {"projection_dim": 2304, "torch_dtype": "bfloat16", "_vocab_size": 257216, "_attn_implementation": "eager"}
SMALL_GEMMA2 = TEXT | {"num_key_value_heads": 2, "num_hidden_layers": 4}

# LLaVA.

VICUNA = {
    "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
    "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 5, "eos_token_id": END, "hidden_size": 1024,
    "intermediate_size": 2816, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 152000,
}  # fmt: skip
CLIP = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CLIP_IMAGES = STEPS | {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "LlavaProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
}  # fmt: skip


def _llava(text: Values, tower: Values, **top: object) -> Values:
    return {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": IMAGE,
        "model_type": "llava", "projector_hidden_act": "gelu", "text_config": text, "torch_dtype": "float16",
        "vision_config": tower, **top,
    }  # fmt: skip


DEFAULT = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def _llava_processor(strategy: str, additional: int) -> Values:
    return {
        "image_token": "<image>", "num_additional_image_tokens": additional, "patch_size": 14,
        "processor_class": "LlavaProcessor", "vision_feature_select_strategy": strategy,
    }  # fmt: skip


LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
INTERLEAVE_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{# Render all text next #}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + content['text'] }}{% endfor %}{{'<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Idefics3 and SmolVLM.


def _template(beginning: str, parts: str) -> str:
    return (
        beginning + "{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}" + parts + "{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


IDEFICS3_TEMPLATE = _template("<|begin_of_text|>", "")
SMOLVLM_TEMPLATE = _template("<|im_start|>", "")
SMOLVLM2_TEMPLATE = _template("<|im_start|>", "{% elif line['type'] == 'video' %}{{ '<video>' }}")
PERCEIVER = {
    "_name_or_path": "", "model_type": "vllama3", "num_key_value_heads": 1, "resampler_depth": 6,
    "resampler_head_dim": 96, "resampler_n_heads": 16, "resampler_n_latents": 64, "tie_word_embeddings": True,
    "torch_dtype": None,
}  # fmt: skip


def _vllama(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, **more: object) -> Values:
    return {
        "_flash_attn_2_enabled": True, "_name_or_path": "None", "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64, "hidden_size": hidden, "is_llama_config": True, "max_position_embeddings": 8192,
        "model_type": "llama", "neftune_noise_alpha": 0.0, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "pad_token_id": 2, "perceiver_config": PERCEIVER, "pixel_shuffle_factor": 4,
        "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_theta": 100000,
        "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "use_resampler": False, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def _base_tower(kind: str, **more: object) -> Values:
    return {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": kind,
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        **more,
    }  # fmt: skip


def _large_tower(kind: str, side: int, most: int) -> Values:
    return {
        "hidden_size": 1152, "image_size": side, "intermediate_size": 4304, "max_image_size": {"longest_edge": side},
        "model_type": kind, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        "size": {"longest_edge": most}, "tie_word_embeddings": False,
    }  # fmt: skip


def _tiled(kind: str, scale: int, text: Values, tower: Values, vocabulary: int | None, **top: object) -> Values:
    return {
        "architectures": [f"{kind}ForConditionalGeneration"], "image_token_id": IMAGE, "model_type": kind.lower(),
        "pad_token_id": 2, "scale_factor": scale, "text_config": text, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vision_config": tower,
        **({} if vocabulary is None else {"vocab_size": vocabulary}), **top,
    }  # fmt: skip


def _tiled_images(kind: str, side: int, most: int, **more: object) -> Values:
    return STEPS | HALF | {
        "do_convert_rgb": True, "do_image_splitting": True, "do_pad": True,
        "image_processor_type": f"{kind}ImageProcessor", "max_image_size": {"longest_edge": side},
        "processor_class": f"{kind}Processor", "resample": 1, "size": {"longest_edge": most}, **more,
    }  # fmt: skip


def _words(kind: str, tokens: int) -> Values:
    return {"image_seq_len": tokens, "processor_class": f"{kind}Processor"}


VIDEO = {"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}}
SMALL_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
               "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SMALL_BASE = {"hidden_size": 32, "num_attention_heads": 4}  # 12 layers 3,072 wide, which these files leave unsaid
BASE_SIDES, LARGE_SIDES = {512: 128, 2048: 256}, {384: 90, 1536: 360}
ENDS = {"_from_model_config": True, "bos_token_id": 5, "eos_token_id": END, "pad_token_id": 2}

PUBLISHED = (
    _paligemma("google/paligemma-3b-pt-224", 224, 42, GEMMA, ONE, TEXT),
    _paligemma("google/paligemma-3b-mix-448", 448, 56, GEMMA, ONE, TEXT),
    _paligemma("google/paligemma2-3b-pt-224", 224, 42, GEMMA2, TWO, SMALL_GEMMA2),
    _paligemma("google/paligemma2-3b-mix-448", 448, 56, GEMMA2, TWO, SMALL_GEMMA2 | {"sliding_window": 12}),
    Published("llava-hf/llava-1.5-7b-hf",
              _llava(VICUNA, CLIP, pad_token_id=322, tie_word_embeddings=False, vocab_size=32064, **DEFAULT),
              CLIP_IMAGES, _llava_processor("default", 1), TEXT, TOWER, {336: 42}, ENDS, LLAVA_TEMPLATE),
    Published("llava-hf/bakLlava-v1-hf",
              _llava(MISTRAL, CLIP, pad_token_id=322, vocab_size=32064, **DEFAULT), CLIP_IMAGES,
              _llava_processor("default", 1), TEXT | {"num_key_value_heads": 2}, TOWER, {336: 42}, ENDS,
              LLAVA_TEMPLATE),
    Published("llava-hf/llava-interleave-qwen-0.5b-hf",
              _llava(QWEN, SIGLIP, tie_word_embeddings=False, **FULL), _siglip_images(384, "LlavaProcessor"),
              _llava_processor("full", 0), TEXT | {"num_key_value_heads": 4}, TOWER, {384: 48}, ENDS,
              INTERLEAVE_TEMPLATE),
    Published("HuggingFaceTB/SmolVLM-256M-Instruct",
              _tiled("Idefics3", 4, _vllama(30, 576, 9, 3, 49280, intermediate_size=1536), _base_tower("idefics3"),
                     49280),
              _tiled_images("Idefics3", 512, 2048), _words("Idefics3", 64), SMALL_LLAMA, SMALL_BASE, BASE_SIDES, ENDS,
              SMOLVLM_TEMPLATE, old_names=False),
    Published("HuggingFaceTB/SmolVLM-500M-Instruct",
              _tiled("Idefics3", 4, _vllama(32, 960, 15, 5, 49280, intermediate_size=2560), _base_tower("idefics3"),
                     49280),
              _tiled_images("Idefics3", 512, 2048), _words("Idefics3", 64), SMALL_LLAMA, SMALL_BASE, BASE_SIDES, ENDS,
              SMOLVLM_TEMPLATE, old_names=False),
    Published("HuggingFaceTB/SmolVLM-Instruct",
              _tiled("Idefics3", 3, _vllama(24, 2048, 32, 32, 49155, intermediate_size=8192, rope_theta=273768.0,
                                            max_position_embeddings=16384), _large_tower("idefics3", 384, 1536),
                     49155, image_seq_len=81),
              _tiled_images("Idefics3", 384, 1536), _words("Idefics3", 81), SMALL_LLAMA, TOWER, LARGE_SIDES, ENDS,
              SMOLVLM_TEMPLATE, old_names=False),
    Published("HuggingFaceTB/SmolVLM2-2.2B-Instruct",
              _tiled("SmolVLM", 3, _vllama(24, 2048, 32, 32, 49280, intermediate_size=8192, rope_theta=130000),
                     _large_tower("smolvlm_vision", 384, 1536), 49280, torch_dtype="float32"),
              _tiled_images("SmolVLM", 384, 1536, **VIDEO), _words("SmolVLM", 81), SMALL_LLAMA, TOWER,
              LARGE_SIDES | {512: 90}, ENDS, SMOLVLM2_TEMPLATE, old_names=False),
    Published("HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
              _tiled("SmolVLM", 4, _vllama(30, 576, 9, 3, 49280, intermediate_size=1536),
                     _base_tower("smolvlm_vision", use_base_siglip=False), 49280, torch_dtype="float32"),
              _tiled_images("SmolVLM", 512, 2048, **VIDEO), _words("SmolVLM", 64), SMALL_LLAMA, SMALL_BASE, BASE_SIDES,
              ENDS, SMOLVLM2_TEMPLATE, old_names=False),
    Published("HuggingFaceM4/Idefics3-8B-Llama3",
              _tiled("Idefics3", 2,
                     {"architectures": ["VLlama3ForCausalLM"], "bos_token_id": BEGIN, "eos_token_id": END,
                      "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "llama",
                      "num_key_value_heads": 8, "pad_token_id": 2, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
                      "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                       "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                      "torch_dtype": "bfloat16", "vocab_size": 128259},
                     {"hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "idefics3",
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}, None),
              _tiled_images("Idefics3", 364, 1456), _words("Idefics3", 169), TEXT | {"num_key_value_heads": 2}, TOWER,
              {364: 56, 1456: 224}, ENDS | {"eos_token_id": [END, 7]}, IDEFICS3_TEMPLATE, old_names=False),
)  # fmt: skip
