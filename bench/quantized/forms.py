"""The forms that a llama or qwen3 is written in: one for each weight format that is measured."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from bench.quantized.compressed import Recipe, config_of, recipe_of, stored
from bench.quantized.gguf_file import Block, encode_tensors, write_file
from bench.quantized.gguf_types import fitting
from bench.quantized.words import Scheme

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
InputScales = Mapping[str, float]
"""Largest absolute value of the inputs of a linear, by its name; for activations with stored scales."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A checkpoint in a form.

    Attributes:
        tensors: Tensors of its file.
        meant: Weights that those of the linears stand for, float32 [out, in], by name.
    """

    tensors: Mapping[str, Any]
    meant: dict[str, Tensor]


class Form(Protocol):
    """A form of a checkpoint."""

    @property
    def name(self) -> str: ...

    def encode(self, config: Config, tensors: Tensors, largest: InputScales) -> Encoded:
        """Rounds the linears of a checkpoint. Other tensors stay as they are."""

    def save(self, config: Config, encoded: Mapping[str, Any], directory: Path) -> Path:
        """Writes tensors of `Encoded` into an empty directory. Returns what --model names."""


DOWN = "down_proj"
"""Linear with inputs of its own number: 704 in the demo model, which 128 and 256 do not divide."""


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


Linear = Callable[[str, Tensor, InputScales], tuple[Mapping[str, Tensor], Tensor]]
"""Stores a linear: takes its name and weight, returns tensors by the ends of their names, and what they stand for."""


@dataclass(frozen=True)
class PlainForm:
    """`Form` of weights as they are, in a dtype."""

    name: str
    dtype: torch.dtype

    def encode(self, config: Config, tensors: Tensors, largest: InputScales) -> Encoded:  # noqa: ARG002
        made = {name: tensor.to(self.dtype).contiguous() for name, tensor in tensors.items()}
        return Encoded(made, {name: tensor.float() for name, tensor in made.items() if is_linear(name)})

    def save(self, config: Config, encoded: Mapping[str, Any], directory: Path) -> Path:
        dtype = str(self.dtype).removeprefix("torch.")
        return save_directory({**config, "dtype": dtype, "torch_dtype": dtype}, encoded, directory)


def save_directory(config: Config, tensors: Tensors, directory: Path) -> Path:
    """Writes config.json and safetensors. Returns the directory."""
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


@dataclass(frozen=True)
class DirectoryForm:
    """`Form` of safetensors beside a config.json.

    Attributes:
        options: 'quantization_config'.
        linear: Stores one linear.
    """

    name: str
    options: Mapping[str, Any]
    linear: Linear = field(repr=False)

    def encode(self, config: Config, tensors: Tensors, largest: InputScales) -> Encoded:  # noqa: ARG002
        made, meant = dict(tensors), {}
        for name in filter(is_linear, tensors):
            linear = name.removesuffix(".weight")
            parts, meant[name] = self.linear(linear, made.pop(name), largest)
            made |= {f"{linear}.{key}": part.contiguous() for key, part in parts.items()}
        return Encoded(made, meant)

    def save(self, config: Config, encoded: Mapping[str, Any], directory: Path) -> Path:
        return save_directory({**config, "quantization_config": self.options}, encoded, directory)


@dataclass(frozen=True)
class GGUFForm:
    """`Form` of a GGUF file.

    Attributes:
        kind: Type of the linears whose inputs its blocks divide; llama.cpp's substitute has the others.
        embedding: Type of the embedding.
    """

    name: str
    kind: Kind
    embedding: Kind = Kind.BF16

    def encode(self, config: Config, tensors: Tensors, largest: InputScales) -> Encoded:  # noqa: ARG002
        blocks, meant = encode_tensors(config, tensors, self._kind_of)
        return Encoded(blocks, {name: weight for name, weight in meant.items() if is_linear(name)})

    def _kind_of(self, name: str, inputs: int) -> Kind:
        return fitting(self.kind if is_linear(name) else self.embedding, inputs)

    def save(self, config: Config, encoded: Mapping[str, Block], directory: Path) -> Path:
        path = directory / "model.gguf"
        write_file(config, encoded, self.kind, path)
        return path


def packed(name: str, scheme: Scheme, down: int | None = None) -> Form:
    """Returns a form of GPTQ or AWQ.

    Args:
        name: Name of the form.
        scheme: Its scheme.
        down: Inputs of a group of `down_proj` where they differ, which GPTQ alone can say.
    """
    other = scheme if down is None else replace(scheme, group=down)
    rules = {} if down is None else {"dynamic": {f"+:.*{DOWN}": {"group_size": down}}}

    def linear(name: str, weight: Tensor, _: InputScales) -> tuple[Mapping[str, Tensor], Tensor]:
        own = other if name.endswith(DOWN) else scheme
        quantized = own.quantize(weight)
        return own.pack(quantized), quantized.plain()

    return DirectoryForm(name, scheme.options() | rules, linear)


def compressed(recipe: Recipe, down: int | None = None) -> Form:
    """Returns a form of compressed-tensors; arguments as those of `packed`."""
    recipes = [recipe]
    if down is not None:
        other = replace(recipe, size=down, targets=(f"re:.*{DOWN}",), own_form=True)
        recipes = [other, replace(recipe, own_form=True)]

    def linear(name: str, weight: Tensor, largest: InputScales) -> tuple[Mapping[str, Tensor], Tensor]:
        scale = largest[name] / 448 if name in largest else None
        made = stored(weight, recipe_of(name, recipes), input_scale=scale)
        # The scales have the bits of float16, and most writers store 16 bits.
        return {**made.tensors, "weight_scale": made.tensors["weight_scale"].half()}, made.meant

    return DirectoryForm(recipe.name, config_of(recipes, ["lm_head"]), linear)


def float8_blocks(name: str, size: int) -> Form:
    """Returns a form of FP8 in square blocks, as DeepSeek and Qwen ship it."""
    recipe = Recipe(name, "float-quantized", "float", 8, "block", block=(size, size))
    options = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [size, size],
        "activation_scheme": "dynamic",
    }

    def linear(_: str, weight: Tensor, __: InputScales) -> tuple[Mapping[str, Tensor], Tensor]:
        made = stored(weight, recipe)
        return {"weight": made.tensors["weight"], "weight_scale_inv": made.tensors["weight_scale"].half()}, made.meant

    return DirectoryForm(name, options, linear)


TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
FORMS: tuple[Form, ...] = (
    packed("GPTQ 4 bits g128 sym", Scheme(128, symmetric=True), down=64),
    packed("GPTQ 4 bits g32 sym", Scheme(32, symmetric=True)),
    packed("GPTQ 4 bits g128", Scheme(128), down=64),
    packed("GPTQ 4 bits g128 sym desc_act", Scheme(128, symmetric=True, ordered=True), down=64),
    packed("GPTQ 8 bits g128 sym", Scheme(128, bits=8, symmetric=True), down=64),
    packed("AWQ 4 bits g64", Scheme(64, version="gemm")),
    compressed(Recipe("W4A16 g128", size=128), down=64),
    compressed(Recipe("W8A16 channel", bits=8, strategy="channel")),
    compressed(Recipe("W8A8 int8 dynamic", "int-quantized", bits=8, strategy="channel",
                      inputs={**TOKEN, "type": "int"})),
    compressed(Recipe("FP8 dynamic", "float-quantized", "float", 8, "channel", inputs={**TOKEN, "type": "float"})),
    compressed(Recipe("FP8 static", "float-quantized", "float", 8, "tensor",
                      inputs={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})),
    float8_blocks("FP8 blocks 128x128", 128),
    *(GGUFForm(f"GGUF {kind.name}", kind) for kind in (
        Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q5_1, Kind.Q5_0, Kind.Q4_K, Kind.Q4_1, Kind.Q4_0, Kind.IQ4_NL,
        Kind.IQ4_XS, Kind.Q3_K, Kind.Q2_K,
    )),
)  # fmt: skip
"""All formats but mxfp4, which only stacked experts are stored in: a llama has none."""
