"""Writes keys and values of a step's tokens into their pages."""

import triton
import triton.language as tl

from model.gpu.formats import PLAIN, quantised


@triton.jit
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
    page_stride,
    scale_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    KEYS_ALONE: tl.constexpr,
):
    """Writes keys and values. Grid: (tokens,).

    Args:
        keys: [tokens, HEADS, HEAD_DIM] with these strides, any float dtype.
        values: Likewise.
        key_store: Keys of page 0, [HEADS, PAGE_SIZE, HEAD_DIM] in KV_FORMAT.
        value_store: Likewise.
        key_scales: Scales of page 0, [HEADS, PAGE_SIZE] float32. Not touched where KV_FORMAT is PLAIN.
        value_scales: Likewise.
        slots: [tokens] int32. Page x PAGE_SIZE + offset.
        key_stride: Elements between two tokens of `keys`.
        key_head_stride: Elements between two heads of `keys`.
        value_stride: Elements between two tokens of `values`.
        value_head_stride: Elements between two heads of `values`.
        page_stride: Elements from a page to the next one.
        scale_stride: Likewise, of scales.
        HEADS: KV heads.
        PADDED_HEADS: A power of two not below HEADS.
        HEAD_DIM: Elements of a head.
        PADDED_DIM: A power of two not below HEAD_DIM.
        PAGE_SIZE: Tokens of a page.
        KV_FORMAT: Format of the pool, see `model.gpu.formats`.
        KEYS_ALONE: Whether values are in keys (latent attention), so that nothing is written of them.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    page, offset = (slot // PAGE_SIZE).to(tl.int64), slot % PAGE_SIZE
    elements, scales = page * page_stride, page * scale_stride
    source = keys + token.to(tl.int64) * key_stride
    _write(
        source, key_head_stride, key_store + elements, key_scales + scales, offset, HEADS, PADDED_HEADS, HEAD_DIM,
        PADDED_DIM, PAGE_SIZE, KV_FORMAT,
    )  # fmt: skip
    if not KEYS_ALONE:
        source = values + token.to(tl.int64) * value_stride
        _write(
            source, value_head_stride, value_store + elements, value_scales + scales, offset, HEADS, PADDED_HEADS,
            HEAD_DIM, PADDED_DIM, PAGE_SIZE, KV_FORMAT,
        )  # fmt: skip


@triton.jit
def _write(
    source,
    head_stride,
    store,
    scales,
    offset,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    head = tl.arange(0, PADDED_HEADS)
    dims = tl.arange(0, PADDED_DIM)
    there = head < HEADS
    kept = there[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(source + head[:, None] * head_stride + dims[None, :], mask=kept, other=0.0)
    at = head * PAGE_SIZE + offset
    to = store + at[:, None] * HEAD_DIM + dims[None, :]
    if KV_FORMAT == PLAIN:
        tl.store(to, rows.to(store.dtype.element_ty), mask=kept)
    else:
        elements, scale = quantised(rows.to(tl.float32), KV_FORMAT)
        tl.store(to, elements, mask=kept)
        tl.store(scales + at, scale, mask=there)
