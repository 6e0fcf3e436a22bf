"""Products whose rows a checkpoint rounds to float8, with weights in float8: by torch's `_scaled_mm` for many rows.

Tensor cores multiply float8 from compute capability 8.9 on, at twice the rate of 16 bits. Sums come in float32 and are
scaled afterwards, by row and by output: scales by row within the launch need capability 9.0.
"""

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.gpu.formats import capability_of
from model.gpu.group_linear import MOST_ROWS, GroupProduct
from model.weight_formats.activations import RowRounding

LEAST_CAPABILITY = (8, 9)


class Float8Product:
    """A linear with weights in float8, one scale an output, whose rows are rounded to float8.

    Rows that are few are rounded and scaled back, and multiplied by the kernel of weights in groups: their bits do not
    depend on the others. Rows that are many are multiplied as float8, which is exact but for the order of sums.

    Attributes:
        product: The linear with rows that are not rounded.
    """

    def __init__(self, rounding: RowRounding, product: GroupProduct) -> None:
        """Takes a product for which `can_multiply` holds."""
        self._rounding, self.product = rounding, product

    @property
    def nbytes(self) -> int:
        return self.product.nbytes

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        if len(x) <= MOST_ROWS:
            return self.product(self._rounding(x), batch)
        rows, scales = self._rounding.in_float8(x)
        return self.product.of_float8(rows, scales, x.dtype)


def can_multiply(rounding: RowRounding, product: GroupProduct, device: torch.device) -> bool:
    """Returns whether a device multiplies these rows and weights as float8. A CPU does, where tests run it."""
    if not rounding.floating or rounding.size is not None or not product.is_float8:
        return False
    return device.type == "cpu" or capability_of(device) >= LEAST_CAPABILITY
