"""The weight formats that the CPU's kernels multiply with, each as what a `KernelLinear` packs."""

from collections.abc import Callable, Sequence

from model.cpu.kernels.element import Element
from model.cpu.kernels.group_panels import GroupPanels, can_decode, run_inputs
from model.cpu.kernels.group_sums import MOST_RUNS
from model.cpu.kernels.panels import Int8Panels, PlainPanels
from model.cpu.kernels.product import KernelGroups, KernelWeights, NotCompiled, joined
from model.weight_formats.groups import GroupFormat, GroupWeights, NotGrouped, in_8_bits
from model.weight_formats.int8 import quantized_blocks
from model.weight_formats.stored import StoredWeight


def plain_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie as the element of the product."""
    return KernelWeights(PlainPanels(element), joined([part["weight"].to(element.dtype) for part in weights]))


def int8_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie in 8 bits, see `model.weight_formats.int8`."""
    parts = [part["weight"] for part in weights]
    return KernelWeights(Int8Panels(element), *quantized_blocks(parts, parts[0].device))


def group_weights(
    weights: Sequence[StoredWeight], element: Element, form: GroupFormat, has_pairs: bool
) -> KernelGroups:
    """Prepares weights in groups, which stay as they are stored but for their order.

    Raises:
        NotCompiled: There are no kernels for such groups.
    """
    try:
        parts = _alike([form.groups(weight) for weight in weights])
    except NotGrouped as error:
        raise NotCompiled(str(error)) from None
    first = parts[0]
    inputs = run_inputs(first, element)
    if inputs is None or not can_decode(first.levels, has_pairs):
        raise NotCompiled(f"there are none for weights in the format {form.name} with these groups")
    if weights[0].inputs // inputs > MOST_RUNS:
        raise NotCompiled(f"there are none for more than {MOST_RUNS} groups of inputs")
    together = GroupWeights(
        first.levels,
        joined([part.values for part in parts]),
        joined([part.scales for part in parts]),
        None if first.offsets is None else joined([part.offsets for part in parts if part.offsets is not None]),
        first.size,
    )
    offsets = None if together.offsets is None else together.offsets.dtype
    return KernelGroups(GroupPanels(element, first.levels, inputs, together.scales.dtype, offsets), together)


def _alike(parts: list[GroupWeights]) -> list[GroupWeights]:
    """Returns the parts of a product in one form: in 8 bits where they are stored in several. Raises NotGrouped."""
    forms = {(part.levels, part.size, part.offsets is None, part.index is None) for part in parts}
    return parts if len(forms) == 1 else in_8_bits(parts)


KERNEL_WEIGHTS: dict[str, Callable[[Sequence[StoredWeight], Element], KernelWeights]] = {
    "plain": plain_weights,
    "int8": int8_weights,
}
"""Kernel weights by name of the format. The reference back end computes a model in another one."""
