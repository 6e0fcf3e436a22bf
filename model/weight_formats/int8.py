"""Linear layers whose weights are kept in 8 bits: an integer for each, and a float32 scale for each row of outputs.

Only the weights: activations, sums and all other layers stay in the model's dtype (LLM.int8(), Dettmers et al., 2022,
has the same scales). They are made while a checkpoint is loaded, from the values in its files.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.embedding_table import EightBitRows
from model.forward import ForwardBatch
from model.layers import FEWEST_ROWS
from model.weight_formats.format import MadeProduct
from model.weight_formats.groups import GroupWeights
from model.weight_formats.levels import INT8
from model.weight_formats.plain import PlainWeights
from model.weight_formats.scratch import BLOCK, Scratch, multiply
from model.weight_formats.stored import StoredWeight

LARGEST = 127  # -128 is not used, so that the range is the same on both sides of 0


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes rows, [out, in] float32, to int8 [out, in] and scales, float32 [out].

    A scale is the largest absolute value of its row / 127 (1 for a row of zeros); a value is divided by it, rounded
    half to even and held within -127 .. 127. A row that is not finite gets a scale that is not either.
    """
    scale = rows.abs().amax(1) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return (rows / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def quantized_blocks(weights: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Quantizes weights block by block, so that no more than one block is there in float32.

    Args:
        weights: [out, in] each, one below the other, in any float dtype, on any device.
        device: Device of the result.
    """
    out, width = sum(map(len, weights)), weights[0].shape[1]
    values = torch.empty(out, width, dtype=torch.int8, device=device)
    scales = torch.empty(out, dtype=torch.float32, device=device)
    start, count = 0, max(1, BLOCK // width)
    for rows in (block for weight in weights for block in weight.split(count)):
        part = slice(start, start + len(rows))
        values[part], scales[part] = quantize(rows.to(device).float())
        start += len(rows)
    return values, scales


class Int8Linear:
    """`model.layers.Linear` with weights in 8 bits, which are dequantized block by block for each product.

    On the CPU 8 bits are exact in the product's dtype, and the scale comes after it, in float32. On a GPU, where the
    sums of float16 would overflow, it comes before, in the one pass that dequantizes a block.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, scratch: Scratch, device: torch.device) -> None:
        """Quantizes the weights, as in `quantized_blocks`."""
        self._values, self._scale = quantized_blocks(weights, device)
        self._bias, self._scratch = bias, scratch
        out, width = self._values.shape
        self._block = max(1, BLOCK // width)
        scratch.reserve(min(out, self._block) * width)
        self._on_cpu = device.type == "cpu"

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights, int8 [out, in], and their scales, float32 [out]."""
        return self._values, self._scale

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        rows = len(x)
        if self._on_cpu and rows < FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        y = x.new_empty(len(x), len(self._values))
        x = x.to(self._scratch.dtype).contiguous()
        for start in range(0, len(self._values), self._block):
            part = slice(start, start + self._block)
            y[:, part] = self._product(x, part)
        return y[:rows]

    def _product(self, x: Tensor, part: slice) -> Tensor:
        """Multiplies x [rows, in], in the dtype of the scratch.

        Returns [rows, outputs of this part] in it or float32.
        """
        values, scale = self._values[part], self._scale[part]
        bias = None if self._bias is None else self._bias[part]
        weight = self._scratch.shaped(values.shape)
        if not self._on_cpu:
            return F.linear(x, torch.mul(values, scale[:, None], out=weight), bias)
        weight.copy_(values)
        y = multiply(x, weight) * scale
        return y if bias is None else y + bias


class Int8Format(PlainWeights):
    """`GroupFormat` of weights that are stored plain and kept in 8 bits (--quantization int8): a group has a row."""

    name = "int8"

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def groups(self, weight: StoredWeight) -> GroupWeights:
        values, scales = quantize(weight["weight"].float())
        # Stored integers count from the lowest level: -128 is 0.
        return GroupWeights(INT8, values.view(torch.uint8) ^ 0x80, scales[:, None], None, weight.inputs)

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        if self._scratch is None:
            self._scratch = Scratch(dtype, device)
        return Int8Linear([part["weight"] for part in weights], bias, self._scratch, device)

    def embedding(self, weight: StoredWeight, device: torch.device) -> EightBitRows:
        values, scales = quantized_blocks([weight["weight"]], device)
        return EightBitRows(values, scales[:, None])
