"""Costs that are fitted to steps predict them."""

import math

import numpy as np
import pytest

from rpc.simulation.fitting import costs_of
from scheduler.step_costs import StepCosts, StepWork

LINE = StepCosts(0.02, 0.0003, 2e-8, 0.0008, 2e-8)
REAL = StepCosts(
    0.0, 0.0, 3e-6, 0.0, 1.5e-6,
    (
        (1, 0.015), (2, 0.015), (4, 0.022), (8, 0.04), (16, 0.06), (32, 0.13), (64, 0.22), (65, 0.4), (128, 0.65),
        (512, 2.1),
    ),
)  # fmt: skip
"""A CPU whose products of 65 to 128 tokens are slow, as one was measured."""


def steps_of(true: StepCosts, count: int, noise: float, seed: int = 1) -> list[tuple[StepWork, float]]:
    """Returns steps of all sizes, and times with noise that has no mean."""
    source, made = np.random.default_rng(seed), list[tuple[StepWork, float]]()
    for _ in range(count):
        rows = [(int(source.integers(50, 2000)), 1) for _ in range(int(2 ** source.uniform(0, 5)))]
        rows += [(0, int(2 ** source.uniform(1, 9)))] * (source.random() < 0.3)
        work = StepWork.of(np.array([(row, start, tokens) for row, (start, tokens) in enumerate(rows)], np.int32))
        made.append((work, true.seconds_of(work) * math.exp(noise * source.standard_normal() - noise**2 / 2)))
    return made


@pytest.mark.parametrize("true", [LINE, REAL])
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.5])
def test_costs_are_not_too_low_where_times_vary(noise: float, true: StepCosts) -> None:
    """The steps take as long together as they are predicted to."""
    steps = steps_of(true, 1000, noise)
    costs = costs_of(steps)
    predicted = sum(costs.seconds_of(work) for work, _ in steps)
    assert sum(seconds for _, seconds in steps) / predicted == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("true", "bound"), [(LINE, 0.001), (REAL, 0.05)])
def test_other_steps_are_predicted_too(true: StepCosts, bound: float) -> None:
    costs = costs_of(steps_of(true, 400, 0.0))
    errors = [costs.seconds_of(work) / seconds - 1 for work, seconds in steps_of(true, 400, 0.0, seed=2)]
    assert np.median(np.abs(errors)) < bound
    assert np.percentile(np.abs(errors), 95) < 6 * bound


def test_sizes_that_no_step_has_stay_on_the_line() -> None:
    steps = [
        (work, seconds) for work, seconds in steps_of(LINE, 400, 0.0) if not 30 < work.decodes + work.prefill < 300
    ]
    costs = costs_of(steps)
    for tokens in (48, 64, 100, 128, 200):
        work = StepWork(prefill=tokens)
        assert costs.seconds_of(work) == pytest.approx(LINE.seconds_of(work), rel=0.05)


def test_few_steps_give_costs_as_well() -> None:
    assert costs_of([]) == StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)
    for count in range(1, 8):
        for work, seconds in (steps := steps_of(LINE, count, 0.0)):
            assert costs_of(steps).seconds_of(work) == pytest.approx(seconds, rel=0.2)
