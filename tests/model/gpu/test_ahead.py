"""Every kernel that ships, compiled for GPUs that are not here: no loop spills, memory is read in whole 16 bytes,
products of matrices are those of the device, and what a program needs is there.

Without an assembler's word on it a kernel can be correct and many times too slow.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import triton.language as tl

from model.gpu import formats
from model.gpu.attention import attend_pieces, join_parts
from model.gpu.cache_write import write_slots
from model.gpu.group_linear import LINE, STAGES, TILE_OUTPUTS, TILE_ROWS, WARPS
from model.gpu.group_product import E2M1_BITS, INTEGERS, TABLE, multiply_groups
from model.gpu.row_rounding import round_rows
from model.gpu.rows import gate_rows, norm_rows, rotate_rows
from model.gpu.sampler import BLOCK, draw_blocks, join_draws, join_summaries, summarise_blocks
from model.gpu.tuning import ELEMENTS, TileSizes, tuning_for
from tests.model.gpu.ahead import Compiled, Device, compile_for

pytestmark = pytest.mark.slow

CAPABILITIES = (80, 90, 100)
SHARED: dict[Device, int] = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024} | {
    "gfx942": 64 * 1024, "gfx950": 160 * 1024,
}  # fmt: skip
"""Bytes that a program can have."""
SPILLED = 64
"""Bytes that a thread of attention may spill, 16 registers, none of them in an innermost loop.

The harm decides. Triton 3.7.1 spills 8 to 24 bytes in some of the shapes below, Triton 3.6.0 8 to 56 bytes: all of them
outside the loops, where a register is stored once and loaded once for a piece of work. That is two
instructions beside 500 to 1,900 for each tile of keys. In the loop they would be waited for with each tile.
"""
SPILLED_BY_GROUPS = 8
"""Likewise of a product with weights in groups: in four bits of E2M1 for 10.0 it stores two registers before its loop
and loads them behind it. No other kernel may spill.
"""

FLOATS = {"float32": ("*fp32", tl.float32), "half": ("*bf16", tl.bfloat16), "eight": ("*bf16", tl.bfloat16)}


def float8(device: Device, pages: bool = False) -> tl.constexpr:
    """Returns the format of e4m3 on a device: AMD's convert it by its bits, as those below 8.9 do."""
    capability = divmod(device, 10) if isinstance(device, int) else (0, 0)
    return tl.constexpr((formats.page_format_of if pages else formats.format_of)(torch.float8_e4m3fn, capability))


def attention(
    device: Device, elements: str, dim: int, sizes: TileSizes, divided: bool, looped: bool, group: int = 4,
    capped: bool = False, page: int = 16, fp8: bool = True, rest: int = 0, registers: int | None = None,
) -> Compiled:  # fmt: skip
    floats, compute = FLOATS[elements]
    pages, format_ = floats, formats.PLAIN.value
    if elements == "eight":
        pages = "*u8"
        format_ = (float8(device, pages=True) if fp8 else formats.INT8).value
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
    return compile_for(device, attend_pieces, types, constants, aligned, sizes.warps, sizes.stages, registers)


def check(made: Compiled, device: Device, spilled: int = 0) -> None:
    """spilled: bytes at most."""
    assert made.spilled <= spilled, f"{made.spilled} bytes, {made.registers} registers"
    assert made.spilled_in_loops == 0, f"{made.spilled_in_loops} instructions of loops spill"
    assert made.shared <= SHARED[device]


def check_attention(made: Compiled, capability: int, elements: str, sizes: TileSizes) -> None:
    check(made, capability, SPILLED)
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
    for sizes, divided, looped in (
        (few, True, True), (many, False, False), (many, True, False), (shared, True, True)
    ):  # fmt: skip
        made = attention(capability, elements, dim, sizes, divided, looped)
        check_attention(made, capability, elements, sizes)


def test_spills_of_a_loop_are_found() -> None:
    """With 96 registers a thread the sums of the loop over keys are not all in registers."""
    sizes = tuning_for("an unknown device", (9, 0), 256, "half").many
    assert attention(90, "half", 256, sizes, True, True, registers=96).spilled_in_loops > 10


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


