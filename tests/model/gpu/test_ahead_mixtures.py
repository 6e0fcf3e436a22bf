"""Kernels of mixtures of experts, compiled for GPUs that are not here, for the sizes of published models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl

from model.gpu.expert_choice import add_places, arrange_places, choose_experts, count_places
from model.gpu.expert_product import multiply_expert_groups, multiply_experts
from model.gpu.expert_weights import GROUP_OUTPUTS, GROUP_ROWS, GROUP_STAGES, TILES, WIDE, fitted
from model.gpu.expert_weights import ProductTiles as Tiles
from model.gpu.group_linear import LINE, WARPS
from model.gpu.group_product import E2M1_BITS, INTEGERS
from model.gpu.mixtures import BLOCK
from tests.model.gpu.ahead import Compiled, Device, compile_for
from tests.model.gpu.test_ahead import CAPABILITIES, SHARED, check

pytestmark = pytest.mark.slow

PLACES = {"factors": "*fp32", "tiles": "*i32", "order": "*i32", "outputs": "i32", "width": "i32"}


def product(device: Device, sizes: Tiles, floats: str = "*bf16", direct: bool = False, whole: bool = True) -> Compiled:
    types = PLACES | {
        "out": floats, "x": floats, "weight": floats, "weight_at": "*i64", "bias": floats, "bias_at": "*i64",
    }  # fmt: skip
    constants = {
        "USED": 8, "DIRECT": direct, "WEIGH_INPUTS": False, "WEIGH_OUTPUTS": True, "BIAS": False, "WHOLE": whole,
        "ROWS": sizes.rows, "OUTS": sizes.outputs, "INNER": sizes.inputs,
    }  # fmt: skip
    return compile_for(device, multiply_experts, types, constants, ("outputs", "width"), sizes.warps, sizes.stages)


@pytest.mark.parametrize(
    ("capability", "sizes"),
    [
        *((capability, sizes) for capability in (*CAPABILITIES, 89) for sizes in TILES),
        (80, WIDE),
        (90, WIDE),
        (100, WIDE),
    ],
    ids=str,
)
def test_products(capability: int, sizes: Tiles) -> None:
    made = product(capability, sizes)
    check(made, capability)
    # In each round all is copied asynchronously: what waits is the tile, its places, and the experts' weights.
    assert "cp.async.cg.shared.global" in made.assembly
    kind = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma.sync") if sizes.rows >= 64 else "mma.sync"
    assert kind in made.assembly


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_other_kinds(capability: int) -> None:
    check(product(capability, fitted(TILES[2], 2048, torch.float32), "*fp32"), capability)
    check(product(capability, TILES[0], direct=True), capability)
    odd = product(capability, TILES[2], whole=False)  # no published model has such widths: it may be slow
    assert odd.shared <= SHARED[capability]


def product_with_groups(device: Device, rows: int, format_: Any, bits: int) -> Compiled:
    types = PLACES | {
        "out": "*bf16", "x": "*bf16", "values": "*u8", "values_at": "*i64", "scales": "*i32", "scales_at": "*i64",
        "offsets": "*i32", "offsets_at": "*i64", "table": "*fp32", "bias": "*bf16", "bias_at": "*i64", "groups": "i32",
    }  # fmt: skip
    constants = {
        "USED": 8, "DIRECT": False, "WEIGH_OUTPUTS": True, "BIAS": True, "FORMAT": format_.value, "BITS": bits,
        "FIRST": 0.0, "SIZE": 32, "RUN": 32, "STEP": LINE * 8 // bits, "SCALES": tl.bfloat16, "OFFSETS": None,
        "ROWS": rows, "OUTS": GROUP_OUTPUTS,
    }  # fmt: skip
    return compile_for(device, multiply_expert_groups, types, constants, ("outputs", "width"), WARPS, GROUP_STAGES)


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("rows", sorted(set(GROUP_ROWS)))
@pytest.mark.parametrize(("format_", "bits"), [(INTEGERS, 4), (INTEGERS, 8), (E2M1_BITS, 4)])
def test_products_with_groups(capability: int, rows: int, format_: Any, bits: int) -> None:
    made = product_with_groups(capability, rows, format_, bits)
    check(made, capability)
    assert "cp.async.cg.shared.global" in made.assembly, "weights are not copied asynchronously, 16 bytes each"


CHOICES = {
    "qwen3": {"EXPERTS": 128, "USED": 8, "PLACES": 8},
    "deepseek-v3": {
        "EXPERTS": 256, "USED": 8, "PLACES": 8, "GROUPS": 8, "GROUPS_USED": 4, "BEST": 2, "BIAS": True,
        "BY_SIGMOID": True,
    },
    "qwen3-next": {"EXPERTS": 512, "USED": 10, "PLACES": 16},
    "gemma4": {"EXPERTS": 128, "USED": 8, "PLACES": 8, "SCALES": True},
}  # fmt: skip
PLAIN = {
    "GROUPS": 1, "GROUPS_USED": 1, "BEST": 1, "BIAS": False, "SCALES": False, "BY_SIGMOID": False, "NORMALISED": True,
}  # fmt: skip


def choice(device: Device, kind: str) -> Compiled:
    types = {
        "chosen": "*i32", "weights": "*fp32", "logits": "*bf16", "bias": "*fp32", "scales": "*fp32", "experts": "i32",
        "factor": "fp32", "least": "fp32",
    }  # fmt: skip
    return compile_for(device, choose_experts, types, PLAIN | CHOICES[kind])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", CHOICES)
def test_choices(capability: int, kind: str) -> None:
    check(choice(capability, kind), capability)


def orders_and_sums(device: Device) -> Iterator[Compiled]:
    of_places = {"counts": "*i32", "chosen": "*i32", "places": "i32"}
    yield compile_for(device, count_places, of_places, {"BLOCK": BLOCK})
    types = of_places | {"order": "*i32", "tiles": "*i32", "most": "i32"}
    for experts in (8, 128, 512):
        yield compile_for(device, arrange_places, types, {"ROWS": 64, "EXPERTS": experts, "BLOCK": BLOCK})
    types = {"out": "*bf16", "parts": "*bf16", "width": "i32"}
    yield compile_for(device, add_places, types, {"USED": 8, "BLOCK": BLOCK})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_orders_and_sums(capability: int) -> None:
    for made in orders_and_sums(capability):
        check(made, capability)
