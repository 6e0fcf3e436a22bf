"""Writes a case's directory with transformers: model, processor in either layout, tokenizer."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tests.model.vision.cases import GRIDS, IMAGE, QWEN, Case
from tests.support.checkpoints import byte_tokenizer

ADDS_ONE = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
SPECIAL = ["<image>", "<bos>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
ENDS = ["<begin_of_image>", "<end_of_image>"]  # Gemma 4's
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    library = byte_tokenizer()
    names = SPECIAL + TILES + ENDS
    while library.get_vocab_size() < IMAGE:
        library.add_tokens([AddedToken(f"<unused{library.get_vocab_size()}>")])
    library.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    assert library.token_to_id("<image>") == IMAGE
    special = {"bos_token": "<bos>", "eos_token": "<|end|>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=library, **special)


def write(case: Case, directory: Path, classic: bool = True) -> Path:
    """classic: the image processor has a file of its own, else it stands in the processor's (transformers 5)."""
    make_model(case).save_pretrained(directory)
    values = json.loads(case.processor(**case.images).to_json_string())
    if classic:
        tokenizer().save_pretrained(directory)
        (directory / "preprocessor_config.json").write_text(json.dumps(values))
    elif case.kind in GRIDS:  # its processor is not saved without packages for videos
        tokenizer().save_pretrained(directory)
        (directory / "processor_config.json").write_text(json.dumps({"image_processor": values}))
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
        for name, buffer in model.named_buffers():
            _draw_buffer(name, buffer)
        if isinstance(
            model, hf.PaliGemmaForConditionalGeneration | hf.Gemma4ForConditionalGeneration
        ):  # tied and scaled: else every token is followed by itself
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def _draw_buffer(name: str, buffer: Tensor) -> None:
    """Gemma 4's numbers that are no parameters: bounds that few products reach, and factors."""
    if name.endswith(("layer_scalar", "std_scale")):
        buffer.uniform_(0.5, 1.5)
    elif name.endswith("std_bias"):
        buffer.normal_(0.0, 1.0)
    elif name.endswith(("input_min", "output_min")):
        buffer.fill_(-1.5)
    elif name.endswith(("input_max", "output_max")):
        buffer.fill_(1.25)


def _draw(module: nn.Module, name: str, parameter: Tensor) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(-5.0, -1.0)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.25)
    elif "norm" in name and parameter.ndim == 1:
        parameter.uniform_(0.5, 1.5)
        if isinstance(module, GemmaRMSNorm | Gemma2RMSNorm) or type(module).__name__ in ADDS_ONE:
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
    if case.kind is hf.Gemma4Config:
        text.image_token, text.image_token_id, text.boi_token, text.eoi_token = SPECIAL[0], IMAGE, *ENDS
        text.pad_token = SPECIAL[1]
        text.audio_token = text.boa_token = text.eoa_token = SPECIAL[1]  # it wants some, of what is not asked for
        with mock.patch.object(hf.ProcessorMixin, "check_argument_for_proper_class"):
            return hf.Gemma4Processor(None, images, text, None)
    if case.kind in QWEN:
        text.image_token = SPECIAL[0]  # as the Hub's tokenizers name theirs
        with mock.patch.object(hf.ProcessorMixin, "check_argument_for_proper_class"):  # of videos, which wants packages
            return (hf.Qwen3VLProcessor if case.name.startswith("qwen3") else hf.Qwen2VLProcessor)(images, text)
    # SmolVLM's writes the same strings, but wants packages for videos.
    return Idefics3Processor(images, text, image_seq_len=features)
