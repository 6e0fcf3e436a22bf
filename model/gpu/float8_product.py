"""Products whose rows a checkpoint rounds to float8, with weights in float8: one `torch._scaled_mm` for all outputs.

Tensor cores multiply float8 from compute capability 8.9 on, at twice the rate of 16 bits. The launch scales its float32
sums by row and by output, and rounds them once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.gpu.formats import capability_of
from model.gpu.row_rounding import to_float8
from model.weight_formats.activations import RowRounding
from model.weight_formats.groups import ROWS, GroupFormat, GroupWeights, blocks_of, flattened, wide_scales
from model.weight_formats.levels import E4M3
from model.weight_formats.stored import StoredWeight

LEAST_CAPABILITY = (8, 9)
TOGETHER = 16
"""Inputs and outputs are multiples of it, which torch demands, and so are rows."""
FEW_ROWS = 64
"""Rows that fewer ones are padded to. A tile of the product has as many, so that the padding costs next to nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledFloat8Weights:
    """Weights in float8 with one scale an output.

    Attributes:
        values: [out, in] float8_e4m3fn.
        scales: [1, out] float32.
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def of(form: GroupFormat, weights: Sequence[StoredWeight], device: torch.device) -> "ScaledFloat8Weights | None":
        """Unpacks weights, a block at a time. Returns None where they are stored otherwise, or in other sizes.

        Raises:
            NotGrouped: A weight is not stored in groups.
        """
        outputs, inputs = sum(weight.outputs for weight in weights), weights[0].inputs
        if outputs % TOGETHER or inputs % TOGETHER or not all(_is_float8(form, weight) for weight in weights):
            return None
        values = torch.empty((outputs, inputs), dtype=torch.uint8, device=device)
        scales = torch.empty((1, outputs), dtype=torch.float32, device=device)
        start = 0
        for block in (block for weight in weights for block in blocks_of(weight)):
            groups, part = flattened(form.groups(block)), slice(start, start + block.outputs)
            values[part] = groups.values.to(device)
            scales[0, part] = wide_scales(groups)[:, 0].to(device)
            start = part.stop
        return ScaledFloat8Weights(values.view(torch.float8_e4m3fn), scales)


class Float8Product:
    """A linear with weights in float8, one scale an output, whose rows are rounded to float8.

    Up to FEW_ROWS rows a row's bits do not depend on the number of rows, nor on what they are: all are padded to one
    size of launch, in which an output of each row is summed in one order. With more rows they agree within rounding,
    and may depend on that number.
    """

    def __init__(self, rounding: RowRounding, weights: ScaledFloat8Weights, bias: Tensor | None) -> None:
        """Takes a rounding for which `can_multiply` holds."""
        self._scale, self._weights, self._bias = rounding.scale, weights, bias

    @property
    def nbytes(self) -> int:
        return self._weights.values.nbytes + self._weights.scales.nbytes

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        count = len(x)
        padded = FEW_ROWS if count <= FEW_ROWS else -(-count // TOGETHER) * TOGETHER
        rows, scales = to_float8(x, padded, self._scale)
        # Without fast accumulation: Hopper's tensor cores keep about 14 bits of sums unless they are added up outside.
        made = torch._scaled_mm(
            rows, self._weights.values.T, scales, self._weights.scales, bias=self._bias, out_dtype=x.dtype,
            use_fast_accum=False,
        )  # fmt: skip
        return made[:count]


def can_multiply(rounding: RowRounding, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a device multiplies rows in float8 for results of this dtype. A CPU does, where tests run it."""
    if not rounding.floating or rounding.size is not None:
        return False
    # With scales of rows torch's kernels write bfloat16 on all devices, others on some.
    return device.type == "cpu" or (dtype == torch.bfloat16 and capability_of(device) >= LEAST_CAPABILITY)


def _is_float8(form: GroupFormat, weight: StoredWeight) -> bool:
    """Returns whether the first outputs, which stand for all, are in float8 with one scale each."""
    groups: GroupWeights = flattened(form.groups(weight.rows(slice(0, min(ROWS, weight.outputs)))))
    return groups.levels == E4M3 and groups.scales.shape[1] == 1 and groups.offsets is None and groups.index is None
