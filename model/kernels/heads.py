"""Queries, keys and values of new tokens: normalised, turned by their positions, and put where attention reads them."""

from dataclasses import dataclass

from llvmlite import ir

from model.kernels.code import Code
from model.kernels.element import FLOAT, Element
from model.kernels.rows import Norm, Normed, Writer, shared_rows
from model.kernels.values import INT16, INT32, INT64, LANES, Value

BLOCK = LANES  # tokens that attention looks at together
MOST_DIM = 1024  # of a head


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention layer. A page of whole blocks holds, block by block, for each KV head, keys [dim / packed, 16
    tokens, packed] and values [16 / packed, dim, packed]. rows: a page of any other size holds, token by token, for
    each KV head, its key and its value; attention then puts blocks together as it goes.
    """

    heads: int
    kv_heads: int
    dim: int
    element: Element
    rows: bool = False

    @property
    def shared(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def part_bytes(self) -> int:
        """Keys of a head, or values, in a block."""
        return BLOCK * self.dim * self.element.size

    @property
    def block_bytes(self) -> int:
        return 2 * self.kv_heads * self.part_bytes

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.block_bytes // BLOCK


def write_heads(element: Element, norm: Norm | None, rows: bool) -> Writer:
    """norm: of queries and of keys, if there is one. rows: as in `Heads`.

    Arguments: rows, slots (int64), positions (int64), each as the cell that holds it; qkv (float32), its stride,
    queries (of the element), KV pool of the layer, heads, KV heads, elements of a head, how many pairs of them are
    turned (element i with element i + that), cosines and sines (float32 [context, pairs]), weights of the norms
    (float32), epsilon.
    """

    def write(code: Code) -> None:
        count, slots, places, qkv, stride, queries, pool, heads, kv_heads, dim, pairs, *tables = code.arguments(15)
        cosines, sines, query_weights, key_weights = tables
        slots, places = code.held(slots), code.held(places)
        part_bytes = dim * (BLOCK * element.size)
        room = code.room((MOST_DIM + LANES) * 4)
        with shared_rows(code, count) as row:
            source = qkv + row * stride
            angle = code.load(places + row * 8, INT64) * pairs * 4
            slot = code.load(slots + row * 8, INT64)
            block, token = pool + (slot >> 4) * kv_heads * part_bytes * 2, slot & (BLOCK - 1)
            own = pool + slot * kv_heads * dim * (2 * element.size)

            def turned(head: Value, weights: Value) -> None:
                """Into the room."""
                at = _normed(code, norm, source + head * dim * 4, dim, weights)
                _turn(code, at, room, dim, pairs, cosines + angle, sines + angle)

            with code.loop(0, heads) as head:
                turned(head, query_weights)
                place = queries + (row * heads + head) * dim * element.size
                copy_rounded(code, element, room, place, dim)
            with code.loop(0, kv_heads) as head:
                turned(heads + head, key_weights)
                values = source + (heads + kv_heads + head) * dim * 4
                if rows:
                    place = own + head * dim * (2 * element.size)
                    copy_rounded(code, element, room, place, dim)
                    copy_rounded(code, element, values, place + dim * element.size, dim)
                else:
                    place = block + head * part_bytes * 2
                    put_key(code, element, room, place, token, dim)
                    put_value(code, element, values, place + part_bytes, token, dim)

    return write


def _normed(code: Code, norm: Norm | None, source: Value, dim: Value, weights: Value) -> Value:
    """Where the head stands after its norm."""
    if norm is None:
        return source
    room = code.room((MOST_DIM + LANES) * 4)
    normed = Normed.of(code, norm, source, dim, code.real(15), weights, weights)
    with code.loop(0, dim, LANES) as i:
        FLOAT.store(code, normed(FLOAT.load(code, source + i * 4), i), room + i * 4)
    return room


def _turn(code: Code, source: Value, room: Value, dim: Value, pairs: Value, cosines: Value, sines: Value) -> None:
    """The first halves of all pairs, the second ones, what is not turned. What a vector has beyond the end of its part
    the next part overwrites.
    """
    for half, sign in ((0, -1.0), (1, 1.0)):
        with code.loop(0, pairs, LANES) as i:
            mine, other = source + (pairs * half + i) * 4, source + (pairs * (1 - half) + i) * 4
            cosine, sine = FLOAT.load(code, cosines + i * 4), FLOAT.load(code, sines + i * 4)
            turned = FLOAT.load(code, mine) * cosine + FLOAT.load(code, other) * sine * sign
            FLOAT.store(code, turned, room + (pairs * half + i) * 4)
    with code.loop(pairs * 2, dim, LANES) as i:
        FLOAT.store(code, FLOAT.load(code, source + i * 4), room + i * 4)


def copy_rounded(code: Code, element: Element, source: Value, place: Value, dim: Value | int) -> None:
    """float32 to elements."""
    with code.loop(0, dim, LANES) as i:
        element.store(code, FLOAT.load(code, source + i * 4), place + i * element.size)


def put_key(code: Code, element: Element, source: Value, place: Value, token: Value, dim: Value | int) -> None:
    """[dim / packed, 16, packed]: 32 bits of this token, then those of 15 others."""
    words = LANES // element.packed
    with code.loop(0, dim, LANES) as i:
        packed = code.cast(element.short(code, FLOAT.load(code, source + i * 4)), ir.VectorType(INT32, words))
        at = place + token * 4 + i // element.packed * (BLOCK * 4)
        for j in range(words):
            code.store(code.lane(packed, j), at, j * BLOCK * 4)


def put_value(code: Code, element: Element, source: Value, place: Value, token: Value, dim: Value | int) -> None:
    """[16 / packed, dim, packed]: with two in 32 bits, two tokens share a row."""
    packed = element.packed
    row = place + token // packed * dim * 4 + token % packed * element.size
    with code.loop(0, dim, LANES) as i:
        values = element.short(code, FLOAT.load(code, source + i * 4))
        if packed == 1:
            code.store(values, row + i * 4)
        else:
            halves = code.cast(values, ir.VectorType(INT16, LANES))
            for j in range(LANES):
                code.store(code.lane(halves, j), row + i * 4, j * 4)
