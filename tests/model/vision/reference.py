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

DROPPED = ("labels", "token_type_ids", "num_soft_tokens_per_image")


def inputs(processor: Any, prompt: str, images: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
    pictures = [Image.fromarray(image) for image in images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, inside PaliGemma's processor
        made = processor(images=[pictures], text=[prompt], return_tensors="pt")
    return {key: value for key, value in made.items() if key not in DROPPED} | (
        {"token_type_ids": torch.zeros_like(made["input_ids"])} if "labels" in made else {}
    )


@torch.inference_mode()
def features(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    """[depths, all features, hidden]"""
    wanted = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids")
    found = model.model.get_image_features(**{key: values[key] for key in wanted if key in values})
    made = found.pooler_output
    first = torch.cat(list(made)) if isinstance(made, list | tuple) else made.flatten(0, 1)
    return torch.stack([first, *(torch.cat(list(depth)) for depth in getattr(found, "deepstack_features", ()))])


@torch.inference_mode()
def logits(model: nn.Module, case: Case, values: dict[str, Tensor]) -> Tensor:
    """[ids, vocabulary]"""
    return model(**values, use_cache=False).logits[0]
