"""Fits the costs of steps to recorded steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.step_costs import StepCosts, StepWork
from scheduler.step_time import nonnegative_fit

SHORTEST = 1e-6  # seconds of a step: its error counts by the reciprocal of its time
FITS = 3  # of the costs, each with the times that the one before it predicts

Floats = NDArray[np.float64]


def costs_of(steps: Sequence[tuple[StepWork, float]]) -> StepCosts:
    """Fits costs to steps, so that those of all of them together are as long as they took.

    Long steps vary more: counted alike, a few of them would leave those of few rows wrong by half. So the square of a
    step's error counts by the reciprocal of its time. That is the predicted one: by their own times those that came out
    short would count more, and all costs come out too low.

    The costs have a curve with a point at each power of two. A point counts as one more step at its place on the line
    that fits without a curve, so that it stays there where no step has as many tokens.

    Source: iteratively reweighted least squares, the variance in proportion to the mean.

    Args:
        steps: Work of each, and its seconds.
    """
    if not steps:
        return StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)
    others = np.array([(one.decodes, one.context, one.prefill, one.pairs) for one, _ in steps], np.float64)
    tokens, took = others[:, 0] + others[:, 2], np.array([seconds for _, seconds in steps])
    fixed, decode, context, prefill, pair = _fit(np.column_stack((np.ones(len(steps)), others)), took).tolist()
    knots = 2.0 ** np.arange(int(np.ceil(np.log2(max(2.0, tokens.max())))) + 1)
    heights = np.array([np.interp(tokens, knots, row) for row in np.eye(len(knots))]).T  # of the two next points
    at_knots = np.hstack((np.eye(len(knots)), np.zeros((len(knots), others.shape[1]))))
    line = fixed + min(decode, prefill) * knots
    found = _fit(np.vstack((np.hstack((heights, others)), at_knots)), np.concatenate((took, line))).tolist()
    decode, context, prefill, pair = found[len(knots) :]
    curve = tuple(zip(map(int, knots.tolist()), found[: len(knots)], strict=True))
    return StepCosts(0.0, decode, context, prefill, pair, curve)


def _fit(features: Floats, took: Floats) -> Floats:
    """Returns the cost of each feature.

    Args:
        features: [n, m] float64. Of steps.
        took: [n] float64. Seconds of each.
    """
    units = np.maximum(features.max(axis=0), 1e-12)  # so that none outweighs the others
    scaled, expected = features / units, took
    for _ in range(FITS):
        weighted = scaled / np.maximum(expected, SHORTEST)[:, None]
        found = nonnegative_fit(weighted.T @ scaled, weighted.T @ took)
        expected = scaled @ found
    return found / units
