"""Writes GPTQ and AWQ checkpoints, apart from the product's code, and the plain ones that they stand for."""

import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from bench.quantized.words import Quantized, Scheme
from tests.model.families.styles import edit_config, edit_tensors


def write_twins(
    source: Path, root: Path, names: Sequence[str], scheme: Callable[[str], Scheme], lying: bool = False
) -> tuple[Path, Path]:
    """Writes a checkpoint with these weights quantized, and one with the plain weights that they stand for.

    Args:
        source: Plain checkpoint.
        root: Directory of both.
        names: Names of the weights.
        scheme: Scheme of a weight, by its name; that of "" is config.json's.
        lying: The plain weights are [in, out], as in GPT-2. Quantized ones are not: writers turn them.
    """
    quantized, plain = (Path(shutil.copytree(source, root / name)) for name in ("quantized", "plain"))
    linears: dict[str, Quantized] = {}

    def store(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {name: tensor for name, tensor in tensors.items() if name not in names}
        for name in names:
            weight = tensors[name].T if lying else tensors[name]
            linears[name] = scheme(name).quantize(weight, zlib.crc32(name.encode()))
            linear = name.removesuffix(".weight")
            made |= {f"{linear}.{key}": tensor for key, tensor in scheme(name).pack(linears[name]).items()}
        return made

    edit_tensors(quantized, store)
    edit_config(quantized, lambda values: values | {"quantization_config": scheme("").options()})
    meant = {name: one.plain().T if lying else one.plain() for name, one in linears.items()}
    edit_tensors(plain, lambda tensors: tensors | meant)
    return quantized, plain
