"""Writes a case's directory with transformers: model, processor in either layout, tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tests.model.vision.cases import IMAGE, Case
from tests.support.checkpoints import byte_tokenizer

SPECIAL = ["<image>", "<bos>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    library = byte_tokenizer()
    names = SPECIAL + TILES
    while library.get_vocab_size() < IMAGE:
        library.add_tokens([AddedToken(f"<unused{library.get_vocab_size()}>")])
    library.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    assert library.token_to_id("<image>") == IMAGE
    special = {"bos_token": "<bos>", "eos_token": "<|end|>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=library, **special)


def write(case: Case, directory: Path, classic: bool = True) -> Path:
    """classic: the image processor has a file of its own, else it stands in the processor's (transformers 5)."""
    make_model(case).save_pretrained(directory)
    if classic:
        tokenizer().save_pretrained(directory)
        values = json.loads(case.processor(**case.images).to_json_string())
        (directory / "preprocessor_config.json").write_text(json.dumps(values))
    else:
        processor(case, 16).save_pretrained(directory)
        assert not (directory / "preprocessor_config.json").exists()
    return directory


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    return draw(hf.AutoModelForImageTextToText.from_config(case.config()).eval())


def draw(model: nn.Module) -> nn.Module:
    """Gives it random weights that make greedy decoding have clear winners."""
    drawn: set[int] = set()
    with torch.no_grad():
        for name, module in model.named_modules():
            for part, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in drawn:
                    _draw(module, f"{name}.{part}", parameter)
                drawn.add(id(parameter))
        if isinstance(
            model, hf.PaliGemmaForConditionalGeneration
        ):  # tied and scaled: else every token is followed by itself
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def _draw(module: nn.Module, name: str, parameter: Tensor) -> None:
    if name.endswith("bias"):
        parameter.normal_(0.0, 0.25)
    elif "norm" in name and parameter.ndim == 1:
        parameter.uniform_(0.5, 1.5)
        if isinstance(module, GemmaRMSNorm | Gemma2RMSNorm):
            parameter.sub_(1.0)
    elif isinstance(module, nn.Embedding):
        parameter.normal_(0.0, 0.5)
    else:
        parameter.normal_(0.0, 1.6 * parameter[0].numel() ** -0.5)


def processor(case: Case, features: int) -> Any:
    """transformers' own, for features of a tile."""
    images, text = case.processor(**case.images), tokenizer()
    if case.kind is hf.PaliGemmaConfig:
        images.image_seq_length = features
        return hf.PaliGemmaProcessor(images, text)
    if case.kind is hf.LlavaConfig:
        return hf.LlavaProcessor(
            images,
            text,
            patch_size=8,
            vision_feature_select_strategy=case.top.get("vision_feature_select_strategy", "default"),
            num_additional_image_tokens=1 if case.tower == "clip_vision_model" else 0,
        )
    # SmolVLM's writes the same strings, but wants packages for videos.
    return Idefics3Processor(images, text, image_seq_len=features)
