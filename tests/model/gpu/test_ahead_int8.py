"""--quantization int8, and weights that many rows are multiplied with, compiled for GPUs that are not here."""

import re
from typing import Any

import pytest
import triton.language as tl

from model.gpu import formats
from model.gpu.group_linear import LINE, TILE_OUTPUTS, WARPS
from model.gpu.group_product import E2M1_BITS, INTEGERS, TABLE, unpack_groups
from tests.model.gpu.ahead import Compiled, compile_for
from tests.model.gpu.test_ahead import CAPABILITIES, check, check_groups, groups

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("floats", ["*bf16", "*fp16"])
def test_products_of_few_rows(capability: int, floats: str) -> None:
    """The scale of an output is loaded before the loop, as in the format of one group for all inputs."""
    made = groups(capability, INTEGERS, 0, bits=8, floats=floats, numbers=tl.float32)
    check_groups(made, capability, 3)


def unpacking(capability: int, format_: Any, bits: int, size: int, numbers: Any = tl.float16) -> Compiled:
    each = "*fp32" if numbers == tl.float32 else "*i32"
    types = {
        "out": "*bf16", "values": "*u8", "scales": each, "offsets": each, "index": "*i32", "table": "*fp32",
        "outputs": "i32", "width": "i32", "groups": "i32", "first": "i32", "end": "i32",
    }  # fmt: skip
    constants = {
        "FORMAT": format_.value, "BITS": bits, "FIRST": -8.0 if bits == 4 else -128.0, "SIZE": size,
        "RUN": min(size or LINE, LINE), "STEP": LINE * 8 // bits, "OUTS": TILE_OUTPUTS, "SCALES": numbers,
        "OFFSETS": None if size == 0 else numbers, "INDEXED": False,
    }  # fmt: skip
    return compile_for(capability, unpack_groups, types, constants, ("outputs", "width"), WARPS)


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize(
    ("format_", "bits", "size", "numbers"),
    [
        (INTEGERS, 8, 0, tl.float32),
        (INTEGERS, 8, 128, tl.float16),
        (INTEGERS, 4, 32, tl.float16),
        (E2M1_BITS, 4, 16, tl.float32),
        (formats.FP8_BITS, 8, 128, tl.float32),
        (TABLE, 4, 64, tl.bfloat16),
    ],
    ids=str,
)
def test_weights_for_many_rows(capability: int, format_: Any, bits: int, size: int, numbers: Any) -> None:
    made = unpacking(capability, format_, bits, size, numbers)
    check(made, capability)
    assert re.search(r"ld\.global\S*\.v[24]", made.assembly), "stored integers are read one by one"
    assert re.search(r"st\.global\S*\.v4", made.assembly), "weights are written one by one"
