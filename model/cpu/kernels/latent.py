"""Latent attention: one key for all heads, whose first elements are the value too. See `model.latent`."""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import BYTES, EightBit
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.heads import MOST_DIM, turn
from model.cpu.kernels.kv import BLOCK, SCALE_BYTES, Heads, copy_rounded, put_key, put_key_bytes
from model.cpu.kernels.program import Argument, Call
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import FLOAT32, FLOATS, INT16, INT64, INTS, LANES, Value

TURN = 2 * LANES  # the rotated part is a multiple of so many elements
EPS = 19  # index of the kernel's argument


@dataclass(frozen=True, slots=True)
class LatentsKind:
    """Variant of the kernel that makes keys of latents.

    Attributes:
        normed: Whether the latent is normalised.
        neighbours: Whether the elements of a rotated pair are neighbours. If not, they are half the width apart.
        scaled: Whether queries have a factor by position.
        rotated: Whether what follows the latent is rotated.
    """

    normed: bool = True
    neighbours: bool = False
    scaled: bool = False
    rotated: bool = True

    @property
    def marks(self) -> list[str]:
        """Words of the kernel's name."""
        names = ("normed", "neighbours", "scaled", "rotated")
        return [name for name in names if getattr(self, name)]


def write_latents(
    element: Element, rows: bool, eight_bit: EightBit | None = None, kind: LatentsKind = LatentsKind()
) -> Writer:
    """Writes the kernel that makes keys of new tokens, and the parts of their queries.

    Args:
        element: Type of queries and products.
        rows: See `Heads`.
        eight_bit: See `Heads`.
        kind: What it computes.

    Kernel arguments:
        count: Cell. The number of tokens.
        slots: Cell. Slots, int64.
        places: Cell. Positions, int64.
        latents: Latents, and after each the part that is rotated, float32.
        stride: Bytes of a row of latents.
        raw: Queries: of each head the plain part and the one that is rotated, float32.
        raw_stride: Bytes of a row of raw.
        plain: Result, of the element: plain parts of queries, head by head.
        plain_stride: Bytes of a row of plain.
        queries: Result, of the element: rotated parts, after the latent part of each query, which is not written.
        pool: KV pool of the layer.
        heads: Query heads.
        width: Elements of a query's plain part.
        rank: Elements of a latent.
        pairs: Rotated pairs.
        cosines: [context, pairs] float32; not read unless `rotated`.
        sines: Likewise.
        weights: Weights of the norm of latents, float32.
        scales: [context] float32. Factors of queries; not read unless `scaled`.
        eps: Epsilon of the norm, a float.
    """

    def write(code: Code) -> None:
        (
            count, slots, places, latents, stride, raw, raw_stride, plain, plain_stride, queries, pool, heads, width,
            rank, pairs, cosines, sines, weights, scales,
        ) = code.arguments(19)  # fmt: skip
        slots, places = code.held(slots), code.held(places)
        room, dim = code.room((MOST_DIM + LANES) * 4), rank + pairs * 2
        with shared_rows(code, count) as row:
            source, position = latents + row * stride, code.load(places + row * 8, INT64)
            angle = position * pairs * 4

            def turned(source: Value, to: Value) -> None:
                if kind.rotated:
                    _turn(code, source, to, pairs, cosines + angle, sines + angle, kind.neighbours)
                    return
                with code.loop(0, pairs * 2, LANES) as i:
                    FLOAT.store(code, FLOAT.load(code, source + i * 4), to + i * 4)

            norm = Normed.of(code, Norm(), source, rank, code.real(EPS), weights, weights) if kind.normed else None
            with code.loop(0, rank, LANES) as i:
                value = FLOAT.load(code, source + i * 4)
                FLOAT.store(code, value if norm is None else norm(value, i), room + i * 4)
            turned(source + rank * 4, room + rank * 4)
            _put(code, element, eight_bit, room, pool, code.load(slots + row * 8, INT64), dim, rows)
            with code.loop(0, heads) as head:
                query = raw + row * raw_stride + head * (width + pairs * 2) * 4
                if kind.scaled:
                    scale = code.splat(code.load(scales + position * 4, FLOAT32))
                    with code.loop(0, width + pairs * 2, LANES) as i:
                        FLOAT.store(code, FLOAT.load(code, query + i * 4) * scale, query + i * 4)
                copy_rounded(code, element, query, plain + row * plain_stride + head * width * element.size, width)
                turned(query + width * 4, room)
                place = queries + ((row * heads + head) * dim + rank) * element.size
                copy_rounded(code, element, room, place, pairs * 2)

    return write


