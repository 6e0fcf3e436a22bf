"""Products with weights in groups whose integers are multiplied as they are, and scaled afterwards.

A *line* is a run of inputs of one output that are multiplied at once; its integers lie side by side in memory, see
`model.gpu.group_product`. A *level* is the number that a stored integer stands for, before its scale. Where all inputs
of a line have one scale, the sum over the line is multiplied by it: one multiplication a line, instead of one and a
rounding for each weight. So these weights are not rounded.

Integers become 16-bit floats by their bits, several at once. The bits of an integer replace the lowest bits of a float
whose last bit counts 1 (1024 in float16, 128 in bfloat16), and that float is subtracted (Who Says Elephants Can't Run,
Kim et al., 2022; Marlin, Frantar et al., 2024).

Weights are the left factor: a tile has 64 outputs or more, as the widest products of a device take them, and as few
rows as there are. Invariant: an output of a row is one sum over its inputs, in an order that neither the other rows nor
the row's place among them changes.
"""

import struct

import triton
import triton.language as tl

LEAST_SCALED = 32
"""Inputs of a line that has scales of its own, at least: a sum of fewer is scaled too often."""


def conversion(bits: int, first: int, half: bool) -> str:
    """Returns PTX that converts stored integers to levels as they lie in registers, four bytes at once.

    Args:
        bits: 4, of which the lower halves of four bytes go to operands 0 and 1, the upper ones to 2 and 3, or 8.
        first: Level of the integer 0.
        half: Whether levels are float16, not bfloat16.

    Returns:
        Instructions for `tl.inline_asm_elementwise`: its last operand has four bytes, each before it gets two levels.
        For 8 bits with bfloat16 they are for `first` = -128 alone. The last bit of bfloat16 counts 1 from 128 to 256
        only, so the upper bit of a byte is converted apart from the lower seven.
    """
    ones, magic = (0x3C003C00, 0x64646464) if half else (0x3F803F80, 0x43434343)
    base = 1024 if half else 128
    lines = [f"mov.b32 one, {ones:#x};", f"mov.b32 less, {_twice(first - base, half):#x};"]
    form = "f16x2" if half else "bf16x2"
    if bits == 4:
        lines += ["and.b32 low, $4, 0x0f0f0f0f;", "shr.u32 high, $4, 4;", "and.b32 high, high, 0x0f0f0f0f;"]
        for i, (part, chosen) in enumerate((("low", 0x4140), ("low", 0x4342), ("high", 0x4140), ("high", 0x4342))):
            lines += [f"prmt.b32 ${i}, {part}, {magic:#x}, {chosen:#x};", f"fma.rn.{form} ${i}, ${i}, one, less;"]
    elif half:
        for i, chosen in enumerate((0x4140, 0x4342)):
            lines += [f"prmt.b32 ${i}, $2, {magic:#x}, {chosen:#x};", f"fma.rn.{form} ${i}, ${i}, one, less;"]
    else:
        lines += ["mov.b32 less, 0xbf80bf80;"]
        for i, chosen in enumerate((0x4140, 0x4342)):
            lines += [
                f"prmt.b32 low, $2, {magic:#x}, {chosen:#x};",
                "lop3.b32 high, low, 0xff80ff80, 0x00800080, 0x6a;",  # (low & 0xff80) ^ 0x80: 256 less the upper bit's
                "and.b32 low, low, 0xff7fff7f;",
                f"fma.rn.{form} ${i}, high, less, low;",
            ]
    return "{ .reg .b32 low, high, one, less; " + " ".join(lines) + " }"


def _twice(number: int, half: bool) -> int:
    """Returns the bits of a number in 16 bits, twice."""
    bits = (
        struct.unpack("<H", struct.pack("<e", number))[0]
        if half
        else struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    )
    return int(bits) << 16 | int(bits)


