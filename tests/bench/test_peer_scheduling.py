"""Schedulers side by side: the clock's own laws, and that Quire's columns are what its scheduler decides today."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bench.peers.scheduling import COLUMNS, SIDES, News, figures, play, table
from bench.peers.scheduling_cases import GPU, Asked, Case, Outcome, cases
from scheduler.policy import FirstCome
from tests.support.planted import plant

ROOT = Path(__file__).parents[2]
ROWS = list(csv.DictReader((ROOT / "bench" / "results" / "scheduling.csv").open(newline="")))
CASES = {case.name: case for case in cases()}


QUICK = [name for name in CASES if name[0] in "36"]
"""Cases that take a second."""


def case_of(*requests: Asked) -> Case:
    return Case("", requests, ())


def play_quire(case: Case) -> Outcome:
    side = SIDES["Quire"](case)
    assert side is not None
    return play(case, side)


def test_a_request_alone_takes_its_steps() -> None:
    """1,000 tokens in steps of 512, and a decode for each token behind the first."""
    outcome = play_quire(case_of(Asked(1.0, 1000, 3)))
    steps = [[[0, 0, 512]], [[0, 512, 488]], [[0, 1000, 1]], [[0, 1001, 1]]]
    seconds = [GPU.seconds(np.array(step, np.int32)) for step in steps]
    assert outcome.first[0] == pytest.approx(1.0 + sum(seconds[:2]))
    assert outcome.ended[0] == outcome.seconds == pytest.approx(1.0 + sum(seconds))
    assert outcome.gaps[""] == pytest.approx(seconds[2:])
    assert (outcome.drawn, outcome.computed, outcome.again) == ({0: 3}, 1002, 0)


class Stubborn:
    """A side that computes each prompt twice, and draws nothing before that."""

    preemptions = 1

    def __init__(self) -> None:
        self._steps = 0

    def submit(self, number: int, now: float) -> None: ...

    def leave(self, number: int) -> None: ...

    def plan(self, now: float) -> np.ndarray:
        self._steps += 1
        return np.array([[0, 0, 10]] if self._steps < 3 else [[0, 4, 8]], np.int32)

    def commit(self, now: float) -> News:
        return News([0], [0], []) if self._steps == 3 else News([], [], [])


def test_what_is_computed_again_is_counted() -> None:
    outcome = play(case_of(Asked(0.0, 10, 1)), Stubborn())
    assert (outcome.computed, outcome.again, outcome.preemptions) == (28, 10 + 6, 1)


def test_a_client_leaves_at_its_deadline() -> None:
    """Its request is not complete, and a scheduler that is told of it later changes nothing."""
    case = case_of(Asked(0.0, 100, 1000, deadline=1.0), Asked(0.5, 100, 5, patience=9.0))
    outcome = play_quire(case)
    assert outcome.ended.keys() == {1}
    assert outcome.seconds < 1.2


def test_a_scheduler_that_stands_still_is_noticed() -> None:
    side = Stubborn()
    side.plan = lambda now: None  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(RuntimeError, match="nothing is planned, and 1 requests wait"):
        play(case_of(Asked(0.0, 10, 1)), side)


@pytest.mark.parametrize("name", CASES)
def test_a_case_keeps_its_own_bounds(name: str) -> None:
    """Requests come in order, and each fits in the pool."""
    case = CASES[name]
    arrivals = [asked.arrives for asked in case.requests]
    assert arrivals == sorted(arrivals)
    assert max(asked.prompt + asked.output for asked in case.requests) < 16 * case.pages


def published(name: str, column: str) -> list[str]:
    """Returns the figures of a case."""
    return [row[column] for row in ROWS if row["case"] == name]


def check(name: str, column: str) -> None:
    """Figures are those that are published, but for the last digits: decisions hang on sums of floats."""
    then, now = published(name, column), figures(CASES[name], SIDES[column])
    assert [number(one) for one in now] == pytest.approx([number(one) for one in then], rel=0.1, abs=0.1)


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize("column", SIDES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_figures_are_those_that_are_published(name: str, column: str) -> None:
    check(name, column)


def test_all_figures_are_published_and_the_page_has_them() -> None:
    assert [(row["case"], row["figure"]) for row in ROWS] == [
        (n, f.name) for n, case in CASES.items() for f in case.figures
    ]
    assert list(ROWS[0]) == ["case", "figure", *COLUMNS]
    assert table(ROWS) in (ROOT / "docs" / "explanation" / "scheduling.md").read_text()


def test_another_decision_is_another_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no request passes one that lacks room."""
    plant(monkeypatch, FirstCome, "holds_the_line", lambda _: lambda self, sequence, now: True)
    with pytest.raises(AssertionError):
        check("3 a giant prompt that does not fit", "Quire")
