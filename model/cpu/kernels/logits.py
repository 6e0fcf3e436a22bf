"""Operations over whole rows of logits: the largest, the normaliser of probabilities, draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import shared_rows
from model.cpu.kernels.values import FLOAT32, INT16, INT32, INT64, LANES, Value
from model.sampling.builtin_processors import Penalties
from model.sampling.random import GOLDEN, MIXERS
from model.sampling.sampler import TORCH_OPS, Draws, Ints, Summary, draw_among
from model.structured.forbidding import forbid

MOST = 1024  # candidates for a top_p or a top_k
# Distance of candidates below the largest scaled logit at first, its factor after a try, tries.
REACH, FURTHER, TRIES = 8.0, 1.5, 8

LONGS = ir.VectorType(INT64, LANES)


def write_summary(code: Code) -> None:
    """Writes the kernel that summarises rows.

    Kernel arguments, all cells:
        count: The number of rows.
        logits: Logits, float32.
        stride: Bytes of a row of logits.
        vocabulary: Logits of a row.
        best: Result: largest logit, float32.
        token: Result: its token id, int64.
        normal: Result: log of the sum of e^logit, float32; NaN where a logit is.
    """
    count, *cells = code.arguments(7)
    logits, stride, vocabulary, best, token, normal = map(code.held, cells)
    with shared_rows(code, count) as row:
        source = logits + row * stride
        highest, place = first_largest(code, source, vocabulary, lambda x, _: x)
        sums, offset = code.variable(code.floats(0.0)), code.splat(highest)

        def add(x: Value, _: Value) -> None:
            sums.set(sums.value + code.select(x >= x, math.exp(code, x - offset), x))  # only NaN is not >= itself

        _each(code, source, vocabulary, add)
        total = code.splat(code.summed(sums.value))
        code.store(highest, best + row * 4)
        code.store(code.widened(place, INT64), token + row * 8)
        code.store(code.lane(code.select(total >= total, offset + math.log(code, total), total), 0), normal + row * 4)


def write_draw(code: Code) -> None:
    """Writes the kernel that draws without top_k and top_p.

    Kernel arguments, all cells:
        count: The number of draws.
        rows: Row of logits of each draw, int64.
        logits: Logits, float32.
        stride: Bytes of a row of logits.
        vocabulary: Logits of a row.
        best: Largest logit of each draw's row, float32.
        temperature: Temperature of each draw, float32.
        least: Log of min_p of each draw, float32.
        keys: Key of each draw, int64.
        token: Result: drawn ids, int32.
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

        _, place = first_largest(code, source, vocabulary, score)
        code.store(place, token + draw * 4)


def write_candidates(code: Code) -> None:
    """Writes the kernel that collects the candidates near the largest logit. Of more than MOST only some are written.

    Kernel arguments, all cells, after `count` to `least` of `write_draw`:
        reach: Distance of candidates below the largest scaled logit, float32.
        totals: Result: sum of e^scaled of all that min_p leaves, float32.
        counts: Result: the number of candidates, int64.
        found: Result: their logits, [draws, MOST + 16] float32.
        ids_found: Result: their token ids, [draws, MOST + 16] int32.
    """
    count, *cells = code.arguments(13)
    rows, logits, stride, vocabulary, best, temperature, least, reach, totals, counts, found, ids_found = map(
        code.held, cells
    )
    with shared_rows(code, count) as draw:
        source = logits + code.load(rows + draw * 8, INT64) * stride
        highest, warmth, lowest, far = (
            code.splat(code.load(column + draw * 4, FLOAT32)) for column in (best, temperature, least, reach)
        )
        sums, taken = code.variable(code.floats(0.0)), code.variable(code.integer(0))
        room = draw * ((MOST + LANES) * 4)

        def look(x: Value, ids: Value) -> None:
            scaled = (x - highest) / warmth
            left = scaled >= lowest
            sums.set(sums.value + code.select(left, math.exp(code, scaled), code.floats(0.0)))
            near = left & (scaled >= -1.0 * far)
            with code.when(code.any(near)):
                place = room + code.smaller(taken.value, code.integer(MOST)) * 4
                code.store_some(x, near, found + place)
                code.store_some(ids, near, ids_found + place)
                taken.set(taken.value + code.count(near))

        _each(code, source, vocabulary, look)
        code.store(code.summed(sums.value), totals + draw * 4)
        code.store(taken.value, counts + draw * 8)


