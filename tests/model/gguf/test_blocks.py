"""Groups stand for the numbers that the gguf package brings a block's bytes back to, bit for bit."""

import re
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.gguf.types import BY_NAME, OTHERS, TYPES
from model.weight_formats.gguf_blocks import UNPACKED, unpack
from model.weight_formats.groups import GroupWeights, bring_back, flattened
from model.weight_formats.levels import pack_values, unpack_values

BLOCKED = sorted(name for name, kind in BY_NAME.items() if not kind.is_plain)
BITS = {name: int(re.sub(r"^\D+", "", name)[0]) for name in BLOCKED}


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
    if name == "MXFP4":  # 255 is no exponent: the package reads 128, and llama.cpp refuses it
        exponents = raw[:, :: BY_NAME[name].size]
        exponents[exponents == 255] = 254
    assert same(raw, name, groups(raw, name))


def test_an_exponent_of_255_is_no_number() -> None:
    raw = np.full((1, 17), 255, dtype=np.uint8)
    assert bring_back(groups(raw, "MXFP4")).isnan().all()


@pytest.mark.parametrize("name", BLOCKED)
def test_flattened_groups_stand_for_the_same_numbers(name: str) -> None:
    """A GPU's kernel has integers of 4 and 8 bits, and no blocks of groups."""
    raw = np.random.default_rng(1).integers(0, 256, (4, 3 * BY_NAME[name].size), dtype=np.uint8)
    ours = groups(raw, name)
    flat = flattened(ours)
    assert flat.levels.bits in (4, 8)
    assert flat.blocks is None
    assert np.array_equal(bring_back(flat).numpy(), bring_back(ours).numpy(), equal_nan=True)


@pytest.mark.parametrize("name", BLOCKED)
def test_integers_are_packed_as_small_as_they_are(name: str) -> None:
    """Bytes of the reference back end: those of a block's integers, and nothing is lost."""
    raw = np.random.default_rng(2).integers(0, 256, (4, 3 * BY_NAME[name].size), dtype=np.uint8)
    ours = groups(raw, name)
    packed = pack_values(ours.values, ours.levels)
    assert packed.nbytes == ours.values.numel() * BITS[name] // 8
    assert torch.equal(unpack_values(packed, ours.levels, ours.values.shape[1]), ours.values)


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
