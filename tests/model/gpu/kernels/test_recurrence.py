"""Recurrent layers on kernels, beside the reference, over states in random pages of a pool that is NaN everywhere else.

That a model gets the same tokens is in `test_model.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.on_gpu.check_recurrence import random_recurrence
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.attention.backend import StateSegments
from model.gpu.kv_pool import KVPool
from model.gpu.plan import laid_out
from model.gpu.state_plan import StatePlan, StateWork
from model.gpu.states import GpuStates
from model.recurrent import ConvolutionShape, DeltaShape, RecurrentShape, ScanShape
from model.reference.states import PagedStates
from tests.model.gpu.kernels.device import DEVICE

INTERVAL, ENTRIES, SEQUENCES = 16, 5, 4
PAGES, LAYER = 400, 1
TOLERANCE = 1e-5  # of the largest magnitude

SHAPES: dict[str, DeltaShape | ScanShape] = {
    "delta": DeltaShape(key_heads=2, heads=4, key_dim=16, value_dim=32, taps=4),
    "delta, odd sizes": DeltaShape(key_heads=1, heads=3, key_dim=24, value_dim=20, taps=3),
    "delta by row": DeltaShape(key_heads=2, heads=2, key_dim=32, value_dim=16, taps=4, by_row=True),
    "scan": ScanShape(heads=4, groups=2, head_dim=16, state_dim=32, taps=4),
    "scan, wide": ScanShape(heads=2, groups=1, head_dim=64, state_dim=128, taps=2),
}
Slices = Sequence[tuple[int, int, int]]
"""Sequence, start, count of each."""


@dataclass
class Rig:
    """States of several sequences on both back ends, each with pages of its own for each interval."""

    shape: RecurrentShape
    device: torch.device = DEVICE

    def __post_init__(self) -> None:
        """Layers before and behind it have states too, so that its own begin somewhere in their pages."""
        recurrent = tuple(self.shape.state(layer) for layer in range(3))
        self.layout = KVLayout((LayerGroup((7,), KVShape(1, 16, 16)),), 4, 16, recurrent=recurrent)
        self.made = np.random.default_rng(0)
        every = np.arange(PAGES, dtype=np.int32)
        self.pool = KVPool(self.layout, PAGES, "float32", self.device)
        self.pool.poison(every)
        self.pages = torch.full((PAGES, self.layout.page_bytes), 255, dtype=torch.uint8, device=self.device)
        self.kernels = GpuStates(self.layout, self.pool, self.device)
        self.reference = PagedStates(self.layout, self.pages)
        pages = self.layout.states.pages, SEQUENCES, ENTRIES
        self.tables = self.made.permutation(every)[: math.prod(pages)].reshape(pages)

    def segments(self, slices: Slices) -> StateSegments:
        return StateSegments.of(self.tables, INTERVAL, *np.array(slices).T)

    def plan(self, segments: StateSegments) -> StatePlan:
        made = laid_out([], self.device, StateWork.of(segments)).states
        assert made is not None
        return made

    def random(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.made.standard_normal(shape).astype(np.float32)).to(self.device)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=TOLERANCE * expected.abs().max().item(), rtol=0)


def check_pages(rig: Rig) -> None:
    """Both pools have the same states, and what belongs to nobody is untouched."""
    every = np.arange(PAGES, dtype=np.int32)
    form = rig.pool.export(every, np.full(PAGES, len(rig.layout.groups), np.int32))
    found, expected = form.view(torch.float32), rig.pages.view(torch.float32)
    assert torch.equal(found.isnan(), expected.isnan())
    check(found.nan_to_num(), expected.nan_to_num())


STEPS: list[Slices] = [
    [(0, 0, 5), (1, 0, 40), (2, 0, 1)],
    [(2, 1, 1), (0, 5, 12), (1, 40, 1)],
    [(3, 0, 15), (1, 41, 9), (2, 2, 1), (0, 17, 1)],
    [(2, 3, 14), (3, 15, 2), (0, 18, 50), (1, 50, 1)],
]
"""Decodes among prefills. The last step's second slice has a token on each side of a checkpoint: less than a window."""


@pytest.mark.parametrize("name", SHAPES)
def test_results_and_states_are_those_of_the_reference(name: str) -> None:
    shape = SHAPES[name]
    rig = Rig(shape)
    taps, bias = rig.random(shape.channels, shape.taps), rig.random(shape.channels)
    for slices in STEPS:
        segments, tokens = rig.segments(slices), sum(count for _, _, count in slices)
        plan, x = rig.plan(segments), rig.random(tokens, shape.channels + 5)[:, : shape.channels]
        given = LAYER, x, taps, bias if isinstance(shape, ScanShape) else None, True
        check(rig.kernels.convolve(*given, plan), rig.reference.convolve(*given, segments))
        of = random_recurrence(rig.device, shape, tokens)
        check(rig.kernels.recur(LAYER, of, plan), rig.reference.recur(LAYER, of, segments))
        check_pages(rig)


@pytest.mark.parametrize("taps", [2, 3, 4, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_short_convolutions_alone(taps: int, biased: bool) -> None:
    """Windows of 8 inputs are longer than the slices."""
    shape = ConvolutionShape(channels=150, taps=taps)
    rig = Rig(shape)
    weights, bias = rig.random(shape.channels, taps), rig.random(shape.channels) if biased else None
    for slices in STEPS:
        segments = rig.segments(slices)
        given = LAYER, rig.random(sum(count for _, _, count in slices), shape.channels), weights, bias, False
        check(rig.kernels.convolve(*given, rig.plan(segments)), rig.reference.convolve(*given, segments))
        check_pages(rig)


CUTS: list[Slices] = [[(0, 0, 45)], [(0, 0, 1), (0, 1, 44)], [(0, 0, 20), (0, 20, 20), (0, 40, 5)]]


@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_cut(name: str) -> None:
    """Nor on what else is in the step: another sequence comes first in each."""
    shape, made = SHAPES[name], list[list[Tensor]]()
    for cut in CUTS:
        rig = Rig(shape)
        taps, whole = rig.random(shape.channels, shape.taps), rig.random(45, shape.channels)
        of, done = random_recurrence(rig.device, shape, 45), list[tuple[Tensor, Tensor]]()
        for number, (_, start, count) in enumerate(cut):
            plan = rig.plan(rig.segments([(1, 3 * number, 3), (0, start, count)]))
            here = torch.cat((torch.arange(3), torch.arange(start, start + count))).to(DEVICE)
            part = replace(
                of,
                queries=of.queries[here],
                keys=of.keys[here],
                values=of.values[here],
                kept=of.kept[here],
                rates=of.rates[here],
            )
            convolved = rig.kernels.convolve(LAYER, whole[here], taps, None, True, plan)
            done.append((convolved[3:], rig.kernels.recur(LAYER, part, plan)[3:]))
        made.append([torch.cat(parts) for parts in zip(*done, strict=True)])
    for convolved, recurred in made[1:]:
        assert torch.equal(convolved, made[0][0])
        assert torch.equal(recurred, made[0][1])


def test_pages_of_states_are_exported_as_they_are() -> None:
    rig = Rig(SHAPES["delta"])
    count = rig.layout.page_bytes
    content = torch.from_numpy(rig.made.integers(0, 256, (6, count)).astype(np.uint8)).to(DEVICE)
    pages, tables = np.array([5, 1, 399, 0, 17, 2], np.int32), np.full(6, rig.layout.tables - 1, np.int32)
    rig.pool.import_pages(pages, tables, content)
    assert torch.equal(rig.pool.export(pages, tables), content)
