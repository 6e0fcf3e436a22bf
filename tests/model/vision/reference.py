"""Results of transformers' models with the same prompt."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.model.vision.cases import Case


def inputs(processor: Any, prompt: str, images: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
    pictures = [Image.fromarray(image) for image in images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, inside PaliGemma's processor
        made = processor(images=[pictures], text=[prompt], return_tensors="pt")
    return {key: value for key, value in made.items() if key not in ("labels", "token_type_ids")} | (
        {"token_type_ids": torch.zeros_like(made["input_ids"])} if "labels" in made else {}
    )


@torch.inference_mode()
def features(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    """[all features, hidden]"""
    wanted = {key: values[key] for key in ("pixel_values", "pixel_attention_mask") if key in values}
    made = model.model.get_image_features(**wanted).pooler_output
    return torch.cat(list(made)) if isinstance(made, list | tuple) else made.flatten(0, 1)


@torch.inference_mode()
def logits(model: nn.Module, case: Case, values: dict[str, Tensor]) -> Tensor:
    """[ids, vocabulary]"""
    return model(**values, use_cache=False).logits[0]
