"""A made-up family whose images have any resolution, with more depths and other places than the product's have.

Its processor keeps an image's size, in squares of 8 pixels. Its encoder makes one feature of each square, at three
depths. Its text model is a Llama that turns by three axes and adds two of the depths after layers 0 and 2. All of it
comes in by tables, as a family of the product would.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from model.architectures import registry
from model.architectures.llama import load_llama
from model.config import ModelConfig
from model.decoder import Decoder
from model.families import FAMILIES, Family
from model.fields import Fields
from model.forward import EncoderInput
from model.inputs.images import Pixels
from model.inputs.vision import registry as inputs_registry
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.processed import Normalisation, ProcessedImage
from model.inputs.vision.prompts import Repeated
from model.inputs.vision.registry import VisionCheckpoint
from model.inputs.vision.resize import resized, stacked
from model.layers import Product
from model.multimodal import TEXTS, TowerShape, Vision, VisionLanguageFamily
from model.tensors import Tensors
from model.vision import loading
from model.vision.tower import EncoderLayer, TowerAttention
from model.vision.towers import activation_of, load_mlp, norm
from model.vision_families import KINDS
from tests.model.vision import checkpoints
from tests.model.vision.cases import IMAGE, TEXT
from tests.support.sectioned import sectioned

NAME, TEXT_NAME = "MadeUpForConditionalGeneration", "MadeUpForCausalLM"
PATCH, SQUARE, AXES = 4, 8, 3
DEEPSTACK = (0, 2)
LAYERS = 3  # of text
TOWER = TowerShape("made_up_vision", 32, 48, 2, 4, 0, PATCH, 0.02, "gelu_pytorch_tanh")
FARTHEST = 64  # patches in a row or column


def squares(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of squares in an image of this size."""
    return max(1, round(height / SQUARE)), max(1, round(width / SQUARE))


def process(pixels: Pixels) -> ProcessedImage:
    rows, columns = squares(*pixels.shape[:2])
    pixels = resized(pixels, rows * SQUARE, columns * SQUARE, Image.Resampling.BICUBIC)
    positions = np.stack((np.zeros((rows, columns), np.int32), *np.indices((rows, columns), np.int32)))
    return ProcessedImage(stacked([pixels]), (1, rows, columns), positions=positions.reshape(AXES, -1))


@dataclass(frozen=True, eq=False)
class Encoder:
    """projection: of a patch. places: of rows and of columns, each [FARTHEST, width]. mergers: by depth."""

    projection: Product
    places: Tensor
    layers: Sequence[EncoderLayer]
    mergers: Sequence[Product]

    def __call__(self, images: Sequence[EncoderInput]) -> list[Tensor]:
        return [self._encode(image) for image in images]

    def _encode(self, image: EncoderInput) -> Tensor:
        _, rows, columns = image.grid
        patches = image.pixels[0].float().unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4)
        x = self.projection(patches.reshape(-1, 3 * PATCH**2) / 127.5 - 1)
        x = x.view(2 * rows, 2 * columns, -1) + self.places[0, : 2 * rows, None] + self.places[1, : 2 * columns]
        x = x.flatten(0, 1)[None]
        states = [x := layer(x) for layer in self.layers]
        return torch.stack(
            [
                merger(state.view(rows, 2, columns, 2, -1).transpose(1, 2).reshape(rows * columns, -1))
                for merger, state in zip(self.mergers, [states[-1], *states], strict=True)
            ]
        )


def read_inputs(checkpoint: VisionCheckpoint) -> ImageInputs:
    return ImageInputs(process, Repeated(checkpoint.marker), checkpoint.vision.image_token_id)


def read_vision(fields: Fields, kind: VisionLanguageFamily, text: str) -> Vision:
    return Vision(text, kind.image_token, False, TOWER, fields, AXES, DEEPSTACK)


def load_text(config: ModelConfig, tensors: Tensors) -> Decoder:
    return sectioned(load_llama(config, tensors))


