"""The weight formats that the CPU's kernels multiply with, each as what a `KernelLinear` packs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from model.cpu.group_order import in_order
from model.cpu.kernels.element import OCTET, Element
from model.cpu.kernels.group_panels import panels_of
from model.cpu.kernels.group_sums import MOST_RUNS
from model.cpu.kernels.group_words import can_decode
from model.cpu.kernels.native import Compiler
from model.cpu.kernels.panels import Int8Panels, PlainPanels
from model.cpu.kernels.prepared import ZERO, OrderedInputs, RoundedInputs
from model.cpu.kernels.product import KernelGroups, KernelWeights, NotCompiled
from model.cpu.kernels.values import LANES
from model.weight_formats.activations import RoundedFormat
from model.weight_formats.groups import GroupFormat, GroupWeights, NotGrouped, form_of, joined_groups
from model.weight_formats.int8 import quantized_blocks
from model.weight_formats.levels import INT8
from model.weight_formats.stored import StoredWeight, joined


def plain_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie as the element of the product."""
    return KernelWeights(PlainPanels(element), joined([part["weight"].to(element.dtype) for part in weights]))


def int8_weights(weights: Sequence[StoredWeight], element: Element) -> KernelWeights:
    """Prepares weights that lie in 8 bits, see `model.weight_formats.int8`."""
    parts = [part["weight"] for part in weights]
    return KernelWeights(Int8Panels(element), *quantized_blocks(parts, parts[0].device))


def group_weights(
    weights: Sequence[StoredWeight], element: Element, form: GroupFormat, has_pairs: bool
) -> list[KernelGroups | KernelWeights]:
    """Prepares weights in groups, which stay as they are stored but for their order.

    Args:
        weights: Weights of the product.
        element: Element of its inputs.
        form: Format of the weights.
        has_pairs: Whether the CPU has a product of bfloat16 pairs.

    Returns:
        The parts of the product: neighbours that are stored alike are one.

    Raises:
        NotCompiled: There are no kernels for such groups.
    """
    parts = [_part_of(weight, form) for weight in weights]
    runs = groupby(parts, lambda part: part.form)
    return [_kernel_weights(list(run), element, form, has_pairs) for _, run in runs]


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """A linear of a product.

    Attributes:
        weight: The linear as it is stored.
        groups: Its groups, which are runs of inputs. None where it is plain.
        order: [in] int64. Places of the inputs of the runs. None for the order in which they are.
    """

    weight: StoredWeight
    groups: GroupWeights | None
    order: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        """The layout and the order: parts with the same ones become one."""
        if self.groups is None:
            return ()
        order = None if self.order is None or self.order.is_meta else self.order.numpy().tobytes()
        return *form_of(self.groups), self.order is None, order


def _part_of(weight: StoredWeight, form: GroupFormat) -> _Linear:
    try:
        groups = form.groups(weight)
    except NotGrouped:
        return _Linear(weight, None, None)
    return _Linear(weight, groups, None) if groups.index is None else _Linear(weight, *in_order(groups))


def _kernel_weights(
    run: list[_Linear], element: Element, form: GroupFormat, has_pairs: bool
) -> KernelGroups | KernelWeights:
    """Prepares parts of one form. Raises NotCompiled."""
    parts = [part.groups for part in run if part.groups is not None]
    if not parts:
        return plain_weights([part.weight for part in run], element)
    groups, order, given = joined_groups(parts), run[0].order, run[0].weight.inputs
    panels = panels_of(groups, element)
    if panels is None or not can_decode(groups.levels, has_pairs):
        raise NotCompiled(f"there are none for weights in the format {form.name} with these groups")
    if groups.values.shape[1] // panels.inputs > MOST_RUNS:
        raise NotCompiled(f"there are none for more than {MOST_RUNS} groups of inputs")
    ordered = None if order is None else OrderedInputs(element, order.to(torch.int32))
    return KernelGroups(panels, groups, ordered, given)


def rounded_weights(
    weights: Sequence[StoredWeight], element: Element, form: RoundedFormat, compiler: Compiler
) -> list[KernelGroups | KernelWeights]:
    """Prepares weights whose inputs are rounded to 8 bits.

    Integers with a scale for each output are multiplied as integers, where the CPU can. Other weights are multiplied
    as `group_weights`, with rows that are rounded and scaled back.

    Raises:
        NotCompiled: There are no kernels for such weights, or for rows that have several scales.
        CheckpointError: See `RoundedFormat.parts`.
        ValueError: See `RoundedFormat.parts`.
    """
    inner, inputs = form.weights, weights[0].inputs
    if not isinstance(inner, GroupFormat):
        raise NotCompiled(f"there are none for rounded inputs of weights in the format {inner.name}")
    if inputs % LANES:
        raise NotCompiled(f"{inputs} inputs that are rounded are no multiple of {LANES}")
    made = list[KernelGroups | KernelWeights]()
    for rounding, run in form.parts(weights):
        if rounding.size is not None:
            raise NotCompiled("there are none for rows that are rounded with several scales")
        groups = [inner.groups(weight) for weight in run]
        as_octets = not rounding.floating and compiler.has_octets and all(_is_by_output(part) for part in groups)
        prepared = RoundedInputs(element, inputs, rounding.floating, rounding.scale, as_octets)
        if as_octets:
            rows = joined([(part.values ^ ZERO).view(torch.int8) for part in groups])
            scales = joined([part.scales[:, 0].float() for part in groups])
            made.append(KernelWeights(PlainPanels(OCTET), rows, scales, prepared, element))
            continue
        for part in group_weights(run, element, inner, compiler.has_pairs):
            if part.preparation is not None or isinstance(part, KernelWeights):
                raise NotCompiled("there are none for rounded inputs that are ordered by activation too")
            made.append(replace(part, preparation=prepared))
    return made


def _is_by_output(groups: GroupWeights) -> bool:
    """Whether weights are symmetric integers of 8 bits with a scale for each output."""
    alone = groups.offsets is None and groups.blocks is None and groups.index is None
    return alone and groups.levels == INT8 and groups.scales.shape[1] == 1


KERNEL_WEIGHTS: dict[str, Callable[[Sequence[StoredWeight], Element], KernelWeights]] = {
    "plain": plain_weights,
    "int8": int8_weights,
}
"""Kernel weights by name of the format. The reference back end computes a model in another one."""
