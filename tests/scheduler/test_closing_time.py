"""Law: a row is told within how many tokens to close its output, near its end alone, and as many as it has time for."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler.closing_time import MARGIN, PART, STEPS, WITHIN, ClosingTime
from scheduler.controls import Controls, LogitsParams
from scheduler.parameters import Beam
from scheduler.request import Request
from scheduler.rows import Rows, Sequence

CLOSED = LogitsParams(grammar="g", grammar_tokens=5000, grammar_short=3)
PLAIN = LogitsParams()


def request(deadline: float | None, params: LogitsParams = CLOSED) -> Request:
    return Request(
        np.arange(3, dtype=np.int32), 5000, (0,), Controls(1.0, 1.0, 0, 0.0, 0, -1, params), deadline=deadline
    )


def added(rows: Rows, asked: Request, submitted: float = 0.0, attempt: int = 1) -> int:
    return rows.add(Sequence(attempt, asked, np.empty(0, np.int32), submitted, attempt))


def steady(rows: Rows, seconds: float, steps_in_flight: int = 1) -> ClosingTime:
    closing = ClosingTime(rows, steps_in_flight)
    for _ in range(STEPS):
        closing.observe(seconds)
    return closing


@given(st.floats(0.001, 1.0), st.floats(0.0, 3000.0), st.floats(0.0, 3000.0))
def test_what_is_told_fits_into_the_time(seconds: float, deadline: float, now: float) -> None:
    rows = Rows(4)
    row = added(rows, request(deadline))
    told = steady(rows, seconds).take(now).tolist()
    steps = PART * (deadline - now) / seconds
    if told:
        assert told[0][0] == row
        assert told[0][1] == max(1, int(steps - MARGIN))
        assert steps <= WITHIN + 1
    else:
        assert steps >= WITHIN - 1


def test_a_row_is_told_again_where_it_has_fewer_or_more() -> None:
    rows = Rows(4)
    row = added(rows, request(100.0))
    closing = steady(rows, 0.1)
    first = int(PART * 1000) - MARGIN
    assert closing.take(0.0).tolist() == [[row, first]]
    assert closing.take(0.1).tolist() == []
    for seconds, most in ((0.2, int(PART * 500) - MARGIN), (0.1, first)):
        for _ in range(STEPS):
            closing.observe(seconds)
        assert closing.take(0.0).tolist() == [[row, most]]


def test_one_long_step_among_others_says_nothing() -> None:
    """A kernel that is compiled, an image, a pause of the machine."""
    rows = Rows(4)
    added(rows, request(600.0))
    closing = steady(rows, 0.01)
    for _ in range(STEPS // 2):
        closing.observe(60.0)
    assert closing.take(0.0).tolist() == []


def test_a_search_has_a_token_every_other_step_with_two_in_flight() -> None:
    rows = Rows(4)
    row = added(rows, replace(request(10.0), beam=Beam(2)))
    assert steady(rows, 0.1, 2).take(0.0).tolist() == [[row, int((PART * 100 - MARGIN) / 2)]]


def test_a_row_is_told_anew_for_another_sequence() -> None:
    rows = Rows(1)
    added(rows, request(10.0))
    closing = steady(rows, 0.1)
    assert closing.take(0.0).tolist() == [[0, 88]]
    rows.remove(0)
    assert closing.take(0.0).tolist() == []
    added(rows, request(20.0), 1.0, attempt=2)
    assert closing.take(1.0).tolist() == [[0, 178]]


def test_others_are_told_nothing() -> None:
    rows = Rows(8)
    for attempt, one in enumerate([request(None), request(math.inf), request(5.0, PLAIN)], 1):
        added(rows, one, attempt=attempt)
    added(rows, replace(request(5.0), controls=replace(request(5.0).controls, logits_params=PLAIN)), attempt=4)
    assert steady(rows, 0.1).take(4.9).tolist() == []


def test_nothing_is_told_before_some_steps_were_measured() -> None:
    rows = Rows(1)
    added(rows, request(1.0))
    closing = ClosingTime(rows)
    for _ in range(STEPS - 1):
        closing.observe(0.1)
    assert closing.take(0.9).tolist() == []
