"""Queries, keys and values of new tokens: normalised, rotated by position, and written where attention reads them."""

from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EightBit
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.kv import BLOCK, SCALE_BYTES, copy_rounded, put_bytes, put_key, put_value
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import FLOAT32, INT64, LANES, Value

MOST_DIM = 1024  # elements of a head
EPS = 15  # index of the kernel's argument


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of queries and of keys.

    Attributes:
        together: Whether all heads of a token are normalised as one row. If not, each head is.
        own: Whether each head has weights of its own. They are of all heads then.
        after: Whether each head is normalised after its rotation. Not with the other two.
        values: Whether values are normalised too, each head. Only with none of the others.
        ranks: Whether ranks have some of the heads each that are normalised together. `write_head_squares` is before
            this kernel then, and a sum over the ranks between them.
    """

    norm: Norm
    together: bool = False
    own: bool = False
    after: bool = False
    values: bool = False
    ranks: bool = False

    @property
    def name(self) -> str:
        kinds = {"_together": self.together, "_own": self.own, "_after": self.after, "_values": self.values}
        kinds["_ranks"] = self.ranks
        return self.norm.name + "".join(kind for kind, has in kinds.items() if has)


def write_heads(
    element: Element, norm: HeadNorm | None, rows: bool, eight_bit: EightBit | None = None, scaled: bool = False
) -> Writer:
    """Writes the kernel that makes queries and KV of new tokens.

    Args:
        element: Type of queries and products.
        norm: Norm of queries and keys. None without one.
        rows: See `Heads`.
        eight_bit: See `Heads`.
        scaled: Whether queries have a factor by position, after norm and rotation.

    Kernel arguments:
        count: Cell. The number of tokens.
        slots: Cell. Slots, int64.
        places: Cell. Positions, int64.
        qkv: Queries, keys and values, float32.
        stride: Bytes of a row of qkv.
        queries: Result, of the element.
        pool: KV pool of the layer.
        heads: Query heads.
        kv_heads: KV heads. 0: no KV is written.
        first_value: Place of the first value among all heads of qkv.
        dim: Elements of a head.
        pairs: Rotated pairs.
        apart: Element i is rotated with element i + apart.
        cosines: [context, pairs] float32.
        sines: [context, pairs] float32.
        eps: Epsilon of the norms, a float.
        query_weights: Weights of the norm of queries, float32.
        key_weights: Weights of the norm of keys, float32.
        value_weights: Weights of the norm of values, float32.
        query_bias: Bias of the norm of queries, float32.
        key_bias: Bias of the norm of keys, float32.
        scales: [context] float32. Factors of queries; not read unless `scaled`.
        variances: [tokens, 16] float32. Mean squares of queries and of keys over all ranks; not read unless the norm is
            of `ranks`.
        variances_stride: Bytes of a row of variances.
    """

    def write(code: Code) -> None:
        count, slots, places, qkv, stride, queries, pool, heads, kv_heads, first_value, *more = code.arguments(24)
        dim, pairs, apart, cosines, sines, _, query_weights, key_weights, value_weights, query_bias, *more = more
        key_bias, scales, variances, variances_stride = more
        slots, places = code.held(slots), code.held(places)
        token_bytes = dim + SCALE_BYTES if eight_bit else dim * element.size  # bytes of a head's key, or of its value
        part_bytes = token_bytes * BLOCK
        room = code.room((MOST_DIM + LANES) * 4)
        with shared_rows(code, count) as row:
            source = qkv + row * stride
            position = code.load(places + row * 8, INT64)
            angle = position * pairs * 4
            slot = code.load(slots + row * 8, INT64)
            block, token = pool + (slot >> 4) * kv_heads * part_bytes * 2, slot & (BLOCK - 1)
            own = pool + slot * kv_heads * token_bytes * 2

            def turned(heads: _Normed, head: Value) -> None:
                """Normalises and rotates a head into the room."""
                turn(code, heads.before_turn(head), room, dim, pairs, apart, cosines + angle, sines + angle)
                heads.after_turn(room)

            variance = variances + row * variances_stride
            own_queries = _Normed(code, norm, source, heads, dim, query_weights, query_bias, variance)
            keys = source + heads * dim * 4
            own_keys = _Normed(code, norm, keys, kv_heads, dim, key_weights, key_bias, variance + 4)
            plain = source + first_value * dim * 4
            normed = HeadNorm(norm.norm) if norm is not None and norm.values else None
            own_values = _Normed(code, normed, plain, kv_heads, dim, value_weights, query_bias, variance)
            with code.loop(0, heads) as head:
                turned(own_queries, head)
                if scaled:
                    scale = code.splat(code.load(scales + position * 4, FLOAT32))
                    with code.loop(0, dim, LANES) as i:
                        FLOAT.store(code, FLOAT.load(code, room + i * 4) * scale, room + i * 4)
                place = queries + (row * heads + head) * dim * element.size
                copy_rounded(code, element, room, place, dim)
            with code.loop(0, kv_heads) as head:
                turned(own_keys, head)
                values = own_values.before_turn(head)
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


def write_head_squares() -> Writer:
    """Writes the kernel that sums the squares of a rank's queries and of its keys.

    Kernel arguments:
        count: Cell. The number of tokens.
        qkv: Queries, keys and values, float32.
        stride: Bytes of a row of qkv.
        queries: Elements of the rank's queries.
        keys: Elements of its keys.
        y: Result, [tokens, 16] float32: the sum of queries, that of keys, and zeros.
        y_stride: Bytes of a row of y.
        query_share: Factor of the sum of queries, a float.
        key_share: Factor of that of keys, a float.
    """

    def write(code: Code) -> None:
        count, qkv, stride, queries, keys, y, y_stride = code.arguments(7)
        with shared_rows(code, count) as row:
            source, to = qkv + row * stride, y + row * y_stride
            FLOAT.store(code, code.floats(0.0), to)
            for number, (first, width) in enumerate(((source, queries), (source + queries * 4, keys))):
                total = code.variable(code.floats(0.0))
                with code.loop(0, width, LANES) as i:
                    value = FLOAT.load(code, first + i * 4)
                    total.set(code.fma(value, value, total.value))
                code.store(code.summed(total.value) * code.real(7 + number), to + 4 * number)

    return write


class _Normed:
    """Heads of one token, normalised if they have a norm.

    Weights and bias are of one head, or of all heads where these are normalised together or have their own. `variance`
    is the address of the mean square over all ranks.
    """

    def __init__(
        self, code: Code, norm: HeadNorm | None, source: Value, heads: Value, dim: Value, weights: Value, bias: Value,
        variance: Value,
    ) -> None:  # fmt: skip
        self._code, self._norm, self._source, self._dim = code, norm, source, dim
        self._weights, self._bias, self._eps = weights, bias, code.real(EPS)
        self._room = code.room((MOST_DIM + LANES) * 4)
        self._all = None
        if norm is not None and norm.ranks:
            root = code.root(code.load(variance, FLOAT32) + self._eps)
            self._all = Normed(code, norm.norm, weights, bias, None, code.splat(1.0 / root))
        elif norm is not None and norm.together:
            self._all = self._at(norm.norm, source, heads * dim)

    def _at(self, norm: Norm, source: Value, width: Value) -> Normed:
        return Normed.of(self._code, norm, source, width, self._eps, self._weights, self._bias)

    def before_turn(self, head: Value) -> Value:
        """Returns the address of a head, after its norm if that comes before the rotation."""
        first = head * self._dim
        source = self._source + first * 4
        if self._norm is None or self._norm.after:
            return source
        normed = self._all or self._at(self._norm.norm, source, self._dim)
        with self._code.loop(0, self._dim, LANES) as i:
            value = FLOAT.load(self._code, source + i * 4)
            place = i + first if self._norm.together or self._norm.own else i
            FLOAT.store(self._code, normed(value, place), self._room + i * 4)
        return self._room

    def after_turn(self, head: Value) -> None:
        """Normalises a head in its place, if the norm comes after the rotation."""
        if self._norm is None or not self._norm.after:
            return
        normed = self._at(self._norm.norm, head, self._dim)
        with self._code.loop(0, self._dim, LANES) as i:
            FLOAT.store(self._code, normed(FLOAT.load(self._code, head + i * 4), i), head + i * 4)


def turn(
    code: Code, source: Value, room: Value, dim: Value, pairs: Value, apart: Value, cosines: Value, sines: Value
) -> None:
    """Rotates a head, from its first element to its last.

    Whole vectors are written. The next part overwrites what a vector has beyond the end of its own.
    """
    for half, sign, end in ((0, -1.0, apart), (1, 1.0, dim)):
        with code.loop(0, pairs, LANES) as i:
            mine, other = source + (apart * half + i) * 4, source + (apart * (1 - half) + i) * 4
            cosine, sine = FLOAT.load(code, cosines + i * 4), FLOAT.load(code, sines + i * 4)
            turned = FLOAT.load(code, mine) * cosine + FLOAT.load(code, other) * sine * sign
            FLOAT.store(code, turned, room + (apart * half + i) * 4)
        with code.loop(apart * half + pairs, end, LANES) as i:
            FLOAT.store(code, FLOAT.load(code, source + i * 4), room + i * 4)
