"""Products of many experts in one launch (Gale et al., MegaBlocks, 2022): each tile of rows is one expert's.

Experts' weights stay where they were loaded, each in its own memory. A kernel gets the address of the first expert's,
and how far the others' are from there.

Invariant: with one size of tiles a row's result is one sum over its inputs in an order that neither the other rows nor
the row's place among them changes. How many places a step has chooses the size. Between sizes results agree within
rounding: products of few rows and of many are other instructions.
"""

import triton
import triton.language as tl

from model.gpu.group_product import add_inputs


@triton.jit
def multiply_experts(
    out, x, weight, weight_at, bias, bias_at, factors, tiles, order, outputs, width, USED: tl.constexpr,
    DIRECT: tl.constexpr, WEIGH_INPUTS: tl.constexpr, WEIGH_OUTPUTS: tl.constexpr, BIAS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Computes x times the weights of each row's expert, plus its bias. Grid: (outputs in OUTS, tiles).

    Args:
        out: [places, outputs]. A place is a token with one of its experts.
        x: [places / USED, width].
        weight: [outputs, width]. Weights of the first expert.
        weight_at: [experts] int64. Elements from these weights to those of each expert.
        bias: [outputs]. Bias of the first expert. Not read without BIAS.
        bias_at: [experts] int64. Likewise.
        factors: [places] float32. Weight of the expert at each place. Read to weigh.
        tiles: [tiles, 3] int32. See `model.gpu.expert_choice.arrange_places`. Not read with DIRECT.
        order: [places] int32. Places in order of experts; with DIRECT, the expert of each place.
        outputs: Outputs.
        width: Inputs.
        USED: Places that have one row of x.
        DIRECT: Whether each place is a tile of its own, in no order.
        WEIGH_INPUTS: Whether `factors` multiply rows of x, which are rounded then.
        WEIGH_OUTPUTS: Whether `factors` multiply the result.
        BIAS: Whether there is a bias.
        WHOLE: Whether INNER divides the inputs, and weights lie at multiples of 16 elements.
        ROWS: Rows of a tile, at least 16.
        OUTS: Outputs of a program.
        INNER: Inputs that are multiplied at once.
    """
    if not DIRECT:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(tiles + tl.program_id(1) * 3 + 2) == 0:  # fewer tiles than there may be
            return
    expert, place, kept = rows_of_tile(tiles, order, DIRECT, ROWS)
    output = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    distance = tl.load(weight_at + expert)
    if WHOLE:
        distance = tl.multiple_of(distance, 16)
    lines = x + (place // USED).to(tl.int64)[:, None] * width + inner[None, :]
    # Outputs past the end compute the last one again, and are not stored.
    column = tl.minimum(output, outputs - 1).to(tl.int64)
    columns = weight + distance + column[None, :] * width + inner[:, None]
    if WEIGH_INPUTS:
        scale = tl.load(factors + place, mask=kept, other=0.0)[:, None]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for start in tl.range(0, width, INNER):
        if WHOLE:
            left = tl.load(lines + start, mask=kept[:, None], other=0.0)
            right = tl.load(columns + start)
        else:
            known = start + inner < width
            left = tl.load(lines + start, mask=kept[:, None] & known[None, :], other=0.0)
            right = tl.load(columns + start, mask=known[:, None], other=0.0)
        if WEIGH_INPUTS:
            left = (left.to(tl.float32) * scale).to(left.dtype)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    store_rows(sums, out, bias, bias_at, factors, expert, place, kept, output, outputs, BIAS, WEIGH_OUTPUTS)


@triton.jit
def multiply_expert_groups(
    out, x, values, values_at, scales, scales_at, offsets, offsets_at, table, bias, bias_at, factors, tiles, order,
    outputs, width, groups, USED: tl.constexpr, DIRECT: tl.constexpr, WEIGH_OUTPUTS: tl.constexpr, BIAS: tl.constexpr,
    FORMAT: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
    STEP: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """Computes `multiply_experts` with weights in groups, see `model.gpu.group_product.multiply_groups`.

    Args:
        out: [places, outputs].
        x: [places / USED, width].
        values: [steps, outputs, STEP * BITS / 8] uint8. Stored integers of the first expert.
        values_at: [experts] int64. Elements from these to those of each expert.
        scales: Scales of the first expert.
        scales_at: [experts] int64. Likewise.
        offsets: Offsets of the first expert. Not read where OFFSETS is None.
        offsets_at: [experts] int64. Likewise.
        table: [2 ** BITS] float32. Level of each stored integer. Not read where FORMAT is not TABLE.
        bias: [outputs]. Bias of the first expert. Not read without BIAS.
        bias_at: [experts] int64. Elements from this bias to that of each expert.
        factors: [places] float32. Weight of the expert at each place. Read to weigh.
        tiles: See `multiply_experts`.
        order: See `multiply_experts`.
        outputs: Outputs.
        width: Inputs.
        groups: Groups of an output.
        USED: Places that have one row of x.
        DIRECT: See `multiply_experts`.
        WEIGH_OUTPUTS: Whether `factors` multiply the result.
        BIAS: Whether there is a bias.
        FORMAT: Format of the stored integers.
        BITS: Bits of a stored integer, 4 or 8.
        FIRST: Lowest level, where levels are integers.
        SIZE: Inputs of a group. 0 where one group has all inputs.
        RUN: Neighbouring inputs that have one scale.
        STEP: Inputs of a step.
        SCALES: Type of scales.
        OFFSETS: Type of offsets. None where groups have none.
        ROWS: Rows of a tile, at least 16.
        OUTS: Outputs of a program.
    """
    LINE: tl.constexpr = STEP * BITS // 8
    if not DIRECT:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(tiles + tl.program_id(1) * 3 + 2) == 0:  # fewer tiles than there may be
            return
    expert, place, kept = rows_of_tile(tiles, order, DIRECT, ROWS)
    output = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    byte = tl.arange(0, LINE)
    lines = x + (place // USED).to(tl.int64)[:, None] * width
    own_values = values + tl.multiple_of(tl.load(values_at + expert), 16)
    own_scales = scales + tl.load(scales_at + expert)
    own_offsets = offsets + tl.load(offsets_at + expert)
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for step in tl.range(0, tl.cdiv(width, STEP)):
        at = (output.to(tl.int64) + step * outputs)[:, None] * LINE + byte[None, :]
        stored = tl.load(own_values + at, mask=(output < outputs)[:, None], other=0)
        start = step * STEP
        if BITS == 4:
            sums = add_inputs(
                sums, lines, stored & 15, own_scales, own_offsets, table, table, kept, output, outputs, width, groups,
                start, FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, False,
            )  # fmt: skip
            sums = add_inputs(
                sums, lines, stored >> 4, own_scales, own_offsets, table, table, kept, output, outputs, width, groups,
                start + LINE, FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, False,
            )  # fmt: skip
        else:
            sums = add_inputs(
                sums, lines, stored, own_scales, own_offsets, table, table, kept, output, outputs, width, groups,
                start, FORMAT, FIRST, SIZE, RUN, SCALES, OFFSETS, False,
            )  # fmt: skip
    store_rows(sums, out, bias, bias_at, factors, expert, place, kept, output, outputs, BIAS, WEIGH_OUTPUTS)


@triton.jit
def rows_of_tile(tiles, order, DIRECT: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of this program's tile, the places of its rows [ROWS], and which of the rows there are."""
    tile = tl.program_id(1)
    row = tl.arange(0, ROWS)
    if DIRECT:
        expert = tl.load(order + tile)
        place = tile + row * 0
        kept = row < 1
    else:
        kept = row < tl.load(tiles + tile * 3 + 2)
        expert = tl.load(tiles + tile * 3)
        place = tl.load(order + tl.load(tiles + tile * 3 + 1) + row, mask=kept, other=0)
    return expert, place, kept


@triton.jit
def store_rows(
    sums, out, bias, bias_at, factors, expert, place, kept, output, outputs, BIAS: tl.constexpr, WEIGHED: tl.constexpr
):  # fmt: skip
    """Stores sums [ROWS, OUTS] plus the expert's bias, times its weight, at their places."""
    if BIAS:
        own = bias + tl.load(bias_at + expert) + output
        sums += tl.load(own, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    if WEIGHED:
        sums *= tl.load(factors + place, mask=kept, other=0.0)[:, None]
    at = out + place.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=kept[:, None] & (output < outputs)[None, :])
