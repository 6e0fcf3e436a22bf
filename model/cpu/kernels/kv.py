"""Layout of keys and values in pages, and code that writes them there."""

from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import BYTES, EightBit
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.values import FLOAT32, INT16, INT32, INTS, LANES, Value

BLOCK = LANES  # tokens that attention reads together
SCALE_BYTES = 4  # scale of a key or a value in 8 bits


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of an attention layer, and the layout of their keys and values.

    A page of whole blocks holds, block by block, for each KV head: keys [dim / packed, 16 tokens, packed], values [16 /
    packed, dim, packed]. In 8 bits these are bytes [dim, 16] and 16 scales (float32), then bytes [16, dim] and 16
    scales.

    A page of any other size (`rows`) holds, token by token, for each KV head: its key, its value and, in 8 bits, their
    scales. Attention then assembles blocks as it goes.

    Latent attention keeps one key for all heads, and no values: these are the beginning of the key. The "KV heads" are
    then query heads that attention computes together.

    Attributes:
        dim: Elements of a query and of a key.
        element: Type of queries and products.
        rows: Whether pages hold rows instead of blocks.
        eight_bit: Format of keys and values. None: the element.
        latent: Elements of a key that are its value too. 0 where values are kept.
    """

    heads: int
    kv_heads: int
    dim: int
    element: Element
    rows: bool = False
    eight_bit: EightBit | None = None
    latent: int = 0

    @property
    def stored(self) -> str:
        """Name of the layout of keys and values."""
        marks = [self.eight_bit.name] if self.eight_bit else []
        marks += [f"latent_{self.latent}"] if self.latent else []
        return "_".join([self.element.name, *marks, *(["rows"] if self.rows else [])])

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.latent or self.dim

    @property
    def shared(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def number_bytes(self) -> int:
        """Bytes of a head's keys in a block, or of its values where these are kept, without their scales."""
        return BLOCK * self.dim * (1 if self.eight_bit else self.element.size)

    @property
    def part_bytes(self) -> int:
        """Bytes of a head's keys in a block, or of its values where these are kept, with their scales."""
        return self.number_bytes + (BLOCK * SCALE_BYTES if self.eight_bit else 0)

    @property
    def value_bytes(self) -> int:
        """Bytes of 16 values as attention reads them, without their scales."""
        return BLOCK * self.value_dim * (1 if self.eight_bit else self.element.size)

    @property
    def value_scales(self) -> int:
        """Bytes from a head's keys in a block to the scales of its values."""
        return self.number_bytes + (0 if self.latent else self.part_bytes)

    @property
    def head_bytes(self) -> int:
        """Bytes from a head's keys in a block to those of the next head."""
        return 0 if self.latent else 2 * self.part_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes that hold 16 lanes of 32 bits of the element, as they are stored."""
        return LANES * (self.element.packed if self.eight_bit else 4)

    def key_words(self, code: Code, keys: Value, i: Value) -> Value:
        """Loads the i-th 32 bits of 16 keys; `keys` is the address of a head's."""
        place = keys + i * self.word_bytes
        if self.eight_bit:
            return self.eight_bit.words(code, self.element, place, BLOCK)
        return code.load(place, INTS)

    def value_words(self, code: Code, row: Value, i: int) -> Value:
        """Loads 32 bits from each of the dimensions i to i + 15; `row` holds as many tokens as fill them."""
        if self.eight_bit:
            return self.eight_bit.words(code, self.element, row, self.value_dim, i)
        return code.load(row, INTS, i * 4)

    @property
    def block_bytes(self) -> int:
        return self.part_bytes if self.latent else 2 * self.kv_heads * self.part_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.block_bytes // BLOCK


def copy_rounded(code: Code, element: Element, source: Value, place: Value, dim: Value | int) -> None:
    """Copies float32 to elements."""
    with code.loop(0, dim, LANES) as i:
        element.store(code, FLOAT.load(code, source + i * 4), place + i * element.size)


def put_key(code: Code, element: Element, source: Value, place: Value, token: Value, dim: Value | int) -> None:
    """Writes a key into [dim / packed, 16, packed]: 32 bits of this token, then those of 15 others."""
    words = LANES // element.packed
    with code.loop(0, dim, LANES) as i:
        packed = code.cast(element.short(code, FLOAT.load(code, source + i * 4)), ir.VectorType(INT32, words))
        at = place + token * 4 + i // element.packed * (BLOCK * 4)
        for j in range(words):
            code.store(code.lane(packed, j), at, j * BLOCK * 4)


def put_value(code: Code, element: Element, source: Value, place: Value, token: Value, dim: Value | int) -> None:
    """Writes a value into [16 / packed, dim, packed]: with two elements in 32 bits, two tokens share a row."""
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


def put_bytes(
    code: Code, kind: EightBit, key: Value, value: Value, place: Value, token: Value | None, dim: Value
) -> None:
    """Writes a key and a value in 8 bits, with their scales; `token` is the place in the block, None for a row."""
    scales = [kind.scale(code, source, dim) for source in (key, value)]
    key_scale, value_scale = (code.splat(scale) for scale in scales)
    if token is None:
        value_place, scale_places = place + dim, [place + dim * 2, place + dim * 2 + SCALE_BYTES]
    else:
        values = place + (dim + SCALE_BYTES) * BLOCK
        value_place = values + token * dim
        scale_places = [part + dim * BLOCK + token * SCALE_BYTES for part in (place, values)]
    with code.loop(0, dim, LANES) as i:
        numbers = kind.encoded(code, FLOAT.load(code, key + i * 4), key_scale)
        if token is None:
            code.store(numbers, place + i)
        else:
            put_key_bytes(code, numbers, place + i * BLOCK, token)
        code.store(kind.encoded(code, FLOAT.load(code, value + i * 4), value_scale), value_place + i)
    for scale, there in zip(scales, scale_places, strict=True):
        code.store(scale, there)


def put_key_bytes(code: Code, numbers: Value, place: Value, token: Value) -> None:
    """Writes 16 bytes of a token into [16, 16], each beside those of 15 others."""
    for i in range(LANES):
        code.store(code.lane(numbers, i), place + token, i * BLOCK)


def gather_row(code: Code, h: Heads, row: Value, tile: Value, token: Value) -> None:
    """Copies a row of one head to a token of a block."""
    values, first = tile + h.part_bytes, 0 if h.latent else h.dim  # first element of the value in the row
    if h.eight_bit is None:
        room = code.room(h.dim * 4)
        for place, start, dim, put in ((tile, 0, h.dim, put_key), (values, first, h.value_dim, put_value)):
            for i in range(0, dim, LANES):
                FLOAT.store(code, h.element.load(code, row, (start + i) * h.element.size), room, i * 4)
            put(code, h.element, room, place, token, dim)
        return
    for i in range(0, h.dim, LANES):
        put_key_bytes(code, code.load(row, BYTES, i), tile + i * BLOCK, token)
    for i in range(0, h.value_dim, LANES):
        code.store(code.load(row, BYTES, first + i), values + token * h.value_dim, i)
    for number, numbers in enumerate([tile] if h.latent else [tile, values]):
        scale = code.load(row, FLOAT32, first + h.dim + number * SCALE_BYTES)
        code.store(scale, numbers + token * SCALE_BYTES, h.number_bytes)
