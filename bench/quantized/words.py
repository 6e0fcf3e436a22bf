"""GPTQ and AWQ: packs linears, and says which weights they stand for.

The layouts are those of AutoGPTQ and GPTQModel (`pack` in gptqmodel/nn_modules/qlinear; for zero points less 1,
`convert_gptq_v2_to_v1_format_module` in gptqmodel/utils/model.py) and of AutoAWQ (`WQLinear_GEMM.from_linear` in
awq/modules/linear/gemm.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Integers = NDArray[np.int64]
Packed = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A linear in integers.

    Attributes:
        bits: Bits of an integer.
        values: [out, in].
        zeros: [groups, out]. Zero points.
        scales: [groups, out], in the dtype that they are stored in.
        index: [in]. Group of each input.
    """

    bits: int
    values: Integers
    zeros: Integers
    scales: Tensor
    index: Integers

    def plain(self) -> Tensor:
        """Returns the weight that it stands for, float32 [out, in]."""
        scales = self.scales.float().numpy().T[:, self.index]
        return torch.from_numpy(scales * (self.values - self.zeros.T[:, self.index]).astype(np.float32))


@dataclass(frozen=True)
class Scheme:
    """The quantization of a checkpoint.

    Attributes:
        group: Inputs of a group, -1 for all.
        symmetric: All zero points are the middle.
        ordered: Groups are drawn, not runs of inputs.
        scales: Dtype of the stored scales.
        changes: Other options of 'quantization_config'.
    """

    group: int
    bits: int = 4
    symmetric: bool = False
    ordered: bool = False
    scales: torch.dtype = torch.float16
    version: str = "gptq"
    changes: tuple[tuple[str, Any], ...] = ()

    def options(self) -> dict[str, Any]:
        if self.version == "gemm":
            own = {"quant_method": "awq", "version": "gemm", "zero_point": not self.symmetric}
        else:
            own = {
                "quant_method": "gptq",
                "checkpoint_format": self.version,
                "sym": self.symmetric,
                "desc_act": self.ordered,
            }
        return {"bits": self.bits, "group_size": self.group} | own | dict(self.changes)

    def quantize(self, weight: Tensor, seed: int = 0) -> Quantized:
        """Rounds a weight, [out, in], to the nearest integers."""
        w = weight.float().numpy().astype(np.float64)
        width = w.shape[1]
        index = indices(width, self.group, self.ordered, np.random.default_rng(seed))
        groups, most = int(index.max()) + 1, 2**self.bits - 1
        parts = [w[:, index == group] for group in range(groups)]
        low = np.stack([part.min(1) for part in parts]).clip(max=0.0)
        high = np.stack([part.max(1) for part in parts]).clip(min=0.0)
        if self.symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales = torch.from_numpy(np.maximum((high - low) / most, 1e-4)).to(self.scales)
        wide = scales.double().numpy()
        zeros = np.full_like(wide, (most + 1) // 2) if self.symmetric else np.rint(-low / wide)
        values = np.rint(w / wide.T[:, index] + zeros.T[:, index]).clip(0, most)
        return Quantized(self.bits, values.astype(np.int64), zeros.astype(np.int64), scales, index)

    def pack(self, quantized: Quantized) -> Packed:
        return awq(quantized) if self.version == "gemm" else gptq(quantized, self.version == "gptq")


def indices(width: int, group: int, ordered: bool, rng: np.random.Generator) -> Integers:
    """Returns the group of each input."""
    index = np.arange(width, dtype=np.int64) // (width if group == -1 else group)
    return rng.permutation(index) if ordered else index


def pack(integers: Integers, bits: int, order: Sequence[int]) -> NDArray[np.uint32]:
    """Packs integers, [rows, n]. The integer `order[i]` of a word stands in its i-th bits, from the lowest."""
    words = integers.reshape(len(integers), -1, len(order))
    made = np.zeros(words.shape[:2], np.uint64)
    for place, integer in enumerate(order):
        made |= words[..., integer].astype(np.uint64) << np.uint64(place * bits)
    return made.astype(np.uint32)


def gptq(quantized: Quantized, less_one: bool) -> Packed:
    """Packs as GPTQ. less_one: of the first format, whose zero points are less 1, subtracted from whole words."""
    bits = quantized.bits
    order = range(32 // bits)
    zeros = pack(quantized.zeros, bits, order).astype(np.int64)
    ones = sum(1 << bits * place for place in order)
    return {
        "qweight": int32(pack(quantized.values, bits, order).T),
        "qzeros": int32(((zeros - ones if less_one else zeros) % 2**32).astype(np.uint32)),
        "scales": quantized.scales,
        "g_idx": torch.from_numpy(quantized.index.astype(np.int32)),
    }


def awq(quantized: Quantized) -> Packed:
    return {
        "qweight": int32(pack(quantized.values.T, 4, AWQ_ORDER)),
        "qzeros": int32(pack(quantized.zeros, 4, AWQ_ORDER)),
        "scales": quantized.scales,
    }


def int32(words: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))
