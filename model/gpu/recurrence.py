"""Kernels of recurrent layers: short convolutions and linear recurrences, over states in the pages of the pool.

A run is the tokens of one sequence in a step, cut into segments where checkpoints are. Its state is read before its
first token, and written after each segment that has a page for it, which may be the page that was read. Threads of a
program wait for each other between reading and writing: they may have divided the elements otherwise for the one than
for the other.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sections", "which", "stride"], do_not_specialize_on_alignment=["x", "taps", "bias"])
def convolve_pieces(
    out,
    x,
    taps,
    bias,
    pool,
    pieces,
    sources,
    sections,
    which,
    offset,
    page_stride,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Convolves each channel with the tokens before. Grid: (pieces, tiles of channels).

    Args:
        out: [tokens, CHANNELS] float32.
        x: [tokens, CHANNELS] float32, with this stride.
        taps: [CHANNELS, TAPS] float32, the oldest token first.
        bias: [CHANNELS] float32. Not touched unless BIASED.
        pool: Page 0, as float32.
        pieces: [n, 4] int32. Tokens of one run, up to TILE_TOKENS: the run's first segment, the packed offset of its
            first token, that of the piece's first token, and the piece's tokens.
        sources: [pages of a state, sections] int32. Pages before each segment, below 0 for none.
        sections: The number of segments.
        which: The state's page that the window is in.
        offset: Numbers from the beginning of that page to the window, [TAPS - 1, CHANNELS].
        page_stride: Numbers from a page to the next one.
        stride: Elements between two tokens of x.
        CHANNELS: The number of channels.
        TAPS: Tokens that an output sees.
        BIASED: Whether the bias is added.
        ACTIVATED: Whether SiLU follows.
        TILE_TOKENS: Tokens of a tile.
        TILE_CHANNELS: Channels of a tile.
    """
    piece = pieces + tl.program_id(0) * 4
    segment, begin, start, count = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    page = tl.load(sources + which * sections + segment)
    window = pool + page.to(tl.int64) * page_stride + offset
    token = tl.arange(0, TILE_TOKENS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    known = channel < CHANNELS
    inside = (token < count)[:, None] & known[None, :]
    total = tl.zeros((TILE_TOKENS, TILE_CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        # Inputs since the run's first token; those before it, from -1 down, are the last ones of the window.
        at = start - begin + token - (TAPS - 1 - tap)
        own, kept = inside & (at >= 0)[:, None], inside & (at < 0)[:, None] & (page >= 0)
        rows = (begin + at).to(tl.int64) * stride
        values = tl.load(x + rows[:, None] + channel[None, :], mask=own, other=0.0)
        values += tl.load(window + (at + TAPS - 1)[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0)
        total += values * tl.load(taps + channel * TAPS + tap, mask=known, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + channel, mask=known, other=0.0)[None, :]
    if ACTIVATED:
        total = total / (1.0 + tl.exp(-total))
    lines = (start + token).to(tl.int64) * CHANNELS
    tl.store(out + lines[:, None] + channel[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["sections", "which", "stride"], do_not_specialize_on_alignment=["x"])
def keep_windows(
    x,
    pool,
    runs,
    segments,
    sources,
    targets,
    sections,
    which,
    offset,
    page_stride,
    stride,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED_INPUTS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Writes the windows after all segments. Grid: (runs, tiles of channels). To be launched after `convolve_pieces`.

    Args:
        x: [tokens, CHANNELS] float32, with this stride.
        pool: Page 0, as float32.
        runs: [n, 2] int32. First segment of each run, and the one after its last.
        segments: [sections, 2] int32. Packed offset of each segment's first token, and its tokens.
        sources: [pages of a state, sections] int32. Pages before each segment, below 0 for none.
        targets: Likewise, pages after each segment.
        sections: The number of segments.
        which: The state's page that the window is in.
        offset: Numbers from the beginning of that page to the window, [INPUTS, CHANNELS].
        page_stride: Numbers from a page to the next one.
        stride: Elements between two tokens of x.
        CHANNELS: The number of channels.
        INPUTS: Inputs of a window.
        PADDED_INPUTS: A power of two not below INPUTS.
        TILE_CHANNELS: Channels of a tile.
    """
    run = runs + tl.program_id(0) * 2
    first, after = tl.load(run), tl.load(run + 1)
    begin = tl.load(segments + first * 2)
    page = tl.load(sources + which * sections + first)
    window = pool + page.to(tl.int64) * page_stride + offset
    place = tl.arange(0, PADDED_INPUTS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    inside = (place < INPUTS)[:, None] & (channel < CHANNELS)[None, :]
    # From the last segment to the first, which alone may have the page of the window that was read: later ones need it.
    for back in range(after - first):
        segment = after - 1 - back
        target = tl.load(targets + which * sections + segment)
        end = tl.load(segments + segment * 2) + tl.load(segments + segment * 2 + 1) - begin
        at = end - INPUTS + place
        own, kept = inside & (at >= 0)[:, None], inside & (at < 0)[:, None] & (page >= 0)
        rows = (begin + at).to(tl.int64) * stride
        values = tl.load(x + rows[:, None] + channel[None, :], mask=own, other=0.0)
        values += tl.load(window + (at + INPUTS)[:, None] * CHANNELS + channel[None, :], mask=kept, other=0.0)
        tl.debug_barrier()
        to = pool + target.to(tl.int64) * page_stride + offset
        tl.store(to + place[:, None] * CHANNELS + channel[None, :], values, mask=inside & (target >= 0))


@triton.jit(
    do_not_specialize=["sections", "query_stride", "key_stride", "value_stride"],
    do_not_specialize_on_alignment=["queries", "keys", "values", "rates", "skip"],
)
def recur_tokens(
    out,
    queries,
    keys,
    values,
    kept,
    rates,
    skip,
    pool,
    units,
    runs,
    segments,
    sources,
    targets,
    sections,
    page_stride,
    query_stride,
    key_stride,
    value_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    BY_ROW: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALISED: tl.constexpr,
    SKIPPED: tl.constexpr,
):
    """Runs a linear recurrence token by token, see `LinearRecurrence`. Grid: (runs, HEADS, tiles of a value).

    Args:
        out: [tokens, HEADS, VALUE_DIM] float32.
        queries: [tokens, HEADS / SHARED, KEY_DIM] float32, with this stride.
        keys: Likewise.
        values: [tokens, HEADS, VALUE_DIM] float32, with this stride.
        kept: [tokens, HEADS, KEY_DIM] float32 with BY_ROW, otherwise [tokens, HEADS].
        rates: [tokens, HEADS] float32.
        skip: [HEADS] float32. Not touched unless SKIPPED.
        pool: Page 0, as float32.
        units: [2, HEADS] int32. The state's page that each head's matrix is in, and the numbers from the beginning of
            that page to it, a multiple of 16.
        runs: [n, 2] int32. First segment of each run, and the one after its last. They are the same for a row that
            fills a step up: nothing of it is read or written.
        segments: [sections, 2] int32. Packed offset of each segment's first token, and its tokens.
        sources: [pages of a state, sections] int32. Pages before each segment, below 0 for none.
        targets: Likewise, pages after each segment.
        sections: The number of segments.
        page_stride: Numbers from a page to the next one.
        query_stride: Elements between two tokens of queries.
        key_stride: Likewise, of keys.
        value_stride: Likewise, of values.
        scale: Factor of queries with NORMALISED.
        eps: Epsilon of the norm of queries and keys.
        HEADS: Heads of values.
        SHARED: Neighbouring heads that share a query and a key.
        KEY_DIM: Elements of a key.
        PADDED_KEYS: A power of two not below KEY_DIM.
        VALUE_DIM: Elements of a value.
        TILE_VALUES: Elements of a value in a tile.
        BY_ROW: Whether each row of a matrix has a decay of its own.
        DELTA: Whether what the matrix has for a key is taken from the value.
        NORMALISED: Whether queries and keys are divided by their lengths.
        SKIPPED: Whether values are added to the result.
    """
    run, head = runs + tl.program_id(0) * 2, tl.program_id(1)
    first, after = tl.load(run), tl.load(run + 1)
    row = tl.arange(0, PADDED_KEYS)
    column = tl.program_id(2) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    in_key, in_value = row < KEY_DIM, column < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    which, offset = tl.load(units + head), tl.multiple_of(tl.load(units + HEADS + head), 16)
    page = tl.load(sources + which * sections + first)
    at = offset + row[:, None] * VALUE_DIM + column[None, :]
    known = inside & (page >= 0) & (first < after)
    matrix = tl.load(pool + page.to(tl.int64) * page_stride + at, mask=known, other=0.0)
    tl.debug_barrier()
    shared_place = head // SHARED * KEY_DIM + row
    added = tl.load(skip + head) if SKIPPED else 0.0
    for segment in range(first, after):
        start, count = tl.load(segments + segment * 2), tl.load(segments + segment * 2 + 1)
        for step in range(count):
            token = (start + step).to(tl.int64)
            query = tl.load(queries + token * query_stride + shared_place, mask=in_key, other=0.0)
            key = tl.load(keys + token * key_stride + shared_place, mask=in_key, other=0.0)
            value = tl.load(values + token * value_stride + head * VALUE_DIM + column, mask=in_value, other=0.0)
            by_head = token * HEADS + head
            if NORMALISED:
                query *= tl.math.rsqrt(tl.sum(query * query, 0) + eps) * scale
                key *= tl.math.rsqrt(tl.sum(key * key, 0) + eps)
            if BY_ROW:
                matrix *= tl.load(kept + by_head * KEY_DIM + row, mask=in_key, other=0.0)[:, None]
            else:
                matrix *= tl.load(kept + by_head)
            written = value
            if DELTA:
                written -= tl.sum(matrix * key[:, None], 0)
            matrix += key[:, None] * (written * tl.load(rates + by_head))[None, :]
            result = tl.sum(matrix * query[:, None], 0)
            if SKIPPED:
                result += value * added
            tl.store(out + by_head * VALUE_DIM + column, result, mask=in_value)
        target = tl.load(targets + which * sections + segment)
        tl.store(pool + target.to(tl.int64) * page_stride + at, matrix, mask=inside & (target >= 0))
