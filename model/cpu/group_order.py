"""Puts the inputs of a linear in order of their groups, so that each group is a run (GPTQ's desc_act).

A kernel reads whole runs. Groups that are no multiple of a run are filled up with inputs that are 0 in every row: a
rank that has some inputs has groups of many sizes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model.cpu.kernels.group_panels import LEAST_INPUTS
from model.cpu.kernels.group_sums import MOST_RUNS
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.prepared import NONE
from model.weight_formats.groups import GroupWeights

RUNS = (256, 128, 64, 32, 16, LEAST_INPUTS)


def in_order(groups: GroupWeights) -> tuple[GroupWeights, Tensor]:
    """Returns the weights with groups that are runs, and the place of each of their inputs in a row.

    Places are int64, NONE for an input that is 0. Weights without numbers get runs of the groups' size.

    Args:
        groups: Weights with an index.
    """
    index = groups.index
    if index is None:
        raise ValueError("the groups are runs already")
    if index.is_meta:
        return replace(groups, index=None), index
    counts = torch.bincount(index, minlength=groups.scales.shape[1])
    used = counts.nonzero()[:, 0]
    size = _run_of(counts[used], groups)
    order = torch.argsort(index, stable=True)
    places, of_run = [], []
    for group, inputs in zip(used.tolist(), order.split(counts[used].tolist()), strict=True):
        filled = torch.nn.functional.pad(inputs, (0, -len(inputs) % size), value=NONE)
        places.append(filled)
        of_run += [group] * (len(filled) // size)
    place, which = torch.cat(places), torch.tensor(of_run)
    values = groups.values[:, place.clamp(min=0)]
    offsets = None if groups.offsets is None else groups.offsets[:, which]
    return replace(groups, values=values, scales=groups.scales[:, which], offsets=offsets, size=size, index=None), place


def _run_of(counts: Tensor, groups: GroupWeights) -> int:
    """Returns the inputs of a run with which groups of these sizes take the fewest bytes."""
    head = sum(one.element_size() for one in (groups.scales, groups.offsets) if one is not None) * PANEL

    def cost(size: int) -> tuple[bool, int]:
        runs = int((-(-counts // size)).sum())
        return runs > MOST_RUNS, runs * (head + size * PANEL * groups.levels.bits // 8)

    return min(RUNS, key=cost)