def latents_call(h: Heads, arguments: tuple[Argument, ...], kind: LatentsKind) -> Call:
    """Makes the call of `write_latents`."""
    return Call(
        "_".join(["latents", h.stored, *kind.marks]), write_latents(h.element, h.rows, h.eight_bit, kind), arguments
    )


def _turn(
    code: Code, source: Value, to: Value, pairs: Value, cosines: Value, sines: Value, neighbours: bool
) -> None:  # fmt: skip
    """Rotates pairs. All first elements of a pair come out before all second ones."""
    if not neighbours:
        turn(code, source, to, pairs * 2, pairs, pairs, cosines, sines)
        return
    with code.loop(0, pairs, LANES) as i:
        parts = [FLOAT.load(code, source + i * 8, half * LANES * 4) for half in range(2)]
        first, second = (code.shuffled(parts[0], range(which, 2 * LANES, 2), parts[1]) for which in range(2))
        cosine, sine = FLOAT.load(code, cosines + i * 4), FLOAT.load(code, sines + i * 4)
        FLOAT.store(code, first * cosine + second * sine * -1.0, to + i * 4)
        FLOAT.store(code, second * cosine + first * sine, to + (pairs + i) * 4)


def _put(
    code: Code, element: Element, kind: EightBit | None, key: Value, pool: Value, slot: Value, dim: Value, rows: bool
) -> None:
    """Writes a key [dim] float32 into its slot."""
    token_bytes = dim * element.size if kind is None else dim + SCALE_BYTES
    own, block, token = pool + slot * token_bytes, pool + (slot >> 4) * token_bytes * BLOCK, slot & (BLOCK - 1)
    if kind is None:
        if rows:
            copy_rounded(code, element, key, own, dim)
        else:
            put_key(code, element, key, block, token, dim)
        return
    scale = kind.scale(code, key, dim)
    with code.loop(0, dim, LANES) as i:
        numbers = kind.encoded(code, FLOAT.load(code, key + i * 4), code.splat(scale))
        if rows:
            code.store(numbers, own + i)
        else:
            put_key_bytes(code, numbers, block + i * BLOCK, token)
    code.store(scale, own + dim if rows else block + dim * BLOCK + token * SCALE_BYTES)


def put_values(code: Code, h: Heads, keys: Value, tile: Value) -> None:
    """Lays the first elements of 16 keys out as values, see `Heads`.

    Args:
        code: The kernel.
        h: Heads and their layout.
        keys: Address of a block's keys.
        tile: Address of the result.
    """
    size = 1 if h.eight_bit else h.element.size
    with code.loop(0, h.latent, LANES) as i:
        source = keys + i * (BLOCK * size)
        if size == 2:
            _put_pairs(code, source, tile + i * 4, h.latent * 4)
        else:
            rows = [code.load(source, BYTES if h.eight_bit else FLOATS, j * BLOCK * size) for j in range(LANES)]
            for token, values in enumerate(_shuffled(code, rows, rounds=4)):
                code.store(values, tile + i * size, token * h.latent * size)


def _put_pairs(code: Code, source: Value, place: Value, row_bytes: int) -> None:
    """Lays 16 elements of 16 keys out: from pairs of elements of a key to pairs of two keys' elements.

    The index of an element in `source` has the bits (pair, token, half of the pair), of 3, 4 and 1. Three rounds move
    the pair behind the token. The last bit of the token is then the first one within a vector; it must be the last.
    """
    words = [code.load(source, INTS, j * BLOCK * 4) for j in range(LANES // 2)]
    ordered = [(token * LANES + pair * 2 + half) for pair in range(8) for half in range(2) for token in range(2)]
    for number, vector in enumerate(_shuffled(code, words, rounds=3)):
        halves = code.shuffled(code.cast(vector, ir.VectorType(INT16, 2 * LANES)), ordered)
        code.store(halves, place, number * row_bytes)


def _shuffled(code: Code, vectors: Sequence[Value], rounds: int) -> list[Value]:
    """Interleaves the first half of all elements with the second half, so many times.

    Each round moves the first bit of an element's index behind the last one. After 4 rounds 16 vectors of 16 are
    transposed.
    """
    low = [lane for i in range(LANES // 2) for lane in (i, LANES + i)]
    high = [lane + LANES // 2 for lane in low]
    for _ in range(rounds):
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [code.shuffled(first, lanes, second) for first, second in pairs for lanes in (low, high)]
    return list(vectors)
