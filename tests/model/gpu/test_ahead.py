"""Every kernel that ships, compiled for GPUs that are not here: nothing is spilled but a few registers of attention's,
memory is read in whole 16 bytes, matrix products are those of the device, and what a program needs is there.

Without an assembler's word on it a kernel can be correct and many times too slow.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import triton.language as tl

from model.gpu import formats
from model.gpu.attention import attend_pieces, join_parts
from model.gpu.cache_write import write_slots
from model.gpu.group_linear import LINE, STAGES, TILE_OUTPUTS, TILE_ROWS, WARPS
from model.gpu.group_product import E2M1_BITS, INTEGERS, TABLE, multiply_groups
from model.gpu.rows import gate_rows, norm_rows, rotate_rows
from model.gpu.sampler import BLOCK, draw_blocks, join_draws, join_summaries, summarise_blocks
from model.gpu.tuning import ELEMENTS, TileSizes, tuning_for
from tests.model.gpu.ahead import Compiled, compile_for

pytestmark = pytest.mark.slow

CAPABILITIES = (80, 90, 100)
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program can have."""
SPILLED = 24
"""Bytes that an attention kernel may spill: three registers, each stored once and loaded once.

Triton 3.7 spills 8 to 24 bytes in 6 of the shapes below, Triton 3.6 in 5. The disassembly of each has the stores before
the loop over keys and the loads after it: they cost once for a piece of work, and the loop has 500 to 1,900
instructions for each tile of keys. Within the loop these 6 would be about 1 % of it.
"""
SPILLED_OF_EIGHT_BITS_256_WIDE = 64
"""Triton 3.6 spills 8 registers there, likewise outside the loop, which has 1,900 instructions for each tile."""

FLOATS = {"float32": ("*fp32", tl.float32), "half": ("*bf16", tl.bfloat16), "eight": ("*bf16", tl.bfloat16)}


