"""The layers that architectures share. Activations are packed: [tokens, width], no padding, no batch axis.

On the CPU every function gives a row the same bits whatever rows stand beside it; that is what makes a request's logits
equal under any schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fields import Fields
from model.forward import ForwardBatch

# oneDNN's packed product gives a row the same bits for every number of rows from 2 on, and can give others for one row
# (seen for 576 x 1536 in float32, 4096 x 4096 in bfloat16).
FEWEST_ROWS = 4


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies weights of this dtype here: bfloat16 only on a CPU with registers of 512 bits."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Product(Protocol):
    """y = x W^T + b: a `Linear`, one of another weight format (`model.weight_formats`), or of a back end's own."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor:
        """Multiplies.

        Args:
            x: [rows, in].
            batch: The step that the rows belong to (see `ForwardBatch.rows`). None where they belong to none, as the
                patches of an image do.

        Returns:
            [rows, out] in x's dtype.
        """


class Linear:
    """The product with weights in the model's dtype.

    On the CPU, weights that oneDNN multiplies are packed once into its blocked layout.

    Attributes:
        bias: [out]. None without one.
        nbytes: Bytes of the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Takes weights [out, in] and a bias [out]."""
        self.bias = bias
        self.nbytes = weight.nbytes  # packing keeps them
        self._pad = weight.device.type == "cpu"
        self._packed = self._pad and onednn_multiplies(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight

    @property
    def weight(self) -> Tensor | None:
        """The weights, [out, in]. None where they are packed."""
        return None if self._packed else self._weight

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        rows = x.shape[0]
        if self._pad and rows < FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._weight, self.bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self.bias)
        return y[:rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm of x [tokens, width] (Zhang and Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """`rms_norm` with these weights. With float32 weights for activations in 16 bits all of it is in float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return rms_norm(x.float(), self.weight, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """LayerNorm of x [..., width] (Ba, Kiros and Hinton, 2016)."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return _by_sigmoid(x, x)


def gelu(x: Tensor) -> Tensor:
    """Computes GELU (Hendrycks and Gimpel, 2016)."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes GELU's tanh approximation: x sigmoid(2 u) is x (1 + tanh u) / 2."""
    return _by_sigmoid(x, 2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))


def quick_gelu(x: Tensor) -> Tensor:
    return _by_sigmoid(x, 1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """Squares what ReLU leaves (So et al., Primer, 2021)."""
    return torch.square(F.relu(x))


def _by_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    """Returns x sigmoid(y), spelled out with exp.

    F.silu, F.gelu and torch.sigmoid treat the last elements of a buffer with other code, so their bits depend on the
    batch. Those of exp, erf and tanh do not.
    """
    return x / (1.0 + torch.exp(-y))


Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class OfMultiple:
    """An activation of a multiple of its input (Falcon-H1's gates)."""

    activation: Activation
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(x * self.factor)


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu, "swish": silu, "gelu": gelu, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh, "quick_gelu": quick_gelu, "relu": F.relu, "relu2": relu2,
}  # fmt: skip
"""Activations of float32, by their names in config files."""


def read_activation(fields: Fields, key: str, default: str) -> Activation:
    """Returns the activation of this name. Raises CheckpointError for an unknown one."""
    name = fields.get(key, str, default)
    if name not in ACTIVATIONS:
        raise fields.refuse(key, f"must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Applies an activation in float32. Returns x's dtype."""
    return activation(x.float()).to(x.dtype)


def gated(gate_up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
    """Computes a gated linear unit (Shazeer, 2020): activation(gate) x up.

    Args:
        gate_up: [tokens, 2 x width].
        activation: Activation of the gates.
        limit: Most of a gate, and bound of an up on both sides, to which 1 is then added (gpt-oss). None for none.
    """
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1.0
    return activated(gate, activation) * up


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Bounds logits to -cap .. cap by tanh (Gemma 2)."""
    return torch.tanh(x / cap) * cap
