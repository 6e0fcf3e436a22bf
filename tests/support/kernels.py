"""The machine that kernels run on in tests: compiled once for all."""

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from model.cpu.kernels.element import Element
from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.product import KernelLinear
from model.cpu.kernels.program import Machine
from model.cpu.weight_formats import int8_weights, plain_weights
from model.settings import ModelSettings
from model.weight_formats.plain import plain_weight


@cache
def the_machine() -> Machine:
    return open_machine(ModelSettings().kernel_directory)


def kernel_linear(
    machine: Machine,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    element: Element,
    gated: bool = False,
    quantized: bool = False,
) -> KernelLinear:
    """weights: [out, in] each, one below the other."""
    prepare = int8_weights if quantized else plain_weights
    return KernelLinear(machine, [prepare([plain_weight(part) for part in weights], element)], bias, gated)
