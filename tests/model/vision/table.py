"""Vision-language models in docs/reference/families.md; `tests.model.families.table` writes that page."""

import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.model.vision.cases import BY_NAME, CASES, Case
from tests.model.vision.seen import NEW, PROMPTS, TEXTS
from tests.model.vision.test_faults import FAULTS
from tests.model.vision.test_nano import SIZES
from tests.model.vision.test_styles import STYLED

FAMILIES: dict[type[hf.PretrainedConfig], str] = {
    hf.PaliGemmaConfig: "PaliGemma, PaliGemma 2",
    hf.LlavaConfig: "LLaVA 1.5",
    hf.Idefics3Config: "Idefics3",
    hf.SmolVLMConfig: "SmolVLM",
    hf.Gemma4Config: "Gemma 4",
    hf.Qwen2VLConfig: "Qwen2-VL",
    hf.Qwen2_5_VLConfig: "Qwen2.5-VL",
    hf.Qwen3VLConfig: "Qwen3-VL",
    hf.Qwen3VLMoeConfig: "Qwen3-VL MoE",
    hf.Qwen3_5Config: "Qwen 3.5",
    hf.Qwen3_5MoeConfig: "Qwen 3.5 MoE",
}
NANO = {
    "plain": "the first version, one square before the text",
    "square": "a placeholder token",
    "split": "tiles",
    "overview": "the whole image and tiles",
    "stretched": "small images made larger",
}
"""By name of its versions."""

STYLES = {"a head": "a tied model's output layer saved too", "buffers": "frequencies and numbers of positions"}
"""What some names of styles mean."""

HEAD = f"""
## Models that see

What the tests in `tests/model/vision/` check of models that take images, each tiny and random too. For each of
transformers':

- Pixels, grids, placeholders, ids and rotary positions equal those of transformers' processors and models, from either
  layout of the processor's files, for images from 1 x 1 to 4,000 x 100 pixels. Transparent images stand on white.
- Features and logits equal transformers', and so do greedy ids for {len(PROMPTS)} prompts with one or two images and
  {len(TEXTS)} without, {NEW} new ones each, in one mixed batch.
- Ids are the same and logits have the same bits with pages of 1, 7 and 16 tokens, with few rows, pipelined, without the
  prefix cache and with `--recompute`. Ids are the same under preemption, and in chunks that end in an image where
  prompts can be divided.
- Every tensor is accounted for, under the names of the Hub and of transformers 4 and 5.

Text and ids of conversations equal those of the processors of LLaVA and SmolVLM (`tests/model/vision/test_chat.py`).
nanoVLM's tiles of images of {len(SIZES)} sizes, its features, logits and ids equal those of a statement of its
published source.

| family | `architectures` | variants | other names and tensors | planted faults |
|---|---|---|---|---|
"""


def architecture(case: Case) -> str:
    return str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[case.kind.model_type])


def render() -> str:
    rows = []
    for kind, family in FAMILIES.items():
        cases = [case for case in CASES if case.kind is kind]
        styles = dict.fromkeys(STYLES.get(name, name) for case, name, _ in STYLED if case in cases)
        faults = sum(BY_NAME[fault.case] in cases for fault in FAULTS)
        variants = "; ".join(case.covers for case in cases)
        rows.append(f"| {family} | `{architecture(cases[0])}` | {variants} | {'; '.join(styles)} | {faults} |\n")
    variants = "; ".join(NANO.values())
    rows.append(f"| nanoVLM | none, but `vit_hidden_dim` | {variants} | tied weights under either name | - |\n")
    return HEAD + "".join(rows)
