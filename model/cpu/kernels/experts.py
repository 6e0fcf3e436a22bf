"""A mixture of experts: which ones a row goes to, the products of each expert with the rows that go to it, their sum.

Rows are put in order of their experts, and each expert's are cut into jobs of a few at most. What is made of a row for
one of its experts is kept by itself; those of a row are added up in order of their weights, so that its bits depend on
no other row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.linear import MOST_ROWS, Ending, Panel, Sides, multiply
from model.cpu.kernels.logits import first_largest
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.values import FLOAT32, INT64, LANES, Value

MOST_EXPERTS = 1024
JOB = ("expert", "first", "count")
"""Of a job, int64 each: its expert, its first row among those in order, how many."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Of the rows of a step. A place is row x used + i, for the i-th of the experts that a row goes to. chosen: int64
    [places] experts, weights: float32 [places], order: int64 [places] places by expert, jobs: int64 [n, fields of JOB],
    count: int64 [1], how many there are.
    """

    experts: int
    used: int
    chosen: Tensor
    weights: Tensor
    order: Tensor
    jobs: Tensor
    count: Tensor

    @staticmethod
    def of(rows: int, experts: int, used: int) -> "Routes":
        places = rows * used
        most = places // MOST_ROWS + min(places, experts)
        chosen, order, jobs = (torch.zeros(n, dtype=torch.int64) for n in (places, places, most * len(JOB)))
        weights = torch.zeros(places)
        return Routes(experts, used, chosen, weights, order, jobs, torch.zeros(1, dtype=torch.int64))


def write_choice(normalised: bool) -> Writer:
    """The experts with the largest logits, of equal ones the first; their weights are softmax over all of them.
    normalised: those of a row are made to add up to 1.

    Arguments: rows, as the cell that holds it; logits (float32), their stride, experts, used, chosen, weights.
    """

    def write(code: Code) -> None:
        count, logits, stride, experts, used, chosen, weights = code.arguments(7)
        left = code.room(MOST_EXPERTS * 4)
        with shared_rows(code, count) as row:
            source = logits + row * stride
            highest, _ = first_largest(code, source, experts, lambda x, _: x)
            total = code.variable(code.number(0.0))
            with code.loop(0, experts) as i:
                logit = code.load(source + i * 4, FLOAT32)
                code.store(logit, left + i * 4)
                total.set(total.value + _power(code, logit - highest))
            given = code.variable(code.number(0.0))
            with code.loop(0, used) as i:
                logit, narrow = first_largest(code, left, experts, lambda x, _: x)
                expert, place = code.widened(narrow, INT64), row * used + i
                code.store(code.number(-np.inf), left + expert * 4)
                weight = _power(code, logit - highest) / total.value
                given.set(given.value + weight)
                code.store(expert, chosen + place * 8)
                code.store(weight, weights + place * 4)
            if normalised:
                with code.loop(row * used, (row + 1) * used) as place:
                    code.store(code.load(weights + place * 4, FLOAT32) / given.value, weights + place * 4)

    return write


def _power(code: Code, x: Value) -> Value:
    """e^x of one number."""
    return code.lane(math.exp(code, code.splat(x)), 0)


def write_jobs(code: Code) -> None:
    """Done by one thread: a row is a few instructions. Arguments: rows, as the cell that holds it; used, experts,
    chosen, order, jobs, the cell for how many.
    """
    count, used, experts, chosen, order, jobs, made = code.arguments(7)
    next_of = code.room(MOST_EXPERTS * 8)  # of each expert how many rows, then where its next one goes
    with code.when(code.thread.equals(0)):
        places = code.held(count) * used
        with code.loop(0, experts) as expert:
            code.store(code.integer(0), next_of + expert * 8)
        with code.loop(0, places) as place:
            cell = next_of + code.load(chosen + place * 8, INT64) * 8
            code.store(code.held(cell) + 1, cell)
        start, job = code.variable(code.integer(0)), code.variable(jobs)
        with code.loop(0, experts) as expert:
            rows = code.held(next_of + expert * 8)
            code.store(start.value, next_of + expert * 8)
            with code.loop(0, rows, MOST_ROWS) as first:
                fields = expert, start.value + first, code.smaller(rows - first, code.integer(MOST_ROWS))
                for i, field in enumerate(fields):
                    code.store(field, job.value, 8 * i)
                job.set(job.value + 8 * len(JOB))
            start.set(start.value + rows)
        with code.loop(0, places) as place:
            cell = next_of + code.load(chosen + place * 8, INT64) * 8
            at = code.held(cell)
            code.store(place, order + at * 8)
            code.store(at + 1, cell)
        code.store((job.value - jobs) // (8 * len(JOB)), made)


@dataclass(frozen=True, slots=True)
class _Ordered(Sides):
    """Sides of which one has a row for each place in order of the experts. order: the rows in this order, of all jobs.
    used: of the other side, None where it has a row for each place: it is what is written.
    """

    code: Code
    order: Value
    used: Value | None

    def inputs(self, row: Value, size: int) -> list[Value]:
        if self.used is None:
            return [self.x + (row + r) * self.x_stride for r in range(size)]
        places = [self.code.load(self.order + (row + r) * 8, INT64) for r in range(size)]
        return [self.x + place // self.used * self.x_stride for place in places]

    def output(self, row: Value) -> Value:
        place = row if self.used is not None else self.code.load(self.order + row * 8, INT64)
        return self.y + place * self.y_stride


def write_experts(weights: Panels, ending: Ending, gather: bool) -> Writer:
    """The product of each expert with its rows. gather: they are read where they stand, and what is made of them is
    written in order of the experts; otherwise the other way round, to a row for each place.

    Arguments: jobs, the cell that holds how many, order, used, x, its stride, panels of each expert's weights
    (addresses), how many, steps, y, its stride, scales of each expert (addresses).
    """

    def write(code: Code) -> None:
        jobs, count, order, used, x, x_stride, places, panels, steps, y, y_stride, scales = code.arguments(12)
        number_of_jobs, sums = code.held(count), code.room(MOST_ROWS * PANEL * 4)
        sides = _Ordered(x, x_stride, y, y_stride, sums, code, order, used if gather else None)
        # Panel by panel through all jobs: they are of many sizes, and threads have the same of each.
        first, last = code.share(number_of_jobs * panels)
        with code.loop(first, last) as item:
            number, job = item // number_of_jobs, jobs + item % number_of_jobs * (8 * len(JOB))
            expert, start, rows = (code.load(job, INT64, 8 * i) for i in range(len(JOB)))
            own = code.load(places + expert * 8, INT64) + number * steps * weights.step
            factors = code.load(scales + expert * 8, INT64) + number * (PANEL * 4) if ending.scaled else own
            multiply(code, weights, ending, start, rows, sides, Panel(number, own, steps, own, factors))

    return write


def write_mixed(add: bool) -> Writer:
    """Adds up what a row's experts have made of it, by their weights. Arguments: rows, as the cell that holds it; used,
    weights, parts (float32, a row for each place), their stride, y (float32), its stride, the width. add: to y.
    """

    def write(code: Code) -> None:
        count, used, weights, parts, stride, y, y_stride, width = code.arguments(8)
        with shared_rows(code, count) as row, code.loop(0, width, LANES) as i:
            total = code.variable(code.floats(0.0))
            with code.loop(row * used, (row + 1) * used) as place:
                weight = code.splat(code.load(weights + place * 4, FLOAT32))
                total.set(code.fma(FLOAT.load(code, parts + place * stride + i * 4), weight, total.value))
            there = y + row * y_stride + i * 4
            FLOAT.store(code, total.value + FLOAT.load(code, there) if add else total.value, there)

    return write
