"""Chooses the experts of each row of a mixture, as `model.routing` does."""

from dataclasses import dataclass

import numpy as np

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.logits import first_largest
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.values import FLOAT32, INT64, Value

MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """Variant of the kernel; see `model.routing.Routing`.

    Attributes:
        biased: Whether a bias is added to the scores that experts are chosen by.
        best: Experts that make a group's score, 1 or 2. 0 without groups.
        scaled: Whether weights have a factor.
        own_scales: Whether each expert's weight has a factor of its own.
    """

    normalised: bool
    by_sigmoid: bool = False
    biased: bool = False
    best: int = 0
    scaled: bool = False
    own_scales: bool = False

    @property
    def name(self) -> str:
        marks = [word for word in ("normalised", "by_sigmoid", "biased", "scaled", "own_scales") if getattr(self, word)]
        return "_".join(["choice", *marks, *([f"groups_{self.best}"] if self.best else [])])


def write_choice(choice: Choice) -> Writer:
    """Writes the kernel that chooses the experts with the highest scores, of equal ones the first.

    Kernel arguments:
        count: Cell. The number of rows.
        logits: Logits of experts, float32.
        stride: Bytes of a row of logits.
        experts: The number of experts, at most MOST_EXPERTS.
        used: Experts of a row.
        chosen: Result, see `Routes`.
        weights: Result, see `Routes`.
        bias: [experts] float32. Not read unless `biased`.
        groups: The number of groups.
        used_groups: Groups of a row.
        factor: Factor of weights, a float.
        least: Least sum that weights are divided by, a float.
        scales: [experts] float32. Factors of their weights. Not read unless `own_scales`.
    """

    def write(code: Code) -> None:
        count, logits, stride, experts, used, chosen, weights, bias, groups, used_groups = code.arguments(10)
        left, totals = code.room(MOST_EXPERTS * 4), code.room(MOST_EXPERTS * 4)
        with shared_rows(code, count) as row:
            source = logits + row * stride
            highest, total = _fill(code, choice, source, experts, bias, left)
            if choice.best:
                _leave_out(code, choice, left, experts // groups, groups, used_groups, totals)
            given = code.variable(code.number(0.0))
            with code.loop(0, used) as i:
                _, narrow = first_largest(code, left, experts, lambda x, _: x)
                expert, place = code.widened(narrow, INT64), row * used + i
                code.store(code.number(-np.inf), left + expert * 4)
                logit = code.load(source + expert * 4, FLOAT32)
                weight = _sigmoid(code, logit) if choice.by_sigmoid else _power(code, logit - highest) / total
                given.set(given.value + weight)
                code.store(expert, chosen + place * 8)
                code.store(weight, weights + place * 4)
            if choice.normalised or choice.scaled or choice.own_scales:
                least = code.real(11)
                total = code.select(given.value < least, least, given.value)
                with code.loop(row * used, (row + 1) * used) as place:
                    weight = code.load(weights + place * 4, FLOAT32)
                    if choice.normalised:
                        weight = weight / total
                    weight = weight * code.real(10) if choice.scaled else weight
                    if choice.own_scales:
                        own = code.load(code.argument_place(12), INT64) + code.load(chosen + place * 8, INT64) * 4
                        weight = weight * code.load(own, FLOAT32)
                    code.store(weight, weights + place * 4)

    return write


def write_sparse_mixer(code: Code) -> None:
    """Writes the kernel that chooses two experts and weighs them as `model.routing.SparseMixer` does.

    Of equal logits it takes the first.

    Kernel arguments:
        count: Cell. The number of rows.
        logits: Logits of experts, float32.
        stride: Bytes of a row of logits.
        experts: The number of experts, 2 .. MOST_EXPERTS.
        chosen: Result, see `Routes`.
        weights: Result, see `Routes`.
        band: As of the class, a float.
    """
    count, logits, stride, experts, chosen, weights = code.arguments(6)
    left, band = code.room(MOST_EXPERTS * 4), code.real(6)
    with shared_rows(code, count) as row:
        source = logits + row * stride
        with code.loop(0, experts) as i:
            code.store(code.load(source + i * 4, FLOAT32), left + i * 4)
        with code.loop(row * 2, row * 2 + 2) as place:
            highest, narrow = first_largest(code, left, experts, lambda x, _: x)
            total = code.variable(code.number(0.0))
            with code.loop(0, experts) as i:
                logit = code.load(source + i * 4, FLOAT32)
                far = (highest - logit) / code.maximum(code.absolute(logit), highest) > band
                power = _power(code, code.load(left + i * 4, FLOAT32) - highest)
                total.set(total.value + code.select(far, code.number(0.0), power))
            expert = code.widened(narrow, INT64)
            code.store(code.number(-np.inf), left + expert * 4)
            code.store(expert, chosen + place * 8)
            code.store(1.0 / total.value, weights + place * 4)


def _fill(code: Code, choice: Choice, source: Value, experts: Value, bias: Value, left: Value) -> tuple[Value, Value]:
    """Leaves in `left` what experts are chosen by: logits where these have the order of their softmax.

    Returns the highest logit, and the sum of the powers relative to it.
    """
    highest, _ = first_largest(code, source, experts, lambda x, _: x)
    total = code.variable(code.number(0.0))
    with code.loop(0, experts) as i:
        logit = code.load(source + i * 4, FLOAT32)
        score = _sigmoid(code, logit) if choice.by_sigmoid else logit
        if not choice.by_sigmoid:
            power = _power(code, logit - highest)
            total.set(total.value + power)
            # Sums of powers are in the order of those of a softmax.
            score = power if choice.biased or choice.best == 2 else logit
        code.store(score, left + i * 4)
    if choice.biased:
        with code.loop(0, experts) as i:
            score = code.load(left + i * 4, FLOAT32)
            score = score if choice.by_sigmoid else score / total.value
            code.store(score + code.load(bias + i * 4, FLOAT32), left + i * 4)
    return highest, total.value


def _leave_out(code: Code, choice: Choice, left: Value, size: Value, groups: Value, used: Value, totals: Value) -> None:
    """Makes the scores of all experts of groups -inf that a row does not use."""
    with code.loop(0, groups) as group:
        own = left + group * size * 4
        first, place = first_largest(code, own, size, lambda x, _: x)
        total = first
        if choice.best == 2:
            at = own + code.widened(place, INT64) * 4
            code.store(code.number(-np.inf), at)
            total = first + first_largest(code, own, size, lambda x, _: x)[0]
            code.store(first, at)
        code.store(total, totals + group * 4)
    with code.loop(0, used):
        _, group = first_largest(code, totals, groups, lambda x, _: x)
        code.store(code.number(-np.inf), totals + code.widened(group, INT64) * 4)
    with (
        code.loop(0, groups) as group,
        code.when(code.load(totals + group * 4, FLOAT32) > -np.inf),
        code.loop(group * size, (group + 1) * size) as expert,
    ):
        code.store(code.number(-np.inf), left + expert * 4)


def _power(code: Code, x: Value) -> Value:
    """Returns e^x of one number."""
    return code.lane(math.exp(code, code.splat(x)), 0)


def _sigmoid(code: Code, x: Value) -> Value:
    """Returns the sigmoid of one number."""
    return code.lane(math.sigmoid(code, code.splat(x)), 0)
