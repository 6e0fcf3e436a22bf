"""Products with weights in groups, see `model.weight_formats.groups`, which are read as they are stored.

Few rows are multiplied by a kernel. For many a kernel dequantizes the weights, and torch multiplies. A weight is
computed in float32 and rounded once, to the type of the activations, as in `GroupLinear`. So few rows and many are
multiplied with the same weights. Sums are float32. Integers whose groups are large have another kernel for few rows,
see `model.gpu.line_product`.

Weights lie in steps of inputs. A step has the integers of all its inputs, output by output: what a program reads of it
is one piece of memory. In 4 bits a byte has an input of the first half of a step, in its lower half, and the one at the
same place of the second half: so each half is multiplied as it is, and nothing changes places in registers.

Invariant: in the kernel's product an output of a row is one sum over its inputs in an order that neither the other rows
nor the row's place among them changes.
"""

import triton
import triton.language as tl

from model.gpu.formats import FP8, FP8_BITS, decoded

INTEGERS, E2M1_BITS, TABLE = (tl.constexpr(i) for i in range(5, 8))
"""Formats of stored integers beside FP8 and FP8_BITS: levels that follow each other; e2m1; any levels, by a table."""


@triton.jit(do_not_specialize=["rows", "groups"])
def multiply_groups(
    out,
    x,
    values,
    scales,
    offsets,
    index,
    table,
    bias,
    # Numbers
    rows,
    outputs,
    width,
    groups,
    out_stride,
    # Stored integers and their groups
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    # Sizes of a program
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    # Types and variants
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    INDEXED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Computes x times the weights, plus the bias. Grid: (rows in ROWS, outputs in OUTS).

    Args:
        out: [rows, outputs] with this stride of rows.
        x: [rows, width].
        values: [steps, outputs, STEP * BITS / 8] uint8. See `model.gpu.group_linear.pack_steps`.
        scales: [groups, outputs] float32, or [groups / 2, outputs] int32. See `model.gpu.group_linear.pack_pairs`.
        offsets: Likewise. Not read where OFFSETS is None.
        index: [width] int32. Group of each input. Not read without INDEXED.
        table: [2 ** BITS] float32. Level of each stored integer. Not read where FORMAT is not TABLE.
        bias: [outputs]. Not read without BIAS.
        rows: Rows of x.
        outputs: Outputs.
        width: Inputs.
        groups: Groups of an output.
        out_stride: Stride of rows of `out`.
        FORMAT: Format of the stored integers.
        BITS: Bits of a stored integer, 4 or 8.
        FIRST: Lowest level, where FORMAT is INTEGERS.
        SIZE: Inputs of a group. 0 where one group has all inputs.
        RUN: Neighbouring inputs that have one scale: a power of two. 1 with INDEXED.
        STEP: Inputs of a step.
        ROWS: Rows of a program, at least 16.
        OUTS: Outputs of a program, at least 16.
        SCALES: Type of scales.
        OFFSETS: Type of offsets. None where groups have none.
        INDEXED: Whether groups are not runs of inputs.
        BIAS: Whether there is a bias.
    """
    LINE: tl.constexpr = STEP * BITS // 8  # bytes, and inputs that are multiplied at once
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    byte = tl.arange(0, LINE)
    lines = x + row.to(tl.int64)[:, None] * width
    kept = row < rows
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for step in tl.range(0, tl.cdiv(width, STEP)):
        place = (output.to(tl.int64) + step * outputs)[:, None] * LINE + byte[None, :]
        stored = tl.load(values + place, mask=(output < outputs)[:, None], other=0)
        start = step * STEP
        if BITS == 4:
            sums = add_inputs(
                sums, lines, stored & 15, scales, offsets, index, table, kept, output, outputs, width, groups,
                start, FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
            )  # fmt: skip
            sums = add_inputs(
                sums, lines, stored >> 4, scales, offsets, index, table, kept, output, outputs, width, groups,
                start + LINE, FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
            )  # fmt: skip
        else:
            sums = add_inputs(
                sums, lines, stored, scales, offsets, index, table, kept, output, outputs, width, groups, start,
                FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
            )  # fmt: skip
    if BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * out_stride + output[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=kept[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["groups", "first", "end"])
def unpack_groups(
    out,
    values,
    scales,
    offsets,
    index,
    table,
    # Numbers
    outputs,
    width,
    groups,
    first,
    end,
    # Stored integers and their groups
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    # Sizes of a program
    STEP: tl.constexpr,
    OUTS: tl.constexpr,
    # Types and variants
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Computes the weights of the outputs from `first` to `end` as floats. Grid: (these outputs in OUTS, steps).

    They go to `out`, [end - first, width]. Other arguments are those of `multiply_groups`.
    """
    LINE: tl.constexpr = STEP * BITS // 8
    output = first + tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    step, written = tl.program_id(1), output < end
    place = (output.to(tl.int64) + step.to(tl.int64) * outputs)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    stored = tl.load(values + place, mask=written[:, None], other=0)
    lines, start = out + (output - first).to(tl.int64)[:, None] * width, step * STEP
    if BITS == 4:
        _store_weights(
            lines, stored & 15, scales, offsets, index, table, written, output, outputs, width, groups, start,
            FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
        )  # fmt: skip
        _store_weights(
            lines, stored >> 4, scales, offsets, index, table, written, output, outputs, width, groups, start + LINE,
            FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
        )  # fmt: skip
    else:
        _store_weights(
            lines, stored, scales, offsets, index, table, written, output, outputs, width, groups, start,
            FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, INDEXED,
        )  # fmt: skip


@triton.jit
def _store_weights(
    lines, stored, scales, offsets, index, table, written, output, outputs, width, groups, start,
    FORMAT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Stores the weights of the inputs from `start` on, in outputs that are `written`, to the addresses `lines`."""
    inputs = start + tl.arange(0, stored.shape[1])
    weights = _weights(
        stored, scales, offsets, index, table, output, outputs, width, groups, start, FORMAT, FIRST, SIZE, RUN,
        SCALES, OFFSETS, INDEXED,
    )  # fmt: skip
    there = written[:, None] & (inputs < width)[None, :]
    tl.store(lines + inputs[None, :], weights.to(lines.dtype.element_ty), mask=there)


@triton.jit
def add_inputs(
    sums, lines, stored, scales, offsets, index, table, kept, output, outputs, width, groups, start,
    FORMAT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Adds the products of the inputs from `start` on, whose stored integers are [OUTS, inputs] uint8.

    `lines` are the addresses of rows, [ROWS, 1], of which there are those that are `kept`, [ROWS] bool.
    """
    inputs = start + tl.arange(0, stored.shape[1])
    # An input past the end is 0, whatever stands for its weight.
    known = kept[:, None] & (inputs < width)[None, :]
    factors = tl.load(lines + inputs[None, :], mask=known, other=0.0)
    weights = _weights(
        stored, scales, offsets, index, table, output, outputs, width, groups, start, FORMAT, FIRST, SIZE, RUN,
        SCALES, OFFSETS, INDEXED,
    )  # fmt: skip
    return tl.dot(factors, tl.trans(weights.to(factors.dtype)), sums, input_precision="ieee")


@triton.jit
def _weights(
    stored, scales, offsets, index, table, output, outputs, width, groups, start, FORMAT: tl.constexpr,
    FIRST: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Returns the weights of the inputs from `start` on, float32 [OUTS, inputs]; those past the end are arbitrary."""
    COUNT: tl.constexpr = stored.shape[1]
    first = start + tl.arange(0, COUNT // RUN) * RUN
    if INDEXED:
        group = tl.load(index + first, mask=first < width, other=0)
    elif SIZE == 0:
        group = first * 0
    else:
        group = first // SIZE
    there = (output < outputs)[:, None] & (group < groups)[None, :]
    weights = _levels(stored, table, FORMAT, FIRST)
    weights *= _of_inputs(scales, group, output, there, outputs, SCALES, RUN)
    if OFFSETS is not None:
        weights += _of_inputs(offsets, group, output, there, outputs, OFFSETS, RUN)
    return weights


@triton.jit
def _of_inputs(numbers, group, output, there, outputs, TYPE: tl.constexpr, RUN: tl.constexpr):
    """Loads a number of each run's group, and returns it for each input: float32 [outputs, runs * RUN].

    16 bits are loaded in pairs, for a copy that a loop starts some rounds ahead has 4 bytes at least.
    """
    IN_PAIRS: tl.constexpr = TYPE.primitive_bitwidth == 16
    if IN_PAIRS:
        place = (group // 2)[None, :] * outputs + output[:, None]
        pair = tl.load(numbers + place, mask=there, other=0)
        each = (pair >> (group % 2 * 16)[None, :]).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    else:
        place = group[None, :] * outputs + output[:, None]
        each = tl.load(numbers + place, mask=there, other=0.0)
    OUTS: tl.constexpr = each.shape[0]
    RUNS: tl.constexpr = each.shape[1]
    return tl.reshape(tl.broadcast_to(each[:, :, None], (OUTS, RUNS, RUN)), (OUTS, RUNS * RUN))


@triton.jit
def _levels(stored, table, FORMAT: tl.constexpr, FIRST: tl.constexpr):
    """Returns the levels of stored integers in float32, exactly."""
    if FORMAT == TABLE:
        return tl.load(table + stored.to(tl.int32))
    if FORMAT == E2M1_BITS:
        # The bits of e2m1 stand in those of float16 with an exponent that is 14 too small.
        bits = stored.to(tl.uint16)
        bits = ((bits & 8) << 12) | ((bits & 7) << 9)
        return (bits.to(tl.float16, bitcast=True) * 16384.0).to(tl.float32)
    if FORMAT == FP8:
        return decoded(stored, FORMAT, tl.float32)
    if FORMAT == FP8_BITS:
        # By the bits NaN is 480.
        return tl.where((stored & 127) == 127, float("nan"), decoded(stored, FORMAT, tl.float32))
    # The lowest bits of 2^23 count in ones: a sum takes the place of a conversion, which has fewer units.
    numbers = (stored.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return numbers - (8388608.0 - FIRST)
