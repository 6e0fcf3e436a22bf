"""Queries, keys and values of new tokens: normalised, rotated by position, and written where attention reads them."""

from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EightBit
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.kv import BLOCK, SCALE_BYTES, copy_rounded, put_bytes, put_key, put_value
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import INT64, LANES, Value

MOST_DIM = 1024  # elements of a head
EPS = 13  # index of the kernel's argument


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of queries and of keys.

    Attributes:
        together: Whether all heads of a token are normalised as one row. If not, each head is.
    """

    norm: Norm
    together: bool = False

    @property
    def name(self) -> str:
        return self.norm.name + ("_together" if self.together else "")


def write_heads(element: Element, norm: HeadNorm | None, rows: bool, eight_bit: EightBit | None = None) -> Writer:
    """Writes the kernel that makes queries and KV of new tokens.

    Args:
        element: Type of queries and products.
        norm: Norm of queries and keys. None without one.
        rows: See `Heads`.
        eight_bit: See `Heads`.

    Kernel arguments:
        count: Cell. The number of tokens.
        slots: Cell. Slots, int64.
        places: Cell. Positions, int64.
        qkv: Queries, keys and values, float32.
        stride: Bytes of a row of qkv.
        queries: Result, of the element.
        pool: KV pool of the layer.
        heads: Query heads.
        kv_heads: KV heads.
        dim: Elements of a head.
        pairs: Rotated pairs: element i with element i + pairs.
        cosines: [context, pairs] float32.
        sines: [context, pairs] float32.
        eps: Epsilon of the norms, a float.
        query_weights: Weights of the norm of queries, float32.
        key_weights: Weights of the norm of keys, float32.
        query_bias: Bias of the norm of queries, float32.
        key_bias: Bias of the norm of keys, float32.
    """

    def write(code: Code) -> None:
        count, slots, places, qkv, stride, queries, pool, heads, kv_heads, dim, pairs, *tables = code.arguments(18)
        cosines, sines, _, query_weights, key_weights, query_bias, key_bias = tables
        slots, places = code.held(slots), code.held(places)
        token_bytes = dim + SCALE_BYTES if eight_bit else dim * element.size  # bytes of a head's key, or of its value
        part_bytes = token_bytes * BLOCK
        room = code.room((MOST_DIM + LANES) * 4)
        with shared_rows(code, count) as row:
            source = qkv + row * stride
            angle = code.load(places + row * 8, INT64) * pairs * 4
            slot = code.load(slots + row * 8, INT64)
            block, token = pool + (slot >> 4) * kv_heads * part_bytes * 2, slot & (BLOCK - 1)
            own = pool + slot * kv_heads * token_bytes * 2

            def turned(source: Value) -> None:
                """Rotates a head into the room."""
                _turn(code, source, room, dim, pairs, cosines + angle, sines + angle)

            own_queries = _Normed(code, norm, source, heads, dim, query_weights, query_bias)
            own_keys = _Normed(code, norm, source + heads * dim * 4, kv_heads, dim, key_weights, key_bias)
            with code.loop(0, heads) as head:
                turned(own_queries.of(head))
                place = queries + (row * heads + head) * dim * element.size
                copy_rounded(code, element, room, place, dim)
            with code.loop(0, kv_heads) as head:
                turned(own_keys.of(head))
                values = source + (heads + kv_heads + head) * dim * 4
                if eight_bit is not None:
                    place = own + head * token_bytes * 2 if rows else block + head * part_bytes * 2
                    put_bytes(code, eight_bit, room, values, place, None if rows else token, dim)
                elif rows:
                    place = own + head * token_bytes * 2
                    copy_rounded(code, element, room, place, dim)
                    copy_rounded(code, element, values, place + dim * element.size, dim)
                else:
                    place = block + head * part_bytes * 2
                    put_key(code, element, room, place, token, dim)
                    put_value(code, element, values, place + part_bytes, token, dim)

    return write


class _Normed:
    """Heads of one token, normalised if they have a norm.

    Weights and bias are of one head, or of all heads where these are normalised together.
    """

    def __init__(
        self, code: Code, norm: HeadNorm | None, source: Value, heads: Value, dim: Value, weights: Value, bias: Value
    ) -> None:
        self._code, self._norm, self._source, self._dim = code, norm, source, dim
        self._weights, self._bias, self._eps = weights, bias, code.real(EPS)
        self._room = code.room((MOST_DIM + LANES) * 4)
        self._all = self._at(norm.norm, source, heads * dim) if norm is not None and norm.together else None

    def _at(self, norm: Norm, source: Value, width: Value) -> Normed:
        return Normed.of(self._code, norm, source, width, self._eps, self._weights, self._bias)

    def of(self, head: Value) -> Value:
        """Returns the address of a head after its norm."""
        first = head * self._dim
        source = self._source + first * 4
        if self._norm is None:
            return source
        normed = self._all or self._at(self._norm.norm, source, self._dim)
        with self._code.loop(0, self._dim, LANES) as i:
            value = FLOAT.load(self._code, source + i * 4)
            FLOAT.store(self._code, normed(value, i + first if self._all else i), self._room + i * 4)
        return self._room


def _turn(code: Code, source: Value, room: Value, dim: Value, pairs: Value, cosines: Value, sines: Value) -> None:
    """Rotates a head: the first halves of all pairs, the second halves, then the elements that are not rotated.

    Whole vectors are written. The next part overwrites what a vector has beyond the end of its own.
    """
    for half, sign in ((0, -1.0), (1, 1.0)):
        with code.loop(0, pairs, LANES) as i:
            mine, other = source + (pairs * half + i) * 4, source + (pairs * (1 - half) + i) * 4
            cosine, sine = FLOAT.load(code, cosines + i * 4), FLOAT.load(code, sines + i * 4)
            turned = FLOAT.load(code, mine) * cosine + FLOAT.load(code, other) * sine * sign
            FLOAT.store(code, turned, room + (pairs * half + i) * 4)
    with code.loop(pairs * 2, dim, LANES) as i:
        FLOAT.store(code, FLOAT.load(code, source + i * 4), room + i * 4)
