"""Room in which stored weights are dequantized, a block at a time, and the product with a block."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.layers import onednn_multiplies

# Weights that are dequantized at once. 4096 x 4096 in 8 bits with 16 rows, beside `Linear`, float32 and bfloat16:
# 2^18 2.6 and 6.0 times the time, 2^21 1.3 and 2.5 (what is written stays in the cache), 2^22 1.6 and 2.4, all of it
# 2.1 and 2.5.
BLOCK = 2**21


class Scratch:
    """Room for one block of weights in the dtype of the product. All layers of a model share it: one runs at a time.

    On the CPU float16 is computed in float32, which is no slower there.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        narrow = device.type == "cpu" and dtype == torch.float16
        self._device = device  # which may not be touched before there is something to reserve
        self._room = torch.empty(0, dtype=torch.float32 if narrow else dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._room.dtype

    def reserve(self, count: int) -> None:
        if count > self._room.numel():
            self._room = torch.empty(count, dtype=self._room.dtype, device=self._device)

    def shaped(self, shape: torch.Size) -> Tensor:
        """Returns a tensor of this shape with any values, no larger than the reserved one."""
        return self._room[: shape.numel()].view(shape)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [rows, in] times weight [out, in], of one dtype."""
    if weight.device.type == "cpu" and onednn_multiplies(weight.dtype):
        # As in `Linear`, but not packed: F.linear takes 2.3 times as long in float32 with 256 rows, 3 times with 4.
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)
