"""Mixture of experts: multiplies each expert with its rows, and adds up the results. See `model.cpu.kernels.choice`.

Rows are put in order of their experts, and each expert's are cut into jobs of a few at most. A row's result for one of
its experts is kept by itself. The results of a row are added in order of their weights, so its bits depend on no other
row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.cpu.kernels.choice import MOST_EXPERTS
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.group_panels import GroupPanels
from model.cpu.kernels.linear import Epilogue, multiply
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.sides import MOST_ROWS, Sides, WeightPanel
from model.cpu.kernels.sums import PanelSums
from model.cpu.kernels.values import FLOAT32, INT64, LANES, Value

JOB = (
    "expert",
    "first",  # first row of the job, in the order of experts
    "count",  # rows of the job
)
"""Columns of a job, int64 each."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Rows and experts of a step.

    A place is row x used + i, for the i-th of the experts that a row goes to.

    Attributes:
        used: Experts of a row.
        chosen: [places] int64. Expert of each place.
        weights: [places] float32.
        ones: [places] float32. Weights where inputs have been weighed.
        order: [places] int64. Places by expert.
        jobs: [n, fields of JOB] int64.
        count: [1] int64. The number of jobs.
    """

    experts: int
    used: int
    chosen: Tensor
    weights: Tensor
    ones: Tensor
    order: Tensor
    jobs: Tensor
    count: Tensor

    @staticmethod
    def of(rows: int, experts: int, used: int) -> "Routes":
        places = rows * used
        most = places // MOST_ROWS + min(places, experts)
        chosen, order, jobs = (torch.zeros(n, dtype=torch.int64) for n in (places, places, most * len(JOB)))
        weights = torch.zeros(places)
        count = torch.zeros(1, dtype=torch.int64)
        return Routes(experts, used, chosen, weights, torch.ones(places), order, jobs, count)


def write_jobs(code: Code) -> None:
    """Writes the kernel that puts places in order of their experts and cuts them into jobs.

    One thread does it: a row takes a few instructions.

    Kernel arguments:
        count: Cell. The number of rows.
        used: Experts of a row.
        experts: The number of experts.
        chosen: Experts of places, see `Routes`.
        order: Result, see `Routes`.
        jobs: Result, see `Routes`.
        made: Cell. Result: the number of jobs.
    """
    count, used, experts, chosen, order, jobs, made = code.arguments(7)
    next_of = code.room(MOST_EXPERTS * 8)  # rows of each expert, then the place of its next one
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
    """Sides of which one has a row for each place, in order of the experts.

    Attributes:
        order: Places by expert, of all jobs.
        used: Experts of a row, where rows are read. None where the input has a row for each place: then rows are
            written.
    """

    code: Code
    order: Value
    used: Value | None

    def input(self, row: Value) -> Value:
        if self.used is not None:
            row = self.code.load(self.order + row * 8, INT64) // self.used
        return self.x + row * self.x_stride

    def output(self, row: Value) -> Value:
        place = row if self.used is not None else self.code.load(self.order + row * 8, INT64)
        return self.y + place * self.y_stride


def write_experts(weights: Panels | GroupPanels, ending: Epilogue, gather: bool) -> Writer:
    """Writes the product of each expert with its rows.

    With `gather`, rows are read in their places, and results are written in order of the experts. Without, rows are
    read in order of the experts, and each result is written to its place.

    Kernel arguments:
        jobs: Jobs, see JOB.
        count: Cell. The number of jobs.
        order: Places by expert.
        used: Places that read one row of x.
        x: Input.
        x_stride: Bytes of a row of x.
        places: Addresses of each expert's panels, int64.
        panels: The number of panels of an expert.
        steps: Steps of a panel.
        y: Result.
        y_stride: Bytes of a row of y.
        scales: Addresses of each expert's scales, int64.
        biases: Addresses of each expert's biases, int64.
        kernel: See `sums_kernel`.
    """

    def write(code: Code) -> None:
        (
            jobs, count, order, used, x, x_stride, places, panels, steps, y, y_stride, scales, biases, kernel,
        ) = code.arguments(14)  # fmt: skip
        number_of_jobs, sums = code.held(count), PanelSums(code, weights, kernel, steps)
        sides = _Ordered(x, x_stride, y, y_stride, code, order, used if gather else None)
        # Panel by panel through all jobs: they are of many sizes, and threads have the same of each.
        first, last = code.share(number_of_jobs * panels)
        with code.loop(first, last) as item:
            number, job = item // number_of_jobs, jobs + item % number_of_jobs * (8 * len(JOB))
            expert, start, rows = (code.load(job, INT64, 8 * i) for i in range(len(JOB)))
            sums.take(job, sides, start, rows)
            own = code.load(places + expert * 8, INT64) + number * weights.panel_bytes(steps)
            outputs = number * (PANEL * 4)
            factors = code.load(scales + expert * 8, INT64) + outputs if ending.scaled else own
            bias = code.load(biases + expert * 8, INT64) + outputs if ending.bias else own
            multiply(code, sums, ending, start, rows, sides, WeightPanel(number, own, steps, bias, factors, own))

    return write


def write_weighed(element: Element) -> Writer:
    """Writes the kernel that multiplies a row by its weight for each of its experts, before they read it.

    Kernel arguments:
        count: Cell. The number of rows.
        used: Experts of a row.
        weights: Weights of places, float32.
        x: Rows, of the element.
        stride: Bytes of a row of x.
        y: Result, of the element, a row for each place.
        y_stride: Bytes of a row of y.
        width: Columns.
    """

    def write(code: Code) -> None:
        count, used, weights, x, stride, y, y_stride, width = code.arguments(8)
        with shared_rows(code, count) as row, code.loop(row * used, (row + 1) * used) as place:
            weight = code.splat(code.load(weights + place * 4, FLOAT32))
            source, made = x + row * stride, y + place * y_stride
            with code.loop(0, width, LANES) as i:
                element.store(code, element.load(code, source + i * element.size) * weight, made + i * element.size)

    return write


def write_mixed(add: bool) -> Writer:
    """Writes the kernel that adds up the results of a row's experts, by their weights.

    With `add`, the sum is added to y.

    Kernel arguments:
        count: Cell. The number of rows.
        used: Experts of a row.
        weights: Weights of places, float32.
        parts: Results of experts, float32, a row for each place.
        stride: Bytes of a row of parts.
        y: Result, float32.
        y_stride: Bytes of a row of y.
        width: Columns.
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