def attention(
    capability: int, elements: str, dim: int, sizes: TileSizes, divided: bool, looped: bool, group: int = 4,
    capped: bool = False, page: int = 16, fp8: bool = True, rest: int = 0,
) -> Compiled:  # fmt: skip
    floats, compute = FLOATS[elements]
    pages, format_ = floats, formats.PLAIN.value
    if elements == "eight":
        pages = "*u8"
        format_ = formats.INT8.value
        if fp8:
            format_ = (formats.FP8 if capability >= 89 else formats.FP8_BITS).value
    types = {
        "out": floats, "queries": floats, "keys": pages, "values": pages, "key_scales": "*fp32",
        "value_scales": "*fp32", "plan": "*i32", "header": "i32", "first_key": "*i32", "end_key": "*i32",
        "first_part": "*i32", "partial_out": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32", "score_scale": "fp32",
        "soft_cap": "fp32", "query_stride": "i32", "query_head_stride": "i32", "page_stride": "i32",
        "scale_stride": "i32",
    }  # fmt: skip
    tile_heads = min(16, 1 << (group - 1).bit_length())
    constants = {
        "HEADS_PER_KV": group, "HEAD_DIM": dim, "PADDED_DIM": 1 << (dim - 1).bit_length(), "PAGE_SIZE": page,
        "REST": rest, "PADDED_REST": max(16, 1 << (rest - 1).bit_length()), "KV_FORMAT": format_,
        "TILE_TOKENS": sizes.tokens(tile_heads), "TILE_HEADS": tile_heads,
        "HEAD_TILES": -(-group // tile_heads), "TILE_KEYS": sizes.tile, "CAPPED": capped, "DIVIDED": divided,
        "LOOPED": looped, "SCORE_TYPE": compute, "VALUE_TYPE": compute,
    }  # fmt: skip
    aligned = ("query_stride", "query_head_stride", "page_stride", "scale_stride")
    return compile_for(capability, attend_pieces, types, constants, aligned, sizes.warps, sizes.stages)


def check(made: Compiled, capability: int, spilled: int = 0) -> None:
    """spilled: bytes at most."""
    assert made.spilled <= spilled, f"{made.spilled} bytes, {made.registers} registers"
    assert made.shared <= SHARED[capability]


def check_attention(made: Compiled, capability: int, elements: str, sizes: TileSizes, spilled: int = SPILLED) -> None:
    check(made, capability, spilled)
    assert "cp.async.cg.shared.global" in made.assembly, "keys and values are not copied asynchronously, 16 bytes each"
    if elements == "float32":
        return
    if capability == 90 and sizes.rows >= 64:
        assert "wgmma.mma_async" in made.assembly
    elif capability == 100 and sizes.rows >= 64:
        assert "tcgen05.mma" in made.assembly
    else:
        assert "mma.sync" in made.assembly


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("elements", ELEMENTS)
def test_attention(capability: int, dim: int, elements: str) -> None:
    tuning = tuning_for("an unknown device", (capability // 10, 0), dim, elements)
    few, many, shared = tuning.few, tuning.many, tuning.shared
    spilled = SPILLED_OF_EIGHT_BITS_256_WIDE if (elements, dim) == ("eight", 256) else SPILLED
    for sizes, divided, looped in (
        (few, True, True), (many, False, False), (many, True, False), (shared, True, True)
    ):  # fmt: skip
        made = attention(capability, elements, dim, sizes, divided, looped)
        check_attention(made, capability, elements, sizes, spilled)


@pytest.mark.parametrize(
    "change", [{"group": 1}, {"group": 3, "page": 7}, {"group": 71}, {"capped": True}], ids=lambda change: str(change)
)
@pytest.mark.parametrize("dim", [80, 128])
def test_attention_of_other_shapes(dim: int, change: Mapping[str, Any]) -> None:
    tuning = tuning_for("an unknown device", (9, 0), dim, "half")
    for sizes in (tuning.few, tuning.many):
        check_attention(attention(90, "half", dim, sizes, True, sizes is tuning.few, **change), 90, "half", sizes)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_over_int8(capability: int) -> None:
    tuning = tuning_for("an unknown device", (capability // 10, 0), 128, "eight")
    for sizes in (tuning.few, tuning.many):
        check_attention(
            attention(capability, "eight", 128, sizes, True, sizes is tuning.few, fp8=False), capability, "eight", sizes
        )


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("elements", ELEMENTS)
def test_latent_attention(capability: int, heads: int, elements: str) -> None:
    """DeepSeek's: 512 elements of a latent, and 64 rotated ones."""
    tuning = tuning_for("an unknown device", divmod(capability, 10), 512, elements)
    few, many, shared = tuning.few, tuning.many, tuning.shared
    for sizes, divided, looped in (
        (few, True, True), (many, False, False), (many, True, False), (shared, True, True)
    ):  # fmt: skip
        made = attention(capability, elements, 512, sizes, divided, looped, heads, rest=64)
        check_attention(made, capability, elements, sizes)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_joining_parts(capability: int, dim: int) -> None:
    types = {"out": "*bf16", "partial_out": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32", "joins": "*i32"}
    made = compile_for(capability, join_parts, types, {"HEAD_DIM": dim, "PADDED_DIM": dim, "PARTS_AT_ONCE": 16})
    check(made, capability)
    assert "ld.global.v4" in made.assembly


@pytest.mark.parametrize(
    ("capability", "heads", "dim"),
    [(80, 8, 128), (90, 8, 128), (100, 8, 128), (90, 32, 128), (90, 71, 64), (90, 2, 256), (80, 1, 576), (90, 1, 576)],
)
@pytest.mark.parametrize("format_", [formats.PLAIN, formats.INT8, formats.FP8])
def test_writing_pages(capability: int, heads: int, dim: int, format_: Any) -> None:
    """The last ones are latents."""
    pages = "*bf16" if format_ == formats.PLAIN else "*u8"
    types = {
        "keys": "*bf16", "values": "*bf16", "key_store": pages, "value_store": pages, "key_scales": "*fp32",
        "value_scales": "*fp32", "slots": "*i32", "key_stride": "i32", "key_head_stride": "i32", "value_stride": "i32",
        "value_head_stride": "i32", "page_stride": "i32", "scale_stride": "i32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "PADDED_HEADS": 1 << (heads - 1).bit_length(), "HEAD_DIM": dim,
        "PADDED_DIM": 1 << (dim - 1).bit_length(), "PAGE_SIZE": 16, "KV_FORMAT": format_.value,
        "KEYS_ALONE": dim == 576,
    }  # fmt: skip
    aligned = (
        "key_stride", "key_head_stride", "value_stride", "value_head_stride", "page_stride", "scale_stride"
    )  # fmt: skip
    made = compile_for(capability, write_slots, types, constants, aligned)
    check(made, capability)
    assert "ld.global.v" in made.assembly


@pytest.mark.parametrize("width", [576, 4096, 16384])
def test_norms(width: int) -> None:
    types = {
        "x": "*bf16", "added": "*bf16", "weight": "*bf16", "out": "*bf16", "summed": "*bf16", "inner": "i32",
        "stride": "i32", "inner_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    wide = 1 << (width - 1).bit_length()
    constants = {"WIDTH": width, "PADDED_WIDTH": wide, "ADDED": True}
    warps = min(max(wide // 512, 1), 16)
    made = compile_for(90, norm_rows, types, constants, ("stride", "inner_stride"), warps)
    check(made, 90)
    assert "ld.global.v4" in made.assembly


@pytest.mark.parametrize(("heads", "pairs"), [(40, 64), (12, 32), (72, 32)])
@pytest.mark.parametrize(("normed", "rest"), [(False, 0), (True, 0), (True, 64)])
def test_rotation(heads: int, pairs: int, normed: bool, rest: int) -> None:
    types = {
        "x": "*bf16", "query_weight": "*bf16", "key_weight": "*bf16", "positions": "*i64", "cos": "*bf16",
        "sin": "*bf16", "stride": "i32", "head_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "QUERIES": heads - 8, "HEADS": heads, "PADDED_HEADS": 1 << (heads - 1).bit_length(), "PAIRS": pairs,
        "PADDED_PAIRS": pairs, "REST": rest, "PADDED_REST": max(rest, 1), "NORMED": normed,
    }  # fmt: skip
    made = compile_for(90, rotate_rows, types, constants, ("stride", "head_stride"))
    check(made, 90)
    assert "ld.global.v" in made.assembly


def test_gates() -> None:
    made = compile_for(90, gate_rows, {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}, {"BLOCK": 1024}, ("width",))
    check(made, 90)
    assert "ld.global.v4" in made.assembly


def groups(
    capability: int, format_: Any, size: int, bits: int = 4, run: int = 0, floats: str = "*bf16", step: int = 0,
    numbers: Any = tl.float16, indexed: bool = False,
) -> Compiled:  # fmt: skip
    """size: 0 for one group. run, step: 0 for those that the launch has where nothing is left over."""
    step = step or LINE * 8 // bits
    together = step * bits // 8
    each = "*fp32" if numbers == tl.float32 else "*i32"
    types = {
        "out": floats, "x": floats, "values": "*u8", "scales": each, "offsets": each, "index": "*i32",
        "table": "*fp32", "bias": floats, "rows": "i32", "outputs": "i32", "width": "i32", "groups": "i32",
        "out_stride": "i32",
    }  # fmt: skip
    constants = {
        "FORMAT": format_.value, "BITS": bits, "FIRST": -8.0 if bits == 4 else -128.0, "SIZE": size,
        "RUN": run or min(size or together, together), "STEP": step, "ROWS": TILE_ROWS, "OUTS": TILE_OUTPUTS,
        "SCALES": numbers, "OFFSETS": numbers, "INDEXED": indexed, "BIAS": True,
    }  # fmt: skip
    return compile_for(capability, multiply_groups, types, constants, ("outputs", "width", "out_stride"), WARPS, STAGES)


def check_groups(made: Compiled, capability: int, loaded: int = 1) -> None:
    """loaded: loads that wait for memory, beside the copies. One is the bias, which comes after the loop."""
    check(made, capability)
    assert "mma.sync" in made.assembly
    assert "cp.async.cg.shared.global" in made.assembly, "weights are not copied asynchronously, 16 bytes each"
    assert made.assembly.count("ld.global") == loaded, "scales are not copied asynchronously"


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(("format_", "bits"), [(INTEGERS, 4), (INTEGERS, 8), (E2M1_BITS, 4)])
def test_products_with_groups(capability: int, size: int, format_: Any, bits: int) -> None:
    check_groups(groups(capability, format_, size, bits), capability)


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("size", [0, 32, 128])
def test_products_with_groups_of_fp8(capability: int, size: int) -> None:
    """One group's scale and offset are loaded before the loop."""
    format_ = formats.FP8 if capability >= 89 else formats.FP8_BITS
    made = groups(capability, format_, size, bits=8)
    check_groups(made, capability, 1 if size else 3)
    assert ("e4m3x2" in made.assembly) == (capability >= 89)


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": tl.float32}, {"numbers": tl.bfloat16}, {"floats": "*fp16"}, {"run": 8}, {"format_": TABLE},
        {"run": 1, "indexed": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_with_other_groups(capability: int, change: Mapping[str, Any]) -> None:
    check_groups(groups(capability, **{"format_": INTEGERS, "size": 64} | change), capability)


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
def test_products_with_groups_whose_last_step_is_not_full(capability: int) -> None:
    """Steps of half the size are copied in 8 bytes."""
    made = groups(capability, INTEGERS, 32, step=64)
    check(made, capability)
    assert "mma.sync" in made.assembly
    assert "cp.async.ca.shared.global" in made.assembly
    assert made.assembly.count("ld.global") == 1


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_groups_in_float32(capability: int, bits: int) -> None:
    made = groups(capability, INTEGERS, 32, bits, floats="*fp32")
    check(made, capability)
    assert "cp.async.cg.shared.global" in made.assembly


BLOCKS = {"tops": "*fp32", "tokens": "*i32", "stride": "i32", "vocabulary": "i32"}


def test_summaries_of_logits() -> None:
    """A vocabulary is a multiple of 16 more often than not; what begins at 16 bytes is read in whole ones then."""
    types = BLOCKS | {"logits": "*fp32", "totals": "*fp32"}
    made = compile_for(90, summarise_blocks, types, {"BLOCK": BLOCK}, ("stride", "vocabulary"))
    check(made, 90)
    assert "ld.global.v4" in made.assembly
    types = {
        "tops": "*fp32", "tokens": "*i32", "totals": "*fp32", "best": "*fp32", "token": "*i64", "normal": "*fp32",
        "blocks": "i32",
    }  # fmt: skip
    check(compile_for(90, join_summaries, types, {"PADDED_BLOCKS": 64}), 90)


def test_draws() -> None:
    types = BLOCKS | {
        "logits": "*fp32", "rows": "*i64", "best": "*fp32", "keys": "*i64", "temperatures": "*fp32", "least": "*fp32",
    }  # fmt: skip
    made = compile_for(90, draw_blocks, types, {"BLOCK": BLOCK}, ("stride", "vocabulary"))
    check(made, 90)
    assert "ld.global.v4" in made.assembly
    check(
        compile_for(
            90, join_draws, {"tops": "*fp32", "tokens": "*i32", "token": "*i64", "blocks": "i32"}, {"PADDED_BLOCKS": 64}
        ),
        90,
    )
