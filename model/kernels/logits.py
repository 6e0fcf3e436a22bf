"""What goes through whole rows of logits: the largest, the sum that probabilities are divided by, a draw."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from model.kernels import math
from model.kernels.code import Code
from model.kernels.element import FLOAT
from model.kernels.program import Call, Machine
from model.kernels.rows import shared_rows
from model.kernels.values import FLOAT32, INT32, INT64, LANES, Value
from model.sampling.random import GOLDEN, MIXERS
from model.sampling.sampler import Ints, Summary

LONGS = ir.VectorType(INT64, LANES)


def write_summary(code: Code) -> None:
    """Arguments: rows, logits (float32), their stride, how many there are in a row, the largest (float32), its token
    id (int32), the sum of e^(logit - largest) (float32; NaN where a logit is), each as the cell that holds it.
    """
    count, *cells = code.arguments(7)
    logits, stride, vocabulary, best, token, total = map(code.held, cells)
    with shared_rows(code, count) as row:
        source = logits + row * stride
        highest, place = _first_largest(code, source, vocabulary, lambda x, _: x)
        sums, offset = code.variable(code.floats(0.0)), code.splat(highest)

        def add(x: Value, _: Value) -> None:
            sums.set(sums.value + code.select(x >= x, math.exp(code, x - offset), x))  # only NaN is not >= itself

        _each(code, source, vocabulary, add)
        code.store(highest, best + row * 4)
        code.store(place, token + row * 4)
        code.store(code.summed(sums.value), total + row * 4)


def write_draw(code: Code) -> None:
    """Arguments: draws, which row of the logits each is of (int64), logits (float32), their stride, how many there are
    in a row, the largest of each draw's row (float32), its temperature (float32), the log of its min_p (float32), its
    key (int64), its token id (int32), each as the cell that holds it.
    """
    count, *cells = code.arguments(10)
    rows, logits, stride, vocabulary, best, temperature, least, keys, token = map(code.held, cells)
    with shared_rows(code, count) as draw:
        source = logits + code.load(rows + draw * 8, INT64) * stride
        highest, warmth, lowest = (
            code.splat(code.load(column + draw * 4, FLOAT32)) for column in (best, temperature, least)
        )
        key = code.splat(code.load(keys + draw * 8, INT64))

        def score(x: Value, ids: Value) -> Value:
            scaled = (x - highest) / warmth
            noisy = scaled + gumbel(code, key ^ code.widened(ids, LONGS))
            return code.select(scaled >= lowest, noisy, code.floats(-np.inf))

        _, place = _first_largest(code, source, vocabulary, score)
        code.store(place, token + draw * 4)


def gumbel(code: Code, x: Value) -> Value:
    """`model.sampling.random.gumbel` of 16 keys that have their token ids in them, within float32.

    Where it is large, and decides, the uniform number is near 1: there its distance from 1 is what counts.
    """
    z = x + _signed(GOLDEN)
    for shift, factor in MIXERS:
        z = (z ^ z >> shift) * _signed(factor)
    z = z ^ z >> 31
    uniform, distance = ((code.to_float_unsigned(bits) + 0.5) * 2.0**-64 for bits in (z, z ^ -1))
    series = code.floats(1 / 6)
    for order in range(5, 0, -1):
        series = code.fma(series, distance, code.floats(1 / order))
    waited = code.select(distance < 2.0**-6, series * distance, -1.0 * math.log(code, uniform))
    return -1.0 * math.log(code, waited)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _first_largest(
    code: Code, source: Value, count: Value, score: Callable[[Value, Value], Value]
) -> tuple[Value, Value]:
    """The largest of what `score` makes of each number and its place, and the first place that has it, in 32 bits."""
    top, at = code.variable(code.floats(-np.inf)), code.variable(code.like(code.lane_numbers(), 0))

    def look(x: Value, ids: Value) -> None:
        made = score(x, ids)
        above = made > top.value
        at.set(code.select(above, ids, at.value))
        top.set(code.select(above, made, top.value))

    _each(code, source, count, look)
    highest = code.largest(top.value)
    ids = code.select(top.value >= code.splat(highest), at.value, code.like(at.value, 2**31 - 1))
    first = code.lane(ids, 0)
    for lane in range(1, LANES):
        first = code.smaller(code.lane(ids, lane), first)
    return highest, first


def _each(code: Code, source: Value, count: Value, visit: Callable[[Value, Value], None]) -> None:
    """16 numbers at a time with their places; -inf where there are no more."""
    numbers, end = code.lane_numbers(), code.splat(code.narrowed(count, INT32))
    with code.loop(0, count, LANES) as i:
        ids = numbers + code.splat(code.narrowed(i, INT32))
        visit(code.select(ids < end, FLOAT.load(code, source + i * 4), code.floats(-np.inf)), ids)


class KernelOps:
    """`model.sampling.sampler.LogitOps` by kernels. The draw is in float32."""

    def __init__(self, machine: Machine) -> None:
        self._cells = np.zeros(10, np.int64)
        cells = [self._cells.ctypes.data + 8 * i for i in range(10)]
        self._summary = machine.program([Call("summary", write_summary, tuple(cells[:7]))])
        self._draw = machine.program([Call("draw", write_draw, tuple(cells))])

    def summary(self, logits: Tensor) -> Summary:
        logits, rows = _readable(logits), len(logits)
        best, total, tokens = torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int32)
        self._cells[:7] = (
            rows, logits.data_ptr(), logits.stride(0) * 4, logits.shape[1], best.data_ptr(), tokens.data_ptr(),
            total.data_ptr(),
        )  # fmt: skip
        self._summary.run()
        return Summary(best, tokens.long(), (best + total.log())[:, None])

    def draw(
        self, logits: Tensor, rows: Ints, keys: Ints, temperature: NDArray[np.float64], min_p: NDArray[np.float64]
    ) -> Tensor:
        best = logits.amax(-1)[torch.from_numpy(rows)]
        logits, vocabulary = _readable(logits), logits.shape[1]
        with np.errstate(divide="ignore"):
            warmth, least = temperature.astype(np.float32), np.log(min_p).astype(np.float32)
        warmth = np.maximum(warmth, np.finfo(np.float32).tiny)
        rows, keys = np.ascontiguousarray(rows), np.ascontiguousarray(keys)
        tokens = torch.empty(len(rows), dtype=torch.int32)
        self._cells[:] = (
            len(rows), rows.ctypes.data, logits.data_ptr(), logits.stride(0) * 4, vocabulary, best.data_ptr(),
            warmth.ctypes.data, least.ctypes.data, keys.ctypes.data, tokens.data_ptr(),
        )  # fmt: skip
        self._draw.run()
        return tokens.long()


def _readable(logits: Tensor) -> Tensor:
    """The same, where a vector that begins in the last row does not reach past the end of the memory."""
    rows, vocabulary = logits.shape
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + -(-vocabulary // LANES) * LANES
    if logits.stride(1) == 1 and end * 4 <= logits.untyped_storage().nbytes():
        return logits
    return F.pad(logits.contiguous(), (0, -vocabulary % LANES))[:, :vocabulary]
