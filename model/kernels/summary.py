"""The largest logit of each row, and the sum that its probabilities are divided by, in two passes over the row."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import math
from model.kernels.code import Code
from model.kernels.element import FLOAT
from model.kernels.program import Call, Machine
from model.kernels.rows import shared_rows
from model.kernels.values import INT32, LANES, Value
from model.sampling.sampler import Summary


def write_summary(code: Code) -> None:
    """Arguments: rows, logits (float32), their stride, how many there are in a row, the largest (float32), its token
    id (int32), the sum of e^(logit - largest) (float32; NaN where a logit is), each as the cell that holds it.
    """
    count, *cells = code.arguments(7)
    logits, stride, vocabulary, best, token, total = map(code.held, cells)
    with shared_rows(code, count) as row:
        source = logits + row * stride
        top, at = code.variable(code.floats(-np.inf)), code.variable(code.like(code.lane_numbers(), 0))

        def largest(x: Value, ids: Value) -> None:
            above = x > top.value
            at.set(code.select(above, ids, at.value))
            top.set(code.select(above, x, top.value))

        _each(code, source, vocabulary, largest)
        highest = code.largest(top.value)
        # Of the lanes that have it, the lowest id.
        ids = code.select(top.value >= code.splat(highest), at.value, code.like(at.value, 2**31 - 1))
        lowest = code.variable(code.lane(ids, 0))
        for lane in range(1, LANES):
            lowest.set(code.smaller(code.lane(ids, lane), lowest.value))
        sums, offset = code.variable(code.floats(0.0)), code.splat(highest)

        def add(x: Value, _: Value) -> None:
            sums.set(sums.value + code.select(x >= x, math.exp(code, x - offset), x))

        _each(code, source, vocabulary, add)
        code.store(highest, best + row * 4)
        code.store(lowest.value, token + row * 4)
        code.store(code.summed(sums.value), total + row * 4)


def _each(code: Code, source: Value, count: Value, visit) -> None:  # type: ignore[no-untyped-def]
    """16 numbers at a time with their places; -inf where there are no more."""
    numbers = code.lane_numbers()
    with code.loop(0, count, LANES) as i:
        ids = numbers + code.splat(code.narrowed(i, INT32))
        there = ids < code.splat(code.narrowed(count, INT32))
        visit(code.select(there, FLOAT.load(code, source + i * 4), code.floats(-np.inf)), ids)


class Summariser:
    """`model.sampling.sampler.summarise` by kernels."""

    def __init__(self, machine: Machine) -> None:
        self._cells = np.zeros(7, np.int64)
        first = self._cells.ctypes.data
        self._program = machine.program([Call("summary", write_summary, tuple(first + 8 * i for i in range(7)))])

    def __call__(self, logits: Tensor) -> Summary:
        rows, vocabulary = logits.shape
        end = logits.storage_offset() + (rows - 1) * logits.stride(0) + -(-vocabulary // LANES) * LANES
        if logits.stride(1) != 1 or end * 4 > logits.untyped_storage().nbytes():  # the last vector would reach past it
            logits = F.pad(logits.contiguous(), (0, -vocabulary % LANES))
        best, total = torch.empty(rows), torch.empty(rows)
        tokens = torch.empty(rows, dtype=torch.int32)
        self._cells[:] = (
            rows, logits.data_ptr(), logits.stride(0) * 4, vocabulary, best.data_ptr(), tokens.data_ptr(),
            total.data_ptr(),
        )  # fmt: skip
        self._program.run()
        return Summary(best, tokens.long(), (best + total.log())[:, None])
