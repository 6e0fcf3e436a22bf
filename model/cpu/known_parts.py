"""Parts of a decoder that kernels know."""

from collections.abc import Mapping

import torch.nn.functional as F

from model import layers
from model.cpu.kernels.linear import multiple_of
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.layers import Activation, OfMultiple

ACTIVATIONS: Mapping[Activation, str] = {
    layers.silu: "silu", layers.gelu: "gelu", layers.gelu_tanh: "gelu_tanh", layers.quick_gelu: "quick_gelu",
    F.relu: "relu", layers.relu2: "relu2",
}  # fmt: skip
"""Names of activations in `model.cpu.kernels.linear`."""


def activation_name(activation: Activation) -> str:
    """Returns the name of an activation. Raises NotCompiled for one without a kernel."""
    inner = activation.activation if isinstance(activation, OfMultiple) else activation
    if inner not in ACTIVATIONS:
        raise NotCompiled("there is no kernel for its activation")
    name = ACTIVATIONS[inner]
    return multiple_of(name, activation.factor) if isinstance(activation, OfMultiple) else name


def kernel_of(product: object) -> KernelLinear:
    """Returns a product as one of kernels. Raises NotCompiled for others."""
    if not isinstance(product, KernelLinear):
        raise NotCompiled(f"there are no kernels for {type(product).__name__}")
    return product
