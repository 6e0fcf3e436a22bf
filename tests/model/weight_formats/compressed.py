"""Writes checkpoints of compressed-tensors, apart from the product's code, and the plain ones that they stand for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from bench.quantized.compressed import Recipe, Stored, config_of, recipe_of, stored
from tests.model.families.styles import edit_config, edit_tensors


def compress(
    directory: Path, plain: Path, names: Sequence[str], recipes: Sequence[Recipe], ignore: Sequence[str] = ("lm_head",)
) -> dict[str, Stored]:
    """Stores these weights by the recipes; in `plain`, as what they stand for. Returns them by name."""
    made: dict[str, Stored] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if name not in names}
        for seed, name in enumerate(names):
            linear = name.removesuffix(".weight")
            made[name] = stored(tensors[name], recipe_of(linear, recipes), seed, 0.02 + seed % 7 / 300)
            kept |= {f"{linear}.{key}": tensor for key, tensor in made[name].tensors.items()}
        return kept

    edit_tensors(directory, change)
    edit_config(directory, lambda values: values | {"quantization_config": config_of(recipes, ignore)})
    edit_tensors(plain, lambda tensors: tensors | {name: one.meant for name, one in made.items()})
    return made


def half_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with scales in 16 bits, as most writers store them."""
    scales = ("scale", "scales", "scale_inv")
    return {name: one.half() if name.endswith(scales) else one for name, one in tensors.items()}