def load_encoder(config: ModelConfig, vision: Vision, tensors: Tensors, _: Normalisation) -> Encoder:
    shape, at = vision.tower, tensors.under("visual.")

    def layer(number: int) -> EncoderLayer:
        of = at.under(f"layers.{number}.")
        qkv, output = of.linear("qkv", shape.hidden, 3 * shape.hidden), of.linear("output", shape.hidden, shape.hidden)
        return EncoderLayer(
            norm(shape, of, "norm1"),
            TowerAttention(shape.heads, qkv, output),
            norm(shape, of, "norm2"),
            load_mlp(shape, of, activation_of(shape.activation)),
        )

    return Encoder(
        at.linear("projection", 3 * PATCH**2, shape.hidden),
        at("places", 2, FARTHEST, shape.hidden),
        [layer(number) for number in range(shape.layers)],
        [at.linear(f"mergers.{depth}", 4 * shape.hidden, config.hidden) for depth in range(1 + len(DEEPSTACK))],
    )


def register(patch: pytest.MonkeyPatch) -> None:
    family = VisionLanguageFamily("made_up", TOWER.kind, IMAGE, texts=("made_up",), reader=read_vision)
    patch.setitem(FAMILIES, TEXT_NAME, Family())
    patch.setitem(KINDS, NAME, family)
    patch.setitem(TEXTS, "made_up", (TEXT_NAME, TEXTS["llama"][1]))  # type: ignore[arg-type]
    patch.setitem(registry.ARCHITECTURES, TEXT_NAME, load_text)
    patch.setitem(loading.LOADERS, NAME, load_encoder)  # type: ignore[arg-type]
    patch.setitem(inputs_registry.READERS, NAME, read_inputs)


def write(directory: Path) -> Path:
    """A checkpoint with random weights, clear winners and features that matter."""
    checkpoints.tokenizer().save_pretrained(directory)
    text = TEXT | {"model_type": "made_up", "num_hidden_layers": LAYERS, "rms_norm_eps": 0.02, "rope_theta": 100.0}
    whole = {"architectures": [NAME], "text_config": text, "vision_config": {}, "dtype": "float32", "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(whole))
    (directory / "preprocessor_config.json").write_text("{}")
    save_file(_weights(), directory / "model.safetensors")
    return directory


def _weights() -> dict[str, Tensor]:
    generator, hidden, inner, wide = torch.Generator().manual_seed(3), 64, 96, TOWER.hidden

    def linear(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 1.6 * inputs**-0.5

    def scales(width: int) -> Tensor:
        return torch.rand(width, generator=generator) + 0.5

    made = {
        "model.language_model.embed_tokens.weight": torch.randn(TEXT["vocab_size"], hidden, generator=generator) * 0.5,
        "model.language_model.norm.weight": scales(hidden),
        "lm_head.weight": linear(TEXT["vocab_size"], hidden),
        "visual.projection.weight": linear(wide, 3 * PATCH**2),
        "visual.places": torch.randn(2, FARTHEST, wide, generator=generator) * 0.5,
    } | {f"visual.mergers.{depth}.weight": linear(hidden, 4 * wide) for depth in range(1 + len(DEEPSTACK))}
    for number in range(LAYERS):
        at = f"model.language_model.layers.{number}."
        made |= {at + f"{name}.weight": scales(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        made |= {at + f"self_attn.{name}_proj.weight": linear(hidden, hidden) for name in "qo"}
        made |= {at + f"self_attn.{name}_proj.weight": linear(hidden // 2, hidden) for name in "kv"}
        made |= {at + f"mlp.{name}_proj.weight": linear(inner, hidden) for name in ("gate", "up")}
        made[at + "mlp.down_proj.weight"] = linear(hidden, inner)
    for number in range(TOWER.layers):
        at = f"visual.layers.{number}."
        made |= {at + "qkv.weight": linear(3 * wide, wide), at + "output.weight": linear(wide, wide)}
        for name, outputs, inputs in (("fc1", TOWER.intermediate, wide), ("fc2", wide, TOWER.intermediate)):
            made |= {at + f"mlp.{name}.weight": linear(outputs, inputs), at + f"mlp.{name}.bias": scales(outputs)}
        for name in ("norm1", "norm2"):
            made |= {at + f"{name}.weight": scales(wide), at + f"{name}.bias": scales(wide) - 1}
    return made
