"""Law: a row is told within how many tokens to close its output, near its end alone, and as many as it has time for."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler.closing_time import MEMORY, PART, SLACK, WITHIN, ClosingTime
from scheduler.controls import Controls, LogitsParams
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


def steady(rows: Rows, seconds: float) -> ClosingTime:
    closing = ClosingTime(rows)
    for _ in range(3):
        closing.observe(seconds)
    return closing


@given(st.floats(0.001, 1.0), st.floats(0.0, 3000.0), st.floats(0.0, 3000.0))
def test_what_is_told_fits_into_the_time(seconds: float, deadline: float, now: float) -> None:
    rows = Rows(4)
    row = added(rows, request(deadline))
    told = steady(rows, seconds).take(now).tolist()
    left = PART * (deadline - now) / seconds
    if told:
        assert told[0][0] == row
        assert told[0][1] == max(1, int(left))
        assert left <= WITHIN + 1
    else:
        assert left >= WITHIN - 1


def test_a_row_is_told_again_where_it_has_fewer_alone() -> None:
    rows = Rows(4)
    row = added(rows, request(10.0))
    closing = steady(rows, 0.1)
    assert closing.take(0.0).tolist() == [[row, 90]]
    assert closing.take(0.1).tolist() == []
    rows.emitted[row] = 10
    assert closing.take(1.0).tolist() == []  # as many as before
    for _ in range(40):
        closing.observe(0.2)
    ((_, most),) = closing.take(1.0).tolist()
    assert most < 90 - SLACK
    for _ in range(40):
        closing.observe(0.05)
    assert closing.take(1.0).tolist() == []  # more than it was told


def test_a_row_is_told_anew_for_another_sequence() -> None:
    rows = Rows(1)
    added(rows, request(10.0))
    closing = steady(rows, 0.1)
    assert closing.take(0.0).tolist() == [[0, 90]]
    rows.remove(0)
    assert closing.take(0.0).tolist() == []
    added(rows, request(20.0), 1.0, attempt=2)
    assert closing.take(1.0).tolist() == [[0, 180]]


def test_others_are_told_nothing() -> None:
    rows = Rows(8)
    for attempt, one in enumerate([request(None), request(math.inf), request(5.0, PLAIN)], 1):
        added(rows, one, attempt=attempt)
    added(rows, replace(request(5.0), controls=replace(request(5.0).controls, logits_params=PLAIN)), attempt=4)
    assert steady(rows, 0.1).take(4.9).tolist() == []


def test_nothing_is_told_before_a_step_was_measured() -> None:
    rows = Rows(1)
    added(rows, request(1.0))
    assert ClosingTime(rows).take(0.9).tolist() == []


def test_older_steps_fade() -> None:
    rows = Rows(1)
    added(rows, request(10.0))
    closing = steady(rows, 0.1)
    closing.observe(1.1)
    ((_, most),) = closing.take(0.0).tolist()
    assert most == int(PART * 10.0 / (0.1 + (1 - MEMORY)))
