"""Kernels that cut off and draw, compiled for GPUs that are not here."""

import pytest

from model.gpu.cutoff import AT_ONCE, LISTED, bound_draws, draw_listed, list_tokens, weigh_blocks
from model.gpu.sampler import BLOCK, pack_results
from tests.model.gpu.ahead import Compiled, Device, compile_for
from tests.model.gpu.test_ahead import CAPABILITIES, check

pytestmark = pytest.mark.slow

ROWS = {"logits": "*fp32", "best": "*fp32", "stride": "i32"}
OF_DRAWS = ROWS | {"controls": "*i64", "vocabulary": "i32"}
LISTS = {"bounds": "*i32", "counts": "*i32", "listed": "*i32"}
ALIGNED = ("stride", "vocabulary")


def kernels(device: Device) -> list[Compiled]:
    """Compiles them in the order in which they run."""
    types = OF_DRAWS | {"totals": "*i64", "bins": "*i32"}
    made = [compile_for(device, weigh_blocks, types, {"BLOCK": BLOCK}, ALIGNED, warps=8)]
    types = {
        "controls": "*i64", "totals": "*i64", "bins": "*i32", "bounds": "*i32", "counts": "*i32", "sums": "*i64",
        "blocks": "i32",
    }  # fmt: skip
    made.append(compile_for(device, bound_draws, types, {"PADDED_BLOCKS": 64}, warps=8))
    constants = {"BLOCK": BLOCK, "LISTED": LISTED}
    made.append(compile_for(device, list_tokens, OF_DRAWS | LISTS, constants, ALIGNED, warps=8))
    types = OF_DRAWS | LISTS | {"sums": "*i64", "tokens": "*i64"}
    constants = {"LISTED": LISTED, "AT_ONCE": AT_ONCE}
    made.append(compile_for(device, draw_listed, types, constants, ALIGNED, warps=8))
    types = ROWS | {"tokens": "*i64", "normal": "*fp32", "packed": "*i32"}
    return [*made, compile_for(device, pack_results, types, {}, ("stride",))]


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
def test_kernels(capability: int) -> None:
    made = kernels(capability)
    assert "ld.global.v4" in made[0].assembly
    for one in made:
        check(one, capability)
