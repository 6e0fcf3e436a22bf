"""Products of lines, compiled for GPUs that are not here: what a weight costs, and that nothing spills."""

import pytest
import triton.language as tl

from model.gpu.group_linear import LINE_OUTPUTS, LINE_STAGES, LINE_WARPS
from model.gpu.line_product import conversion, join_sums, multiply_lines
from tests.model.gpu.ahead import Compiled, Device, compile_for
from tests.model.gpu.test_ahead import check

pytestmark = pytest.mark.slow

ALIGNED = ("outputs", "width", "out_stride")


def compiled(
    device: Device, bits: int, size: int, rows: int, half: bool = False, offsets: bool = False, by_bits: bool = True
) -> Compiled:
    line, first, floats = min(64, size or 64), -8 if bits == 4 else -128, "*fp16" if half else "*bf16"
    types = {
        "out": floats, "x": floats, "values": "*u8", "scales": "*i32" if size else "*fp32", "offsets": "*i32",
        "bias": floats, "rows": "i32", "outputs": "i32", "width": "i32", "out_stride": "i32",
    }  # fmt: skip
    constants = {
        "BITS": bits, "FIRST": first, "SIZE": size, "CONVERSION": conversion(bits, first, half) if by_bits else "",
        "STEPS": 16, "STEP": line * 8 // bits, "ROWS": rows, "OUTS": LINE_OUTPUTS,
        "SCALES": tl.float16 if size else tl.float32, "OFFSETS": tl.float16 if offsets else None, "BIAS": True,
    }  # fmt: skip
    return compile_for(device, multiply_lines, types, constants, ALIGNED, LINE_WARPS, LINE_STAGES)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(("bits", "size", "offsets"), [(4, 32, True), (4, 128, False), (8, 0, False), (8, 64, False)])
def test_lines(capability: int, bits: int, size: int, offsets: bool, rows: int) -> None:
    for half in (False, True):
        made = compiled(capability, bits, size, rows, half, offsets, capability < 100)
        check(made, capability, 24 if capability == 100 else 0)
        assert "cp.async.cg.shared.global" in made.assembly, "weights are not copied asynchronously, 16 bytes each"
        wanted = {80: "mma.sync", 90: "wgmma.mma_async"}.get(capability, "mma")
        assert wanted in made.assembly
        if capability < 100:
            assert "cvt.rn.f32" not in made.assembly, "integers are converted one by one"


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
def test_lines_without_instructions_of_nvidia(device: str) -> None:
    assert compiled(device, 4, 128, 16, by_bits=False).spilled == 0


def test_sums_are_joined() -> None:
    types = {
        "out": "*bf16", "sums": "*fp32", "bias": "*bf16", "rows": "i32", "outputs": "i32", "out_stride": "i32",
    }  # fmt: skip
    check(compile_for(90, join_sums, types, {"PARTS": 4, "OUTS": 512, "BIAS": True}, ("outputs", "out_stride")), 90)