def write_forbid(code: Code) -> None:
    """Writes the kernel that puts forbidden tokens at -inf.

    Kernel arguments, all cells:
        count: The number of masks.
        rows: Row of logits of each mask, int64.
        logits: Logits, float32.
        stride: Bytes of a row of logits.
        vocabulary: Logits of a row, those after the last 16 left out.
        bits: Masks, a bit a token, 1 for an allowed one.
        width: Bytes of a mask.
    """
    count, *cells = code.arguments(7)
    rows, logits, stride, vocabulary, bits, width = map(code.held, cells)
    with shared_rows(code, count) as mask:
        target, source = logits + code.load(rows + mask * 8, INT64) * stride, bits + mask * width
        numbers = code.lane_numbers()
        with code.loop(0, vocabulary, LANES) as i:
            word = code.widened(code.load(source + (i >> 3), INT16), INT32)
            allowed = (code.splat(word) >> numbers & 1) > 0
            place = target + i * 4
            FLOAT.store(code, code.select(allowed, FLOAT.load(code, place), code.floats(-np.inf)), place)


def gumbel(code: Code, x: Value) -> Value:
    """Computes `model.sampling.random.gumbel` of 16 keys that include their token ids, within float32.

    Large noise decides draws. There the uniform number is near 1, so its distance from 1 is computed precisely.
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


def first_largest(
    code: Code, source: Value, count: Value, score: Callable[[Value, Value], Value]
) -> tuple[Value, Value]:
    """Returns the largest score, and the first place that has it, in 32 bits.

    `score` takes 16 numbers and their places.
    """
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
    """Visits 16 numbers at a time with their places; -inf past the end."""
    numbers, end = code.lane_numbers(), code.splat(code.narrowed(count, INT32))
    with code.loop(0, count, LANES) as i:
        ids = numbers + code.splat(code.narrowed(i, INT32))
        visit(code.select(ids < end, FLOAT.load(code, source + i * 4), code.floats(-np.inf)), ids)


class KernelOps:
    """`model.sampling.sampler.LogitOps` by kernels. `draw` is in float32, `draw_from_top` in float64."""

    def __init__(self, machine: Machine) -> None:
        self._cells = np.zeros(13, np.int64)
        cells = [self._cells.ctypes.data + 8 * i for i in range(13)]
        self._summary = machine.program([Call("summary", write_summary, tuple(cells[:7]))])
        noise = "_".join(f"{number:x}" for number in (GOLDEN, *(n for mixer in MIXERS for n in mixer)))
        self._draw = machine.program([Call(f"draw_{noise}", write_draw, tuple(cells[:10]))])
        self._near = machine.program([Call("candidates", write_candidates, tuple(cells))])
        self._forbid = machine.program([Call("forbid", write_forbid, tuple(cells[:7]))])

    def summary(self, logits: Tensor) -> Summary:
        logits, rows = _readable(logits), len(logits)
        best, normal, tokens = np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows, np.int64)
        self._cells[:7] = (
            rows, logits.data_ptr(), logits.stride(0) * 4, logits.shape[1], best.ctypes.data, tokens.ctypes.data,
            normal.ctypes.data,
        )  # fmt: skip
        self._summary.run()
        return Summary(best, tokens, normal)

    def forbid(self, logits: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        whole = logits.shape[1] // LANES * LANES
        if logits.stride(1) != 1 or 32 * bits.shape[1] < logits.shape[1]:
            forbid(logits, rows, bits)
            return
        rows = np.ascontiguousarray(rows)
        self._cells[:7] = (
            len(rows), rows.ctypes.data, logits.data_ptr(), logits.stride(0) * 4, whole, bits.ctypes.data,
            bits.strides[0],
        )  # fmt: skip
        self._forbid.run()
        if whole < logits.shape[1]:
            forbid(logits[:, whole:], rows, bits[:, whole // 32 :] >> whole % 32)

    def penalise(self, logits: Tensor, rows: Ints, processors: Sequence[Penalties], positions: Ints) -> None:
        TORCH_OPS.penalise(logits, rows, processors, positions)

    def draw(self, logits: Tensor, draws: Draws) -> Ints:
        columns = _Columns.of(logits, draws)
        keys, tokens = np.ascontiguousarray(draws.keys), np.empty(len(draws.rows), np.int32)
        self._cells[:10] = *columns.words(), keys.ctypes.data, tokens.ctypes.data
        self._draw.run()
        return tokens.astype(np.int64)

    def draw_from_top(self, logits: Tensor, draws: Draws) -> Ints:
        """Draws among candidates near the largest logit.

        Rows with too few candidates are tried again with more. Rows with too many are sorted as a whole. Both give the
        same token: `_Candidates.enough` says when no token that top_k and top_p leave is missing.
        """
        tokens = np.empty(len(draws.rows), np.int64)
        left, reach, sort = np.arange(len(tokens)), REACH, list[int]()
        for _ in range(TRIES):
            found = self._candidates(logits, draws.of(left), reach)
            enough = found.enough(draws.of(left), logits.shape[1])
            if enough.any():
                tokens[left[enough]] = found.draw(enough, draws.of(left)).numpy()
            few = ~enough & (found.counts <= MOST)
            sort += left[~enough & ~few].tolist()
            left, reach = left[few], reach * FURTHER
            if not len(left):
                break
        rest = np.array([*sort, *left.tolist()], np.int64)
        if len(rest):
            tokens[rest] = TORCH_OPS.draw_from_top(logits, draws.of(rest))
        return tokens

    def _candidates(self, logits: Tensor, draws: Draws, reach: float) -> "_Candidates":
        n, columns = len(draws.rows), _Columns.of(logits, draws)
        far, counts, totals = np.full(n, reach, np.float32), np.empty(n, np.int64), torch.empty(n)
        found, ids = torch.empty(n, MOST + LANES), torch.empty(n, MOST + LANES, dtype=torch.int32)
        self._cells[:] = (
            *columns.words(), far.ctypes.data, totals.data_ptr(), counts.ctypes.data, found.data_ptr(), ids.data_ptr()
        )  # fmt: skip
        self._near.run()
        width = min(max(1, int(counts.max())), MOST)
        scaled = (found[:, :width].double() - columns.best.double()[:, None]) / torch.from_numpy(draws.temperature)[
            :, None
        ]
        none = torch.arange(width) >= torch.from_numpy(counts)[:, None]
        none |= scaled < torch.from_numpy(columns.least)[:, None]
        scaled, chosen = scaled.masked_fill(none, -torch.inf), ids[:, :width].long().masked_fill(none, 0)
        return _Candidates(scaled, chosen, counts, totals, complete=columns.least >= -reach)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Columns of draws that kernels read.

    Attributes:
        best: [draws] float32. Largest logit of each draw's row.
        least: [draws] float32. Log of min_p.
    """

    logits: Tensor
    vocabulary: int
    rows: Ints
    best: Tensor
    temperature: NDArray[np.float32]
    least: NDArray[np.float32]

    @staticmethod
    def of(logits: Tensor, draws: Draws) -> "_Columns":
        best = logits.amax(-1)[torch.from_numpy(draws.rows)]
        with np.errstate(divide="ignore"):
            least = np.log(draws.min_p).astype(np.float32)
        temperature = np.maximum(draws.temperature.astype(np.float32), np.finfo(np.float32).tiny)  # above 0 still
        return _Columns(_readable(logits), logits.shape[1], np.ascontiguousarray(draws.rows), best, temperature, least)

    def words(self) -> tuple[int, ...]:
        return (
            len(self.rows), self.rows.ctypes.data, self.logits.data_ptr(), self.logits.stride(0) * 4, self.vocabulary,
            self.best.data_ptr(), self.temperature.ctypes.data, self.least.ctypes.data,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Candidates of draws.

    Attributes:
        scaled: [draws, candidates] float64. -inf where a row has no more.
        ids: [draws, candidates] int64.
        counts: [draws] int64. Candidates of each, of which at most MOST are here.
        totals: [draws] float32. Sum of e^scaled of all that min_p leaves.
        complete: [draws] bool. Whether min_p leaves no token beyond these.
    """

    scaled: Tensor
    ids: Tensor
    counts: Ints
    totals: Tensor
    complete: NDArray[np.bool_]

    def enough(self, draws: Draws, vocabulary: int) -> NDArray[np.bool_]:
        """Returns whether the candidates hold all that top_k and top_p leave, [draws] bool."""
        mass = torch.exp(self.scaled).cumsum(-1)[:, -1].numpy()
        by_p = mass > (draws.top_p + 1e-5) * self.totals.numpy()
        found = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocabulary) <= self.counts, by_p)
        return (found | self.complete) & (self.counts <= MOST)

    def draw(self, which: NDArray[np.bool_], draws: Draws) -> Tensor:
        at = torch.from_numpy(np.flatnonzero(which))
        return draw_among(self.scaled[at], self.ids[at], draws.of(which), self.totals[at])


def _readable(logits: Tensor) -> Tensor:
    """Returns logits whose last row may be read in whole vectors, without reading past the end of the memory."""
    rows, vocabulary = logits.shape
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + -(-vocabulary // LANES) * LANES
    if logits.stride(1) == 1 and end * 4 <= logits.untyped_storage().nbytes():
        return logits
    return F.pad(logits.contiguous(), (0, -vocabulary % LANES))[:, :vocabulary]
