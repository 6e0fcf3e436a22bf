"""The weight formats that the CPU's kernels multiply with, each as what a `KernelLinear` packs."""

from collections.abc import Callable, Sequence

from model.cpu.kernels.element import Element
from model.cpu.kernels.panels import Int8Panels, PlainPanels
from model.cpu.kernels.product import KernelWeights, joined
from model.weight_formats.int8 import quantized_blocks
from model.weight_formats.stored import StoredWeight


def plain_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie as the element of the product."""
    return KernelWeights(PlainPanels(element), joined([part["weight"].to(element.dtype) for part in weights]))


def int8_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie in 8 bits, see `model.weight_formats.int8`."""
    parts = [part["weight"] for part in weights]
    return KernelWeights(Int8Panels(element), *quantized_blocks(parts, parts[0].device))


KERNEL_WEIGHTS: dict[str, Callable[[Sequence[StoredWeight], Element], KernelWeights]] = {
    "plain": plain_weights,
    "int8": int8_weights,
}
"""Kernel weights by name of the format. The reference back end computes a model in another one."""
