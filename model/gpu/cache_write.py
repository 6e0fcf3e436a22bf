"""Writes keys and values of a step's tokens into their pages."""

import triton
import triton.language as tl

from model.gpu.formats import PLAIN, quantised


@triton.jit(do_not_specialize=["store_slots"])
def write_slots(
    keys,
    values,
    key_store,
    value_store,
    key_scales,
    value_scales,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    store_slots,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Writes keys and values. Grid: (tokens,).

    Args:
        keys: [tokens, HEADS, DIM] with these strides.
        values: Likewise.
        key_store: [HEADS, store_slots, DIM] in FORMAT.
        value_store: Likewise.
        key_scales: [HEADS, store_slots] float32. Not touched where FORMAT is PLAIN.
        value_scales: Likewise.
        slots: [tokens] int32.
        key_stride: Stride of tokens in `keys`.
        key_head_stride: Stride of heads in `keys`.
        value_stride: Stride of tokens in `values`.
        value_head_stride: Stride of heads in `values`.
        store_slots: Slots of the pool.
        HEADS: KV heads.
        ROOM: A power of two not below HEADS.
        DIM: Elements of a head.
        WIDE: A power of two not below DIM.
        FORMAT: Format of the pool, see `model.gpu.formats`.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    source, target = keys + token.to(tl.int64) * key_stride, slot.to(tl.int64)
    _write(source, key_head_stride, key_store, key_scales, target, store_slots, HEADS, ROOM, DIM, WIDE, FORMAT)
    source = values + token.to(tl.int64) * value_stride
    _write(source, value_head_stride, value_store, value_scales, target, store_slots, HEADS, ROOM, DIM, WIDE, FORMAT)


@triton.jit
def _write(
    source,
    head_stride,
    store,
    scales,
    slot,
    store_slots,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    head = tl.arange(0, ROOM)
    dims = tl.arange(0, WIDE)
    there = head < HEADS
    kept = there[:, None] & (dims < DIM)[None, :]
    rows = tl.load(source + head[:, None] * head_stride + dims[None, :], mask=kept, other=0.0)
    at = head.to(tl.int64) * store_slots + slot
    to = store + at[:, None] * DIM + dims[None, :]
    if FORMAT == PLAIN:
        tl.store(to, rows.to(store.dtype.element_ty), mask=kept)
    else:
        elements, scale = quantised(rows.to(tl.float32), FORMAT)
        tl.store(to, elements, mask=kept)
        tl.store(scales + at, scale, mask=there)
