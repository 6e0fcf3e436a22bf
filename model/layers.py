"""The layers that architectures share. Activations are packed: [tokens, width], no padding, no batch axis.

On the CPU every function gives a row the same bits whatever rows stand beside it; that is what makes a request's logits
equal under any schedule.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN's packed product gives a row the same bits for every number of rows from 2 on, and can give others for one row
# (seen for 576 x 1536 in float32, 4096 x 4096 in bfloat16).
FEWEST_ROWS = 4


class Linear:
    """y = x W^T + b, the one linear function of all models.

    weight: [out, in]. On the CPU, float32 and bfloat16 weights are packed once into oneDNN's blocked layout.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        packable = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        self._packed = packable and torch.backends.mkldnn.is_available()
        self._pad = weight.device.type == "cpu"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out], in x's dtype."""
        rows = x.shape[0]
        if self._pad and rows < FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y[:rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich, 2019. x: [tokens, width]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer, 2020): silu(gate) * up for gate_up [tokens, 2 x width].

    Spelled out with exp: F.silu treats the last elements of a buffer with other code, so its bits depend on the batch.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up


class Rope:
    """Rotary position embedding (Su et al., 2021), halves rotated, as Hugging Face lays out heads."""

    def __init__(self, head_dim: int, theta: float, context: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse)
        self._cos = angles.cos().to(device, dtype)
        self._sin = angles.sin().to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [tokens, 1, head_dim / 2], for every layer of a step."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim], cos and sin from `Rope.at`."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