def joining(device: Device, dim: int) -> Compiled:
    types = {"out": "*bf16", "partial_out": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32", "joins": "*i32"}
    return compile_for(device, join_parts, types, {"HEAD_DIM": dim, "PADDED_DIM": dim, "PARTS_AT_ONCE": 16})


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_joining_parts(capability: int, dim: int) -> None:
    made = joining(capability, dim)
    check(made, capability)
    assert "ld.global.v4" in made.assembly


def writing(device: Device, heads: int, dim: int, format_: Any) -> Compiled:
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
    return compile_for(device, write_slots, types, constants, aligned)


@pytest.mark.parametrize(
    ("capability", "heads", "dim"),
    [(80, 8, 128), (90, 8, 128), (100, 8, 128), (90, 32, 128), (90, 71, 64), (90, 2, 256), (80, 1, 576), (90, 1, 576)],
)
@pytest.mark.parametrize("format_", [formats.PLAIN, formats.INT8, formats.FP8])
def test_writing_pages(capability: int, heads: int, dim: int, format_: Any) -> None:
    """The last ones are latents."""
    made = writing(capability, heads, dim, format_)
    check(made, capability)
    assert "ld.global.v" in made.assembly


def norms(device: Device, width: int) -> Compiled:
    types = {
        "x": "*bf16", "added": "*bf16", "weight": "*bf16", "out": "*bf16", "summed": "*bf16", "inner": "i32",
        "stride": "i32", "inner_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    wide = 1 << (width - 1).bit_length()
    constants = {"WIDTH": width, "PADDED_WIDTH": wide, "ADDED": True}
    warps = min(max(wide // 512, 1), 16)
    return compile_for(device, norm_rows, types, constants, ("stride", "inner_stride"), warps)


@pytest.mark.parametrize("width", [576, 4096, 16384])
def test_norms(width: int) -> None:
    made = norms(90, width)
    check(made, 90)
    assert "ld.global.v4" in made.assembly


def rounding(device: Device, width: int, static: bool = False) -> Compiled:
    types = {"x": "*bf16", "out": "*u8", "scales": "*fp32", "rows": "i32", "scale": "fp32"}
    wide = 1 << (width - 1).bit_length()
    constants = {"WIDTH": width, "PADDED_WIDTH": wide, "STATIC": static}
    return compile_for(device, round_rows, types, constants, (), min(max(wide // 512, 1), 16))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("width", [576, 4096, 14336, 28672])
def test_roundings_to_float8(width: int, static: bool) -> None:
    made = rounding(90, width, static)
    check(made, 90)
    assert "ld.global.v4" in made.assembly
    assert "st.global.v" in made.assembly


def rotation(device: Device, heads: int, pairs: int, normed: bool, rest: int) -> Compiled:
    types = {
        "x": "*bf16", "query_weight": "*bf16", "key_weight": "*bf16", "positions": "*i64", "cos": "*bf16",
        "sin": "*bf16", "stride": "i32", "head_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "QUERIES": heads - 8, "HEADS": heads, "PADDED_HEADS": 1 << (heads - 1).bit_length(), "PAIRS": pairs,
        "PADDED_PAIRS": pairs, "REST": rest, "PADDED_REST": max(rest, 1), "NORMED": normed,
    }  # fmt: skip
    return compile_for(device, rotate_rows, types, constants, ("stride", "head_stride"))


@pytest.mark.parametrize(("heads", "pairs"), [(40, 64), (12, 32), (72, 32)])
@pytest.mark.parametrize(("normed", "rest"), [(False, 0), (True, 0), (True, 64)])
def test_rotation(heads: int, pairs: int, normed: bool, rest: int) -> None:
    made = rotation(90, heads, pairs, normed, rest)
    check(made, 90)
    assert "ld.global.v" in made.assembly


def gates(device: Device) -> Compiled:
    types = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
    return compile_for(device, gate_rows, types, {"BLOCK": 1024}, ("width",))


def test_gates() -> None:
    made = gates(90)
    check(made, 90)
    assert "ld.global.v4" in made.assembly


def groups(
    device: Device, format_: Any, size: int, bits: int = 4, run: int = 0, floats: str = "*bf16", step: int = 0,
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
    return compile_for(device, multiply_groups, types, constants, ("outputs", "width", "out_stride"), WARPS, STAGES)


def check_groups(made: Compiled, capability: int, loaded: int = 1) -> None:
    """loaded: loads that wait for memory, beside the copies. One is the bias, which comes after the loop."""
    check(made, capability, SPILLED_BY_GROUPS)
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
    made = groups(capability, float8(capability), size, bits=8)
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
    check_groups(groups(capability, **{"format_": INTEGERS, "size": 64, **change}), capability)


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


def summaries(device: Device) -> tuple[Compiled, Compiled]:
    types: dict[str, str] = BLOCKS | {"logits": "*fp32", "totals": "*fp32"}
    made = compile_for(device, summarise_blocks, types, {"BLOCK": BLOCK}, ("stride", "vocabulary"))
    types = {
        "tops": "*fp32", "tokens": "*i32", "totals": "*fp32", "best": "*fp32", "token": "*i64", "normal": "*fp32",
        "blocks": "i32",
    }  # fmt: skip
    return made, compile_for(device, join_summaries, types, {"PADDED_BLOCKS": 64})


def draws(device: Device) -> tuple[Compiled, Compiled]:
    types: dict[str, str] = BLOCKS | {"logits": "*fp32", "best": "*fp32", "controls": "*i64"}
    made = compile_for(device, draw_blocks, types, {"BLOCK": BLOCK}, ("stride", "vocabulary"))
    types = {"controls": "*i64", "tops": "*fp32", "tokens": "*i32", "drawn": "*i64", "blocks": "i32"}
    return made, compile_for(device, join_draws, types, {"PADDED_BLOCKS": 64})


@pytest.mark.parametrize("kernels", [summaries, draws])
def test_sampler(kernels: Callable[[Device], tuple[Compiled, Compiled]]) -> None:
    """A vocabulary is a multiple of 16 more often than not; what begins at 16 bytes is read in whole ones then."""
    blocks, joined = kernels(90)
    check(blocks, 90)
    check(joined, 90)
    assert "ld.global.v4" in blocks.assembly
