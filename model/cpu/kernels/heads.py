"""Queries, keys and values of new tokens: normalised, turned by their positions, and put where attention reads them."""

from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EightBit
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.kv import BLOCK, SCALE_BYTES, copy_rounded, put_bytes, put_key, put_value
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import INT64, LANES, Value

MOST_DIM = 1024  # of a head
EPS = 13  # the argument


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of queries and of keys. together: of all heads of a token as one row, where it is not of each."""

    norm: Norm
    together: bool = False

    @property
    def name(self) -> str:
        return self.norm.name + ("_together" if self.together else "")


def write_heads(element: Element, norm: HeadNorm | None, rows: bool, eight_bit: EightBit | None = None) -> Writer:
    """norm: None where there is none. rows, eight_bit: as in `Heads`.

    Arguments: rows, slots (int64), positions (int64), each as the cell that holds it; qkv (float32), its stride,
    queries (of the element), KV pool of the layer, heads, KV heads, elements of a head, how many pairs of them are
    turned (element i with element i + that), cosines and sines (float32 [context, pairs]), epsilon of the norms, then
    the weights of that of queries and of that of keys, and their biases (float32).
    """

    def write(code: Code) -> None:
        count, slots, places, qkv, stride, queries, pool, heads, kv_heads, dim, pairs, *tables = code.arguments(18)
        cosines, sines, _, query_weights, key_weights, query_bias, key_bias = tables
        slots, places = code.held(slots), code.held(places)
        token_bytes = dim + SCALE_BYTES if eight_bit else dim * element.size  # of a head's key, or of its value
        part_bytes = token_bytes * BLOCK
        room = code.room((MOST_DIM + LANES) * 4)
        with shared_rows(code, count) as row:
            source = qkv + row * stride
            angle = code.load(places + row * 8, INT64) * pairs * 4
            slot = code.load(slots + row * 8, INT64)
            block, token = pool + (slot >> 4) * kv_heads * part_bytes * 2, slot & (BLOCK - 1)
            own = pool + slot * kv_heads * token_bytes * 2

            def turned(source: Value) -> None:
                """Into the room."""
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
    """Heads of one token, normalised if there is a norm. weights, bias: of one head, or of all where that is how they
    are normalised.
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
        """Where this one stands then."""
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
