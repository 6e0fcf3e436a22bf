"""Kernels on single tokens of a layer: norms, rotation, gates, sums of ranks. In float32, rounded once."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["inner"])
def norm_rows(
    x, added, weight, out, summed, inner, stride, inner_stride, eps, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Computes RMSNorm. Grid: (rows,).

    Args:
        x: [rows / inner, inner, WIDTH] with these strides, any float dtype.
        added: [rows, WIDTH]. With ADDED, it is added to x first.
        weight: [WIDTH].
        out: [rows, WIDTH].
        summed: [rows, WIDTH]. With ADDED, the sum.
        inner: Rows with one outer index.
        stride: Elements between two outer indices of x.
        inner_stride: Elements between two rows of one outer index.
        eps: Epsilon of the norm.
        WIDTH: Elements of a row.
        PADDED_WIDTH: A power of two not below WIDTH.
        ADDED: Whether `added` is added.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_WIDTH)
    there = place < WIDTH
    line = tl.load(x + row // inner * stride + row % inner * inner_stride + place, mask=there, other=0.0).to(tl.float32)
    if ADDED:
        line += tl.load(added + row * WIDTH + place, mask=there, other=0.0).to(tl.float32)
        rounded = line.to(summed.dtype.element_ty)
        tl.store(summed + row * WIDTH + place, rounded, mask=there)
        line = rounded.to(tl.float32)  # the rounded sum is normalised, as the residual stream holds that one
    size = tl.math.rsqrt(tl.sum(line * line, 0) / WIDTH + eps)
    factors = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, (line * size * factors).to(out.dtype.element_ty), mask=there)


@triton.jit
def rotate_rows(
    x, query_weight, key_weight, positions, cos, sin, stride, head_stride, eps, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, PAIRS: tl.constexpr, PADDED_PAIRS: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Computes `model.rope.rotate` in place, with NORMED behind the RMSNorm of each head. Grid: (tokens,).

    Args:
        x: [tokens, HEADS, 2 x PAIRS + REST] with these strides, any float dtype. Queries come first.
        query_weight: [2 x PAIRS + REST]. Weight of the norm of queries, not read without NORMED.
        key_weight: Likewise, of the other heads.
        positions: [tokens] int64.
        cos: [context, PAIRS].
        sin: [context, PAIRS].
        stride: Elements between two tokens.
        head_stride: Elements between two heads.
        eps: Epsilon of the norms.
        QUERIES: Query heads of a token.
        HEADS: Heads of a token.
        PADDED_HEADS: A power of two not below HEADS.
        PAIRS: Rotated pairs of a head.
        PADDED_PAIRS: A power of two not below PAIRS.
        REST: Elements of a head that are not rotated.
        PADDED_REST: A power of two not below REST.
        NORMED: Whether heads are normalised.
    """
    token = tl.program_id(0)
    head = tl.arange(0, PADDED_HEADS)
    pair = tl.arange(0, PADDED_PAIRS)
    turned = tl.load(positions + token) * PAIRS + pair
    c = tl.load(cos + turned, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + turned, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    at = x + token.to(tl.int64) * stride + head[:, None] * head_stride + pair[None, :]
    there = (head < HEADS)[:, None] & (pair < PAIRS)[None, :]
    low = tl.load(at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(at + PAIRS, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        weight = tl.where(head < QUERIES, query_weight, key_weight)[:, None] + pair[None, :]
        low_weight = tl.load(weight, mask=there, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + PAIRS, mask=there, other=0.0).to(tl.float32)
        if REST:
            rest = 2 * PAIRS + tl.arange(0, PADDED_REST)
            rest_at = x + token.to(tl.int64) * stride + head[:, None] * head_stride + rest[None, :]
            in_rest = (head < HEADS)[:, None] & (rest < 2 * PAIRS + REST)[None, :]
            line = tl.load(rest_at, mask=in_rest, other=0.0).to(tl.float32)
            squares += tl.sum(line * line, 1)
            rest_weight = tl.where(head < QUERIES, query_weight, key_weight)[:, None] + rest[None, :]
            line *= tl.load(rest_weight, mask=in_rest, other=0.0).to(tl.float32)
        size = tl.math.rsqrt(squares / (2 * PAIRS + REST) + eps)[:, None]
        # Rounded before the rotation, as the norm's result is.
        low = (low * size * low_weight).to(x.dtype.element_ty).to(tl.float32)
        high = (high * size * high_weight).to(x.dtype.element_ty).to(tl.float32)
        if REST:
            tl.store(rest_at, (line * size).to(x.dtype.element_ty), mask=in_rest)
    tl.store(at, (low * c - high * s).to(x.dtype.element_ty), mask=there)
    tl.store(at + PAIRS, (high * c + low * s).to(x.dtype.element_ty), mask=there)


@triton.jit
def gate_rows(gate_up, out, width, BLOCK: tl.constexpr):
    """Computes silu(gate) x up. Grid: (rows, width in BLOCKs).

    Args:
        gate_up: [rows, 2 x width].
        out: [rows, width].
        width: Elements of a gate.
        BLOCK: Elements of a program.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < width
    gate = tl.load(gate_up + row * 2 * width + place, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + place, mask=there, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    tl.store(out + row * width + place, made.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def add_ranks(parts, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up the parts of ranks, in their order. Grid: (count in BLOCKs,).

    Args:
        parts: [RANKS, count], any float dtype.
        out: [count].
        count: Elements of a part.
        RANKS: The number of ranks.
        BLOCK: Elements of a program.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    total = tl.load(parts + place, mask=there, other=0.0).to(tl.float32)
    for rank in range(1, RANKS):
        total += tl.load(parts + rank * count.to(tl.int64) + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
