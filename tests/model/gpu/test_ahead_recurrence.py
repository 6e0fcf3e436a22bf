"""Kernels of recurrent layers, compiled for GPUs that are not here, for the sizes of published models."""

import re
from typing import Any

import pytest

from model.gpu.heads_kind import power_of_two
from model.gpu.recurrence import convolve_pieces, keep_windows, recur_tokens
from model.gpu.state_plan import TILE_TOKENS
from model.gpu.states import TILE_CHANNELS, tile_values
from tests.model.gpu.ahead import Compiled, Device, compile_for
from tests.model.gpu.test_ahead import CAPABILITIES, check

pytestmark = pytest.mark.slow

PAGES = {"pool": "*fp32", "sources": "*i32", "sections": "i32", "page_stride": "i32"}


def convolution(device: Device, channels: int, taps: int, biased: bool, activated: bool) -> Compiled:
    types = PAGES | {
        "out": "*fp32", "x": "*fp32", "taps": "*fp32", "bias": "*fp32", "pieces": "*i32", "which": "i32",
        "offset": "i32", "stride": "i32",
    }  # fmt: skip
    constants = {
        "CHANNELS": channels, "TAPS": taps, "BIASED": biased, "ACTIVATED": activated, "TILE_TOKENS": TILE_TOKENS,
        "TILE_CHANNELS": TILE_CHANNELS,
    }  # fmt: skip
    return compile_for(device, convolve_pieces, types, constants, ("offset", "page_stride"))


def windows(device: Device, channels: int, taps: int) -> Compiled:
    types = PAGES | {
        "x": "*fp32", "runs": "*i32", "segments": "*i32", "targets": "*i32", "which": "i32", "offset": "i32",
        "stride": "i32",
    }  # fmt: skip
    inputs = taps - 1
    constants = {
        "CHANNELS": channels, "INPUTS": inputs, "PADDED_INPUTS": power_of_two(inputs), "TILE_CHANNELS": TILE_CHANNELS
    }  # fmt: skip
    return compile_for(device, keep_windows, types, constants, ("offset", "page_stride"))


def recurrence(
    device: Device, heads: int, groups: int, key_dim: int, value_dim: int, delta: bool, by_row: bool = False
) -> Compiled:
    types = PAGES | {
        "out": "*fp32", "queries": "*fp32", "keys": "*fp32", "values": "*fp32", "kept": "*fp32", "rates": "*fp32",
        "skip": "*fp32", "units": "*i32", "runs": "*i32", "segments": "*i32", "targets": "*i32", "query_stride": "i32",
        "key_stride": "i32", "value_stride": "i32", "scale": "fp32", "eps": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "HEADS": heads, "SHARED": heads // groups, "KEY_DIM": key_dim, "PADDED_KEYS": power_of_two(key_dim),
        "VALUE_DIM": value_dim, "TILE_VALUES": tile_values(key_dim, value_dim), "BY_ROW": by_row, "DELTA": delta,
        "NORMALISED": delta, "SKIPPED": not delta,
    }  # fmt: skip
    return compile_for(device, recur_tokens, types, constants, ("page_stride",), warps=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("channels", "taps", "biased", "activated"),
    [(8192, 4, False, True), (2048, 3, False, False), (10240, 4, True, True), (3352, 4, True, True)],
    ids=["qwen3.5", "lfm2", "nemotron-h", "odd"],
)
def test_convolutions(capability: int, channels: int, taps: int, biased: bool, activated: bool) -> None:
    check(convolution(capability, channels, taps, biased, activated), capability)
    made = windows(capability, channels, taps)
    check(made, capability)
    assert made.assembly.count("bar.sync") >= 1, "reading, then writing"


SIZES: dict[str, tuple[int, int, int, int, bool, bool]] = {
    "qwen3.5": (32, 16, 128, 128, True, False),
    "kimi-linear": (32, 32, 128, 128, True, True),
    "nemotron-h": (128, 8, 128, 64, False, False),
    "granite": (48, 1, 128, 64, False, False),
    "falcon-h1": (24, 1, 256, 64, False, False),
    "odd": (3, 1, 96, 80, True, False),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SIZES)
def test_recurrences(capability: int, name: str) -> None:
    """A matrix is read and written in whole 16 bytes; threads wait for each other after they have read it."""
    made = recurrence(capability, *SIZES[name])
    check(made, capability)
    assert re.search(r"ld\.global\.v4(?:(?!\$L__).)*?bar\.sync", made.assembly, re.DOTALL)
    assert "ld.global.v4" in made.assembly
    assert "st.global.v4" in made.assembly
