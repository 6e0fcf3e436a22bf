"""Parts of a decoder that kernels know."""

from collections.abc import Mapping

import torch.nn.functional as F

from model import layers
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.layers import Activation

ACTIVATIONS: Mapping[Activation, str] = {
    layers.silu: "silu", layers.gelu: "gelu", layers.gelu_tanh: "gelu_tanh", layers.quick_gelu: "quick_gelu",
    F.relu: "relu",
}  # fmt: skip
"""Names of activations in `model.cpu.kernels.linear`."""


def kernel_of(product: object) -> KernelLinear:
    """Returns a product as one of kernels. Raises NotCompiled for others."""
    if not isinstance(product, KernelLinear):
        raise NotCompiled(f"there are no kernels for {type(product).__name__}")
    return product
