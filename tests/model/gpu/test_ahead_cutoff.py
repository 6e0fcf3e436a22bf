"""Kernels that cut off and draw, compiled for GPUs that are not here."""

import pytest

from model.gpu.cutoff import AT_ONCE, LISTED, bound_draws, draw_listed, list_tokens, weigh_blocks
from model.gpu.sampler import BLOCK, pack_results
from tests.model.gpu.ahead import compile_for
from tests.model.gpu.test_ahead import CAPABILITIES, check

pytestmark = pytest.mark.slow

ROWS = {"logits": "*fp32", "best": "*fp32", "stride": "i32"}
OF_DRAWS = ROWS | {"controls": "*i64", "vocabulary": "i32"}
LISTS = {"bounds": "*i32", "counts": "*i32", "listed": "*i32"}
ALIGNED = ("stride", "vocabulary")


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
def test_kernels(capability: int) -> None:
    types = OF_DRAWS | {"totals": "*i64", "bins": "*i32"}
    made = compile_for(capability, weigh_blocks, types, {"BLOCK": BLOCK}, ALIGNED, warps=8)
    check(made, capability)
    assert "ld.global.v4" in made.assembly
    types = {
        "controls": "*i64", "totals": "*i64", "bins": "*i32", "bounds": "*i32", "counts": "*i32", "sums": "*i64",
        "blocks": "i32",
    }  # fmt: skip
    check(compile_for(capability, bound_draws, types, {"PADDED_BLOCKS": 64}, warps=8), capability)
    constants = {"BLOCK": BLOCK, "LISTED": LISTED}
    check(compile_for(capability, list_tokens, OF_DRAWS | LISTS, constants, ALIGNED, warps=8), capability)
    types = OF_DRAWS | LISTS | {"sums": "*i64", "tokens": "*i64"}
    constants = {"LISTED": LISTED, "AT_ONCE": AT_ONCE}
    check(compile_for(capability, draw_listed, types, constants, ALIGNED, warps=8), capability)
    types = ROWS | {"tokens": "*i64", "normal": "*fp32", "packed": "*i32"}
    check(compile_for(capability, pack_results, types, {}, ("stride",)), capability)