@triton.jit(do_not_specialize=["rows"])
def multiply_lines(
    out,
    x,
    values,
    scales,
    offsets,
    bias,
    # Numbers
    rows,
    outputs,
    width,
    out_stride,
    # Stored integers and their groups
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    CONVERSION: tl.constexpr,
    # Sizes of a program
    STEPS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    # Types and variants
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Computes x times the weights, plus the bias. Grid: (rows in ROWS, outputs in OUTS, steps in STEPS).

    Args:
        out: [rows, outputs] with this stride of rows; where steps are divided, [parts, rows, outputs] float32 of sums
            over STEPS steps each, for `join_sums`.
        x: [rows, width] float16, bfloat16 or float32.
        values: See `model.gpu.group_product.multiply_groups`, as the other arguments that are not stated here.
        scales: Likewise.
        offsets: Likewise.
        bias: Likewise.
        rows: Rows of x.
        outputs: Outputs.
        width: Inputs.
        out_stride: Stride of rows of `out`.
        BITS: Bits of a stored integer, 4 or 8.
        FIRST: Level of the stored integer 0.
        SIZE: Inputs of a group, a multiple of those of a line. 0 where one group has all inputs; it has no offset.
        CONVERSION: See `conversion`. "" converts without it.
        STEPS: Steps of a program.
        STEP: Inputs of a step.
        ROWS: Rows of a program, at least 16.
        OUTS: Outputs of a program, at least 16.
        SCALES: Type of scales.
        OFFSETS: Type of offsets. None where groups have none.
        BIAS: Whether there is a bias, for programs that have all steps.
    """
    LINE: tl.constexpr = STEP * BITS // 8  # bytes, and inputs that are multiplied at once
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    there = output < outputs
    lines = x + row.to(tl.int64)[:, None] * width
    kept = row < rows
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    part = tl.program_id(2)
    for step in tl.range(part * STEPS, tl.minimum((part + 1) * STEPS, tl.cdiv(width, STEP))):
        place = (output.to(tl.int64) + step * outputs)[:, None] * LINE + tl.arange(0, LINE)[None, :]
        stored = tl.load(values + place, mask=there[:, None], other=0)
        start = step * STEP
        if BITS == 4:
            low, high = _halves(stored, FIRST, CONVERSION, x.dtype.element_ty)
            sums = _add_line(sums, low, lines, start, scales, offsets, kept, output, there, outputs, width, SIZE,
                             SCALES, OFFSETS)  # fmt: skip
            sums = _add_line(sums, high, lines, start + LINE, scales, offsets, kept, output, there, outputs, width,
                             SIZE, SCALES, OFFSETS)  # fmt: skip
        else:
            levels = _bytes(stored, FIRST, CONVERSION, x.dtype.element_ty)
            sums = _add_line(sums, levels, lines, start, scales, offsets, kept, output, there, outputs, width, SIZE,
                             SCALES, OFFSETS)  # fmt: skip
    if SIZE == 0:
        sums *= _of_group(scales, 0, output, there, outputs, SCALES)[:, None]
    if BIAS:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
    at = (part.to(tl.int64) * rows + row)[None, :] * out_stride + output[:, None]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=kept[None, :] & there[:, None])


@triton.jit(do_not_specialize=["rows"])
def join_sums(out, sums, bias, rows, outputs, out_stride, PARTS: tl.constexpr, OUTS: tl.constexpr, BIAS: tl.constexpr):
    """Adds the sums of all parts, in their order, and the bias. Grid: (rows, outputs in OUTS).

    Args:
        out: [rows, outputs] with this stride of rows.
        sums: [PARTS, rows, outputs] float32.
        bias: [outputs]. Not read without BIAS.
        rows: Rows.
        outputs: Outputs.
        out_stride: Stride of rows of `out`.
        PARTS: Parts of the sums.
        OUTS: Outputs of a program.
        BIAS: Whether there is a bias.
    """
    row, output = tl.program_id(0), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    there = output < outputs
    total = tl.zeros((OUTS,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * rows + row).to(tl.int64) * outputs + output, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + output, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_line(
    sums, levels, lines, start, scales, offsets, kept, output, there, outputs, width, SIZE: tl.constexpr,
    SCALES: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Adds the products of a line, [OUTS, inputs] levels from the input `start` on."""
    inputs = start + tl.arange(0, levels.shape[1])
    # An input past the end is 0, whatever stands for its weight.
    factors = tl.load(lines + inputs[None, :], mask=kept[:, None] & (inputs < width)[None, :], other=0.0)
    if SIZE == 0:
        return tl.dot(levels, tl.trans(factors), sums, input_precision="ieee")
    line = tl.dot(levels, tl.trans(factors), input_precision="ieee")
    group = tl.minimum(start, width - 1) // SIZE
    sums += line * _of_group(scales, group, output, there, outputs, SCALES)[:, None]
    if OFFSETS is not None:
        total = tl.sum(factors.to(tl.float32), 1)
        sums += _of_group(offsets, group, output, there, outputs, OFFSETS)[:, None] * total[None, :]
    return sums


@triton.jit
def _of_group(numbers, group, output, there, outputs, TYPE: tl.constexpr):
    """Loads a group's number of each output, float32 [OUTS]. 16 bits are stored in pairs."""
    IN_PAIRS: tl.constexpr = TYPE.primitive_bitwidth == 16
    if IN_PAIRS:
        pair = tl.load(numbers + (group // 2) * outputs + output, mask=there, other=0)
        found = (pair >> (group % 2 * 16)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    else:
        found = tl.load(numbers + group * outputs + output, mask=there, other=0.0)
    return found


@triton.jit
def _halves(stored, FIRST: tl.constexpr, CONVERSION: tl.constexpr, TO: tl.constexpr):
    """Returns the levels of the lower and the upper halves of bytes, each [OUTS, LINE] in TO."""
    if CONVERSION != "":
        # A tuple of types cannot have a constant: levels come as bits.
        low, high = tl.inline_asm_elementwise(
            CONVERSION, "=&r,=&r,=&r,=&r,r", [stored], (tl.int16, tl.int16), False, 4
        )  # fmt: skip
        return low.to(TO, bitcast=True), high.to(TO, bitcast=True)
    return ((stored & 15).to(tl.int32) + FIRST).to(TO), ((stored >> 4).to(tl.int32) + FIRST).to(TO)


@triton.jit
def _bytes(stored, FIRST: tl.constexpr, CONVERSION: tl.constexpr, TO: tl.constexpr):
    """Returns the levels of bytes, [OUTS, LINE] in TO."""
    if CONVERSION != "":
        levels = tl.inline_asm_elementwise(CONVERSION, "=&r,=&r,r", [stored], tl.int16, False, 4)
        return levels.to(TO, bitcast=True)
    return (stored.to(tl.int32) + FIRST).to(TO)
