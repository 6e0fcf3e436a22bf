"""Types of tensors in GGUF files: numbers as they are stored in each, and what they stand for."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from numpy.typing import NDArray

Array = NDArray[Any]
Kinds = Callable[[str], Kind]
"""The type of a tensor by its name in the file."""

WRITABLE = {Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4}
SCALES = {  # places of numbers of 16 bits in a block
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
SIZES = {"Q2_K": 2e-3, "Q3_K": 1e-3, "Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 5e-5, "IQ4_NL": 2e-3, "IQ4_XS": 8e-5}


def all_in(kind: Kind) -> Kinds:
    return lambda name: kind


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> Array:
    """Blocks of a type that the package does not quantize to; scales are small, so that weights are below about 0.2."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for place in SCALES[kind.name]:
        scale = (rng.uniform(0.5, 1.5, raw.shape[:-1]) * SIZES[kind.name]).astype(np.float16)
        raw[..., place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def encoded(name: str, data: Array, kind: Kind) -> tuple[Array, Array]:
    """Returns the tensor as it is stored, and the numbers that it stands for."""
    if kind == Kind.F32:
        return data, data
    raw = quants.quantize(data, kind) if kind in WRITABLE else random_blocks(kind, data.shape, len(name))
    return raw, quants.dequantize(raw, kind)
