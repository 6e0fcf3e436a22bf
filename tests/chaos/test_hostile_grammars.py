"""A few hundred hostile constraints; the long run is a command, `python -m tests.chaos.hostile_grammars`."""

import json

import pytest

from model.inputs.grammar_checker import Checked, GrammarChecker, GrammarUnchecked
from model.inputs.grammars import GrammarRefused, grammar_of
from scheduler.invalid import InvalidRequest
from scheduler.structured import KINDS
from tests.chaos.hostile_grammars import Campaign, campaign
from tests.support.grammar_engine import Died, GrammarEngine, Run
from tests.support.hostile_grammars import FAMILIES, Hostile, draw

PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(10, 30)]
PRODUCT = grammar_of("json_schema", json.dumps({"allOf": PATTERNS}))
"""It takes for ever."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1_000_000, 2_000_000])
def test_each_is_served_or_refused_and_harms_no_other(seed: int) -> None:
    """The kernel ends a trial that takes too long, by processor time."""
    with campaign(vocabulary=2000) as made:
        for number in range(seed, seed + 400):
            made.send(draw(number))
    assert made.wrong == []
    outcomes = {outcome for _, outcome in made.outcomes}
    assert {"served", "refused", "invalid"} <= outcomes <= {
        "served", "refused", "invalid", "refused by the engine", "ended in the engine",
    }  # fmt: skip
    assert {kind for kind, outcome in made.outcomes if outcome == "served"} == set(KINDS)


def test_a_seed_draws_the_same_and_all_families_are_drawn() -> None:
    drawn = [draw(seed) for seed in range(2000)]
    assert [repr(draw(seed)) for seed in range(100)] == [repr(one) for one in drawn[:100]]
    assert {one.family for one in drawn} == set(FAMILIES)


@pytest.mark.parametrize("answer", [
    GrammarRefused(""), GrammarRefused("x" * 1000), GrammarUnchecked("it died"), ValueError("it raised"),
])  # fmt: skip
def test_it_notices_a_checker_that_answers_wrongly(monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    def grammar(self: GrammarChecker, *_: object) -> Checked:
        raise answer

    monkeypatch.setattr(GrammarChecker, "grammar", grammar)
    assert len(sent(1).wrong) == 1
    assert len(sent(0).wrong) == 2, "the good pattern behind it too"


def test_it_notices_an_engine_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(self: GrammarEngine, *_: object) -> Run:
        raise Died("exit code -11")

    monkeypatch.setattr(GrammarEngine, "serve", serve)
    assert "the engine died: exit code -11" in sent(1).wrong[0]


@pytest.mark.parametrize("name", ["", "text"])
def test_it_notices_a_field_without_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def structured(self: Hostile) -> None:
        raise InvalidRequest(name, 1, "is wrong")

    monkeypatch.setattr(Hostile, "structured", structured)
    assert "the field is called" in sent(1).wrong[0]


def sent(seed: int) -> Campaign:
    with campaign(vocabulary=300) as made:
        made.send(Hostile(seed, "regex", "regex", "a{3}"))
    return made


def test_an_engine_is_replaced_after_its_death() -> None:
    engine = GrammarEngine(300, seconds=0.5)
    try:
        assert engine.serve('start: "a"').fault == ""
        with pytest.raises(Died, match="exit code -27"):  # SIGPROF
            engine.serve(PRODUCT)
        assert engine.serve('start: "a"').fault == ""
        assert "unknown name" in engine.serve("start: nothing").fault
    finally:
        engine.close()
