"""Kernels that look up embeddings. Threads share the rows; widths are multiples of 16."""

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.panels import BYTES
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.values import FLOATS, INT64, INTS, LANES, Value


def write_embedding(element: Element, positions: bool) -> Writer:
    """Writes the kernel that looks up embeddings. With `positions`, those of positions are added.

    Kernel arguments:
        count: Cell. The number of rows.
        tokens: Cell. Token ids, int64.
        places: Cell. Positions, int64.
        table: Table of tokens, of the element.
        learned: Table of positions, of the element.
        y: Result, float32.
        stride: Bytes of a row of y.
        width: Columns.
        scale: Factor of tokens' rows, a float.
    """

    def write(code: Code) -> None:
        count, tokens, places, table, learned, y, stride, width = code.arguments(8)
        scale = code.splat(code.real(8))
        tokens, places = code.held(tokens), code.held(places)
        row_bytes = width * element.size
        with shared_rows(code, count) as row:
            source = table + code.load(tokens + row * 8, INT64) * row_bytes
            place = learned + code.load(places + row * 8, INT64) * row_bytes if positions else source
            with code.loop(0, width, LANES) as i:
                x = element.load(code, source + i * element.size) * scale
                if positions:
                    x = x + element.load(code, place + i * element.size)
                FLOAT.store(code, x, y + row * stride + i * 4)

    return write


def write_eight_bit_embedding(element: Element, positions: bool, offsets: bool) -> Writer:
    """Writes the kernel that looks up embeddings in 8 bits, see `model.embedding_table.EightBitRows`.

    With `offsets`, groups have some. With `positions`, embeddings of positions are added.

    Kernel arguments:
        count: Cell. The number of rows.
        tokens: Cell. Token ids, int64.
        places: Cell. Positions, int64.
        table: Integers of tokens, int8.
        scales: Scales of tokens' groups, float32.
        offsets: Offsets of tokens' groups, float32.
        learned: Table of positions, of the element.
        y: Result, float32.
        stride: Bytes of a row of y.
        groups: Groups of a row.
        size: Columns of a group, a multiple of 16.
        scale: Factor of tokens' rows, a float.
    """

    def write(code: Code) -> None:
        count, tokens, places, table, scales, least, learned, y, stride, groups, size = code.arguments(11)
        scale = code.splat(code.real(11))
        tokens, places = code.held(tokens), code.held(places)
        width = groups * size
        with shared_rows(code, count) as row:
            token = code.load(tokens + row * 8, INT64)
            source, to, factors = table + token * width, y + row * stride, token * groups * 4
            place = learned + code.load(places + row * 8, INT64) * width * element.size if positions else source
            with code.loop(0, groups) as group:
                factor = _everywhere(code, scales + factors + group * 4)
                offset = _everywhere(code, least + factors + group * 4) if offsets else None
                with code.loop(group * size, group * size + size, LANES) as i:
                    x = code.to_float(code.widened(code.load(source + i, BYTES), INTS)) * factor
                    x = x * scale if offset is None else (x + offset) * scale
                    if positions:
                        x = x + element.load(code, place + i * element.size)
                    FLOAT.store(code, x, to + i * 4)

    return write


def _everywhere(code: Code, address: Value) -> Value:
    """Loads a float32 into all lanes."""
    return code.cast(FLOAT.everywhere(code, address), FLOATS)
