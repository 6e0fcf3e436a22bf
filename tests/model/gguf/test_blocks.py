"""Groups stand for the numbers that the gguf package brings a block's bytes back to, bit for bit."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.gguf.types import BY_NAME, OTHERS, TYPES
from model.weight_formats.gguf_blocks import UNPACKED, unpack
from model.weight_formats.groups import GroupWeights, bring_back

BLOCKED = sorted(name for name, kind in BY_NAME.items() if not kind.is_plain)


def test_types_are_ggmls() -> None:
    assert set(UNPACKED) == set(BLOCKED)
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block, kind.size)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: name for number, name in OTHERS.items() if number in known}.items() <= known.items()


def groups(raw: np.ndarray, name: str) -> GroupWeights:
    return unpack(torch.from_numpy(raw).unflatten(1, (-1, BY_NAME[name].size)), name)


def same(raw: np.ndarray, name: str, ours: GroupWeights) -> bool:
    """Whether all numbers are equal; zeros may differ in their sign."""
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    return np.array_equal(bring_back(ours).numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("name", BLOCKED)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_bits_are_those_of_the_gguf_package(name: str, seed: int, rows: int, blocks: int) -> None:
    """Any bytes, scales that are infinite or no numbers among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * BY_NAME[name].size), dtype=np.uint8)
    assert same(raw, name, groups(raw, name))


def faults(ours: GroupWeights) -> Iterator[tuple[str, GroupWeights]]:
    def other(values: torch.Tensor, scales: torch.Tensor) -> GroupWeights:
        return GroupWeights(ours.levels, values, scales, ours.offsets, ours.size)

    yield "an integer off by one", other(ours.values ^ 1, ours.scales)
    yield "a neighbour's scale", other(ours.values, ours.scales.roll(1, 1))
    yield "integers in another order", other(ours.values.unflatten(1, (-1, 2)).flip(2).flatten(1), ours.scales)


@pytest.mark.parametrize("name", BLOCKED)
def test_faults_are_seen(name: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (4, 4 * BY_NAME[name].size), dtype=np.uint8)
    ours = groups(raw, name)
    for fault, wrong in faults(ours):
        assert not same(raw, name, wrong), fault


@pytest.mark.parametrize("name", BLOCKED)
def test_shapes_are_known_without_numbers(name: str) -> None:
    raw = torch.empty(3, 2, BY_NAME[name].size, dtype=torch.uint8)
    real, shape = unpack(raw, name), unpack(raw.to("meta"), name)
    for ours, theirs in ((real.values, shape.values), (real.scales, shape.scales), (real.offsets, shape.offsets)):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
