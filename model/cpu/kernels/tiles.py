"""Sums of rows with a panel of weights in the matrix registers of a CPU (AMX), see `model.cpu.kernels.sums`.

A matrix register, a tile, holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 inputs with the weights
of 16 outputs, and adds the products to 16 x 16 sums. A panel lies as tiles need it: each step has 64 bytes for either
half of its outputs.

Invariant: each row of a tile is computed alone, 32 inputs at a time, of these the even ones and the odd ones apart. So
an output's bits depend on its own row alone, whatever rows stand beside it: even where a tile is not full.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.sides import PanelRows
from model.cpu.kernels.values import INT32, INT64, LANES, Value

log = logging.getLogger("quire.kernels")

ROWS, LINE = 16, 64  # of a tile: rows, and bytes of each
STEPS = LINE // 4  # of a panel, in a tile of weights
COPIED = 8 * STEPS  # steps of which rows that do not lie side by side are copied at once
TILE_BYTES = ROWS * LINE
TILES = 8
STEP = PANEL * 4  # bytes of a step of a panel
AHEAD = 4096  # bytes of the panel that are prefetched
INPUTS, WEIGHTS = 4, 6  # first tile of inputs, of which there are two, and of weights; sums are in those before

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


def may_use_tiles() -> bool:
    """Asks Linux for the use of tiles in this process. Returns whether it is granted; the log says why not.

    The state of a thread that uses them is 8 KiB larger. Linux refuses a process in which a thread has a stack for
    signals that is too small for it (Documentation/arch/x86/xstate.rst).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0:
        return True
    why = os.strerror(ctypes.get_errno())
    log.warning("this CPU has matrix registers (AMX), but Linux does not let this process use them: %s", why)
    return False


def add_tile_sums(code: Code, rows: PanelRows, count: Value, panel: Value, steps: Value) -> None:
    """Computes the sums of rows with a panel of bfloat16 weights.

    Args:
        code: The kernel of sums.
        rows: Rows, and room for the result.
        count: The number of rows, 1 to MOST_ROWS.
        panel: Address of the panel.
        steps: The number of its steps, a multiple of STEPS.
    """
    tiles = TileCode(code)
    tiles.configure([(ROWS, LINE)] * TILES)
    stride = common_stride(code, rows, count)
    copies = [code.room(COPIED // STEPS * TILE_BYTES) for _ in range(2)]
    with code.loop(0, count, 2 * ROWS) as start:
        left = count - start
        for blocks, wanted in ((1, left < ROWS + 1), (2, left > ROWS)):
            with code.when(wanted):
                made = [
                    _Block(code, rows, start + ROWS * b, code.smaller(left - ROWS * b, code.integer(ROWS)), copies[b])
                    for b in range(blocks)
                ]
                _add(code, tiles, made, stride, panel, steps)
    tiles.release()


def common_stride(code: Code, rows: PanelRows, count: Value) -> Value:
    """Returns the bytes between two rows, 0 where these are not the same throughout, or where no tile is full."""
    stride = code.variable(code.integer(0))
    with code.when(count > ROWS - 1):
        first = code.load(rows.places, INT64)
        stride.set(code.load(rows.places, INT64, 8) - first)
        wrong = code.variable(code.integer(0))
        with code.loop(2, count) as row:
            wrong.set(wrong.value | (code.load(rows.places + row * 8, INT64) - first - stride.value * row))
        stride.set(code.select(wrong.value.equals(0), stride.value, code.integer(0)))
    return stride.value


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one tile.

    Attributes:
        start: The first row.
        count: The number of rows, 1 to ROWS.
        copies: Room for COPIED steps of their inputs, tile by tile.
    """

    code: Code
    rows: PanelRows
    start: Value
    count: Value
    copies: Value

    @property
    def sums(self) -> Value:
        return self.rows.sums + self.start * (PANEL * 4)

    def inputs(self, stride: Value, first: Value, number: Value) -> tuple[Value, Value, Value]:
        """Returns where the tiles of some steps are: address of the first, bytes to the next one, bytes of a row."""
        code = self.code
        direct = code.select(self.count.equals(ROWS), stride, code.integer(0))
        with code.when(direct.equals(0)), code.loop(0, self.count) as row:
            source = code.load(self.rows.places + (self.start + row) * 8, INT64) + first * 4
            with code.loop(0, number // STEPS) as tile:
                inputs = code.load(source + tile * LINE, ir.VectorType(INT32, LANES))
                code.store(inputs, self.copies + tile * TILE_BYTES + row * LINE)
        copied = direct.equals(0)
        own = code.load(self.rows.places + self.start * 8, INT64) + first * 4
        return (
            code.select(copied, self.copies, own),
            code.select(copied, code.integer(TILE_BYTES), code.integer(LINE)),
            code.select(copied, code.integer(LINE), direct),
        )


def _add(code: Code, tiles: "TileCode", blocks: list[_Block], stride: Value, panel: Value, steps: Value) -> None:
    for tile in range(2 * len(blocks)):
        tiles.clear(tile)
    with code.loop(0, steps, COPIED) as first:
        number = code.smaller(steps - first, code.integer(COPIED))
        sources = [block.inputs(stride, first, number) for block in blocks]
        with code.loop(0, number // STEPS) as i:
            weights = panel + (first + i * STEPS) * STEP
            for line in range(0, STEPS * STEP, LINE):
                code.prefetch(weights + AHEAD, line)
            for half in range(2):
                tiles.load(WEIGHTS + half, weights + half * LINE, code.integer(STEP))
            for b, (address, step, row) in enumerate(sources):
                tiles.load(INPUTS + b, address + i * step, row)
                for half in range(2):
                    tiles.multiply(2 * b + half, INPUTS + b, WEIGHTS + half)
    for b, block in enumerate(blocks):
        for half in range(2):
            tiles.store(2 * b + half, block.sums + half * LINE, code.integer(PANEL * 4))


class TileCode:
    """Instructions of tiles."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def configure(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Gives each of the TILES its rows, and the bytes of each row, a multiple of 4."""
        made = bytearray(LINE)
        made[0] = 1  # palette: eight tiles
        for tile, (rows, width) in enumerate(shapes):
            made[16 + 2 * tile], made[48 + tile] = width, rows
        code, room = self._code, self._code.room(LINE)
        for offset in range(0, LINE, 8):
            code.store(code.integer(int.from_bytes(made[offset : offset + 8], "little")), room, offset)
        code.instruct("ldtilecfg", (), room)

    def release(self) -> None:
        self._code.instruct("tilerelease", ())

    def clear(self, tile: int) -> None:
        self._code.instruct("tilezero", (tile,))

    def load(self, tile: int, address: Value, stride: Value) -> None:
        self._code.instruct("tileloadd64", (tile,), address, stride)

    def store(self, tile: int, address: Value, stride: Value) -> None:
        self._code.instruct("tilestored64", (tile,), address, stride)

    def multiply(self, sums: int, inputs: int, weights: int) -> None:
        self._code.instruct("tdpbf16ps", (sums, inputs, weights))
