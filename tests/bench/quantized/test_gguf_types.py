"""Rows in K types and IQ4: the gguf package reads from the blocks what a nearest rounding gives."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from bench.quantized.gguf_types import ENCODERS, FALLBACKS, decode, encode, fitting

LOSSES = {
    Kind.Q2_K: 0.329, Kind.Q3_K: 0.156, Kind.Q4_K: 0.0783, Kind.Q5_K: 0.0383, Kind.Q6_K: 0.0189, Kind.IQ4_NL: 0.0801,
    Kind.IQ4_XS: 0.0803,
}  # fmt: skip
"""Root mean square error of normally distributed weights, in their standard deviation."""


def drawn(rows: int, width: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, width)) * 0.05).astype(np.float32)


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_the_loss_is_that_of_nearest_rounding(kind: Kind) -> None:
    """A field in a wrong place, or a bit that is dropped, loses many times as much."""
    rows = drawn(64, 1024, 1)
    lost = rows - decode(encode(rows, kind), kind)
    assert np.sqrt((lost**2).mean()) / rows.std() == pytest.approx(LOSSES[kind], rel=0.03)


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(1e-2, 1e3))
def test_no_weight_is_farther_off_than_a_step(kind: Kind, seed: int, size: float) -> None:
    """Whatever the largest weight of a block is, and wherever it stands.

    The scale of a block is in float16: that of weights below 1e-2 has so few bits that it is off by a step itself.
    """
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(2, 512)) * rng.uniform(0.1, 1, (2, 512)) ** 4 * size).astype(np.float32)
    lost = np.abs(rows - decode(encode(rows, kind), kind))
    # The largest step is between the extremes of a group, of 4, 8, 16, 32 or 64 levels; unequal ones in IQ4.
    levels = {"Q2": 3, "Q3": 4, "Q4": 15, "Q5": 31, "Q6": 32, "IQ": 5}[kind.name[:2]]
    largest = np.abs(rows).reshape(2, -1, 256).max(2).repeat(256, 1)
    assert (lost <= largest * (2 / levels)).all()


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_zeros_stay_and_rows_do_not_depend_on_each_other(kind: Kind) -> None:
    rows = drawn(3, 512, 2)
    rows[1] = 0
    stored = encode(rows, kind)
    assert not decode(stored, kind)[1].any()
    assert np.array_equal(encode(rows[2:], kind), stored[2:])


def test_types_that_do_not_fit_are_replaced_by_ones_that_do() -> None:
    assert fitting(Kind.Q4_K, 1024) is Kind.Q4_K
    for kind, other in FALLBACKS.items():
        assert fitting(kind, 704) is other
        assert gguf.GGML_QUANT_SIZES[other][0] == 32
