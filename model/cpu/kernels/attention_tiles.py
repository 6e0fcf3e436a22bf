"""Products of attention in the matrix registers of a CPU (AMX), see `model.cpu.kernels.tiles`.

Blocks of keys and of values lie in pages as these registers need them: 32 elements of 16 keys fill one, 16 elements of
16 values half of one. Queries and their sums are its rows, as many as divide a piece's into equal parts of 16 at most.

Invariant: as in `model.cpu.kernels.tiles`, a row's bits do not depend on those beside it; and a block's weights are
multiplied alone, so that blocks in a group give what they give one after the other.
"""

from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import BFLOAT
from model.cpu.kernels.kv import BLOCK, Heads
from model.cpu.kernels.mixing import largest_divisor
from model.cpu.kernels.tiles import LINE, ROWS, TILES, TileCode
from model.cpu.kernels.values import INT32, LANES, Value

ELEMENTS = LINE // 2  # bfloat16 elements of a tile's row
SUMS_TILES = 4  # tiles of sums; those behind them:
QUERIES, KEYS, WEIGHTS, VALUES = range(SUMS_TILES, TILES)
TILED_ROWS = 2 * ROWS
"""Most rows of a piece of several tokens."""
LEAST_ROWS = 8
"""Rows of a tile, where that many share a KV head: 17 heads would be 17 tiles."""


def can_have_tiles(heads: Heads) -> bool:
    """Returns whether tiles can multiply queries with the keys of these heads, and weights with their values."""
    fills = largest_divisor(heads.shared, ROWS) >= min(heads.shared, LEAST_ROWS)
    return fills and heads.element == BFLOAT and heads.eight_bit is None and heads.dim % ELEMENTS == 0


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Code of both products for one kernel.

    Attributes:
        code: The kernel.
        heads: Heads and their layout.
        rows: Queries of a piece that read the same KV head.
        packed: Room for the queries of a piece, [rows, key_dim], where these do not lie side by side.
    """

    code: Code
    heads: Heads
    rows: int
    packed: Value | None

    @staticmethod
    def of(code: Code, heads: Heads, rows: int, packs: bool) -> "AttentionTiles":
        """Prepares the thread's tiles. `release` is to follow. packs: whether queries are to be packed."""
        made = AttentionTiles(code, heads, rows, code.room(rows * heads.dim * BFLOAT.size) if packs else None)
        own = made.at_once
        TileCode(code).configure(
            [(own, LINE)] * SUMS_TILES
            + [(own, LINE), (LINE // 4, LINE), (own, BLOCK * BFLOAT.size), (BLOCK // 2, LINE)]
        )
        return made

    def release(self) -> None:
        """Gives the thread's tiles back."""
        TileCode(self.code).release()

    @property
    def at_once(self) -> int:
        """Rows of a tile."""
        return largest_divisor(self.rows, ROWS)

    def put_query(self, row: int, query: Value) -> None:
        """Copies a row's query to `packed`."""
        if self.packed is None:
            raise ValueError("there is no room for packed queries")
        width = self.heads.dim * BFLOAT.size
        line = ir.VectorType(INT32, LANES)
        for offset in range(0, width, LINE):
            self.code.store(self.code.load(query, line, offset), self.packed, row * width + offset)

    def put_scores(self, queries: Value, keys: list[Value], after: list[Value], scores: Value) -> None:
        """Multiplies queries with keys.

        Args:
            queries: [rows, key_dim].
            keys: Blocks of a head's keys, SUMS_TILES of them at most.
            after: Blocks that are to be read next, which are asked for; [] for none.
            scores: Receives [blocks, rows, 16] float32.
        """
        code, tiles, width = self.code, TileCode(self.code), self.heads.dim * BFLOAT.size
        with code.loop(0, self.rows, self.at_once) as start:
            for block in range(len(keys)):
                tiles.clear(block)
            with code.loop(0, self.heads.dim // ELEMENTS) as i:
                tiles.load(QUERIES, queries + start * width + i * LINE, code.integer(width))
                for block, place in enumerate(keys):
                    for line in range(0, LINE // 4 * LINE, LINE) if after else ():
                        code.prefetch(after[block] + i * (LINE // 4 * LINE), line)
                    tiles.load(KEYS, place + i * (LINE // 4 * LINE), code.integer(LINE))
                    tiles.multiply(block, QUERIES, KEYS)
            for block in range(len(keys)):
                tiles.store(block, scores + (start + block * self.rows) * LINE, code.integer(LINE))

    def mix(self, mixed: Value, values: list[Value], after: list[Value], weights: Value) -> None:
        """Adds values by their weights, block by block.

        Args:
            mixed: [rows, value_dim] float32. Sums.
            values: Blocks of a head's values.
            after: As in `put_scores`.
            weights: [blocks, rows, 16].
        """
        code, tiles = self.code, TileCode(self.code)
        vectors, row_bytes = self.heads.value_dim // LANES, self.heads.value_dim * 4
        together = largest_divisor(vectors, SUMS_TILES)
        with code.loop(0, self.rows, self.at_once) as start, code.loop(0, vectors, together) as first:
            sums = mixed + start * row_bytes + first * LINE
            for i in range(together):
                tiles.load(i, sums + i * LINE, code.integer(row_bytes))
            for number, block in enumerate(values):
                given = weights + (start + number * self.rows) * (BLOCK * BFLOAT.size)
                tiles.load(WEIGHTS, given, code.integer(BLOCK * BFLOAT.size))
                for i in range(together):
                    for row in range(BLOCK // 2) if after else ():
                        code.prefetch(after[number] + (first + i) * LINE, row * row_bytes)
                    tiles.load(VALUES, block + (first + i) * LINE, code.integer(row_bytes))
                    tiles.multiply(i, WEIGHTS, VALUES)
            for i in range(together):
                tiles.store(i, sums + i * LINE, code.integer(row_bytes))
