"""compressed-tensors: stores linears as its library publishes the layout, and says what they stand for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.quantized.numbers import (
    E4M3,
    Array,
    as_float8,
    as_tensor,
    blocks_of,
    encode_e4m3,
    pack_words,
)


@dataclass(frozen=True)
class Recipe:
    """A scheme.

    Attributes:
        name: Name in reports.
        form: Value of 'format' in config.json.
        kind: int or float.
        bits: Bits of a weight.
        strategy: tensor, channel, group or block.
        symmetric: There are no zero points.
        size: Inputs of a group.
        block: Outputs and inputs that share a scale.
        actorder: Value of 'actorder' in config.json.
        inputs: Value of 'input_activations' in config.json.
        targets: Linears that it is for.
        own_form: 'format' stands in the scheme's own section.
        more: Other options of 'weights'.
    """

    name: str
    form: str = "pack-quantized"
    kind: str = "int"
    bits: int = 4
    strategy: str = "group"
    symmetric: bool = True
    size: int | None = None
    block: tuple[int, int] | None = None
    actorder: str | None = None
    inputs: Mapping[str, Any] | None = None
    targets: Sequence[str] = ("Linear",)
    own_form: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": self.kind,
            "strategy": self.strategy,
            "symmetric": self.symmetric,
            "group_size": self.size,
            "block_structure": self.block,
            "actorder": self.actorder,
            "dynamic": False,
        }
        return {
            "targets": list(self.targets),
            "weights": {**weights, **self.more},
            "input_activations": self.inputs,
            "output_activations": None,
            "format": self.form if self.own_form else None,
        }

    def shape_of(self, out: int, width: int) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        return {
            "tensor": (out, width),
            "channel": (1, width),
            "group": (1, self.size or 1),
            "block": self.block or (1, 1),
        }[self.strategy]


@dataclass(frozen=True, eq=False)
class Stored:
    """A linear.

    Attributes:
        tensors: Tensors by their names behind the linear's.
        meant: Weights that they stand for, float32.
        scale: Scale of its inputs, where the checkpoint has one.
    """

    tensors: dict[str, Tensor]
    meant: Tensor
    scale: float | None = None


def stored(weight: Tensor, recipe: Recipe, seed: int = 0, input_scale: float | None = None) -> Stored:
    """Rounds a weight to the nearest numbers.

    Args:
        weight: [out, in].
        recipe: Its scheme.
        seed: Draws the order of inputs where groups are no runs.
        input_scale: Scale of activations, for a scheme in which it is stored.
    """
    real = weight.float().numpy().astype(np.float64)
    out, width = real.shape
    order = np.arange(width)
    if recipe.actorder == "group":
        order = np.random.default_rng(seed).permutation(width)  # inputs in the order of their groups
    ordered = real[:, order]
    rows, columns = recipe.shape_of(out, width)
    scales = np.zeros((-(-out // rows), -(-width // columns)))
    zeros = np.zeros(scales.shape, dtype=np.int64)
    integers, meant = np.zeros(real.shape, dtype=np.int64), np.zeros(real.shape)
    for i, j, at in blocks_of(real.shape, rows, columns):
        part = ordered[at]
        scales[i, j], zeros[i, j] = _scale(part, recipe)
        if recipe.kind == "float":
            integers[at] = encode_e4m3((part / scales[i, j]).astype(np.float32))
            meant[at] = E4M3[integers[at]] * scales[i, j]
        else:
            low, high = -(2 ** (recipe.bits - 1)), 2 ** (recipe.bits - 1) - 1
            integers[at] = np.rint(part / scales[i, j] + zeros[i, j]).clip(low, high)
            meant[at] = (integers[at] - zeros[i, j]) * scales[i, j]
    back = np.argsort(order)
    integers, meant = integers[:, back], meant[:, back]
    kept = scales.astype(np.float32)
    tensors = {"weight_scale": as_tensor(kept.reshape(1) if recipe.strategy == "tensor" else kept)}
    if recipe.form == "pack-quantized":
        tensors["weight_packed"] = as_tensor(pack_words(integers, recipe.bits))
        tensors["weight_shape"] = torch.tensor([out, width])
    elif recipe.kind == "float":
        tensors["weight"] = as_float8(integers.astype(np.uint8))
    else:
        tensors["weight"] = as_tensor(integers.astype(np.int8))
    if not recipe.symmetric:
        packed = recipe.form == "pack-quantized"
        tensors["weight_zero_point"] = as_tensor(
            pack_words(zeros.T, recipe.bits).T if packed else zeros.astype(np.int8)
        )
    if recipe.actorder == "group":
        tensors["weight_g_idx"] = as_tensor((back // columns).astype(np.int32))
    scale = None
    if recipe.inputs is not None and not recipe.inputs["dynamic"]:
        if input_scale is None:
            raise ValueError(f"{recipe.name} stores the scale of activations, and there is none")
        scale = float(np.float32(input_scale))
        tensors["input_scale"] = torch.tensor([scale])
    return Stored(tensors, as_tensor(meant.astype(np.float32)), scale)


def _scale(part: Array, recipe: Recipe) -> tuple[float, int]:
    """A scale of few bits, so that a product with it is exact in float32, and a zero point."""
    if recipe.kind == "float":
        return float(np.float16(np.abs(part).max() / 448 * 1.01)), 0
    low, high = -(2 ** (recipe.bits - 1)), 2 ** (recipe.bits - 1) - 1
    if recipe.symmetric:
        # As the library has it: an extreme above 0 is half a step too large, and held to `high`.
        return float(np.float16(np.abs(part).max() / ((high - low) / 2))), 0
    least, most = min(part.min(), 0), max(part.max(), 0)  # 0 stays one
    scale = float(np.float16((most - least) / (high - low)))
    return scale, int(np.rint(low - least / scale).clip(low, high))


def config_of(recipes: Sequence[Recipe], ignore: Sequence[str]) -> dict[str, Any]:
    form = recipes[0].form if len(recipes) == 1 else "mixed-precision"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {f"group_{i}": recipe.group for i, recipe in enumerate(recipes)},
    }


def recipe_of(name: str, recipes: Sequence[Recipe]) -> Recipe:
    """The first that targets the linear by a pattern; then the one of all."""
    for recipe in recipes:
        if any(target.startswith("re:") and re.match(target[3:], name) for target in recipe.targets):
            return recipe
    return next(recipe for recipe in recipes if "Linear" in recipe.targets)
