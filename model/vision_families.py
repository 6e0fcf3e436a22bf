"""All families of vision-language models, by the architecture in config.json. Imports no torch."""

from model.gemma4_vision import GEMMA4, IMAGE, read_gemma4_vision
from model.multimodal import IDEFICS3, LLAVA, PALIGEMMA, SMOLVLM, VisionLanguageFamily
from model.qwen_vl import (
    IMAGE_TOKEN,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_5_IMAGE_TOKEN,
    QWEN3_5_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    read_qwen_vision,
)


def _qwen(text: str, token: int = IMAGE_TOKEN, flat: bool = False) -> VisionLanguageFamily:
    """Returns a family of Qwen. Older ones are saved `flat`, and may say in the text's part that weights are tied."""
    return VisionLanguageFamily(text, "", token, tied_by_text=flat, texts=(text,), reader=read_qwen_vision, flat=flat)


KINDS = {
    PALIGEMMA: VisionLanguageFamily("gemma", "siglip_vision_model", 256000, tied=True, prefix_lm=True, first_position=1,
                    texts=("gemma", "gemma2")),
    LLAVA: VisionLanguageFamily("llama", "clip_vision_model", 32000, tied_by_text=True),
    IDEFICS3: VisionLanguageFamily("llama", "idefics3_vision", 128257),
    SMOLVLM: VisionLanguageFamily("llama", "smolvlm_vision", 128257),
    GEMMA4: VisionLanguageFamily("gemma4_text", "", IMAGE, tied=True, texts=("gemma4_text",),
                    reader=read_gemma4_vision),
    QWEN2_VL: _qwen("qwen2_vl_text", flat=True),
    QWEN2_5_VL: _qwen("qwen2_5_vl_text", flat=True),
    QWEN3_VL: _qwen("qwen3_vl_text"),
    QWEN3_VL_MOE: _qwen("qwen3_vl_moe_text"),
    QWEN3_5: _qwen("qwen3_5_text", QWEN3_5_IMAGE_TOKEN),
    QWEN3_5_MOE: _qwen("qwen3_5_moe_text", QWEN3_5_IMAGE_TOKEN),
}  # fmt: skip
