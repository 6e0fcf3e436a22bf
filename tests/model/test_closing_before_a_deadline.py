"""Law: a constrained output is complete before the deadline of its request, in any schedule, and where it can be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.closing_time import ClosingTime
from scheduler.events import Abort, EndReason, Submit
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from scheduler.step import NO_CLOSING, Ints
from scheduler.structured import Structured
from tests.model.test_parity import random_prompts
from tests.model.test_structured_output import END, constrained, llama, searches_have_time, tokenizer
from tests.support.engines import Rig, key_of, make_rig

__all__ = ["llama", "searches_have_time"]  # fixtures

PROMPTS = random_prompts([5, 20, 3, 11], seed=4)
LONG = Structured.json_schema({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
SHORT, MOST, TURN = len('{"text":""}') + 1, 400, 0.01
STEPS = [60, 80, 110, 150]
"""For which each request has time."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "device draws": {"ahead": True, "settings": SchedulerSettings(max_batched_tokens=512, steps_in_flight=2)},
    "chunked": {"settings": SchedulerSettings(max_batched_tokens=9, prefill_chunk=5, max_sequences=6)},
}


def outputs(rig: Rig, beam: Beam | None = None, drawn: float = 2.0) -> dict[int, tuple[list[int], EndReason | None]]:
    """Runs until each deadline; what has not ended by then has no reason."""
    takes_time(rig)
    rig.run({99: constrained(rig, PROMPTS[0], LONG, SHORT, SHORT)})  # it compiles the grammar, which takes turns
    asked: dict[str, Any] = {"temperature": drawn} if beam is None else {"beam": beam}
    began = rig.now
    for i, (prompt, steps) in enumerate(zip(PROMPTS, STEPS, strict=True)):
        request = constrained(rig, prompt, LONG, MOST, SHORT, **(asked if beam else asked | {"seed": i}))
        rig.turn([Submit(i, replace(request, deadline=steps * TURN))])
    for i, steps in enumerate(STEPS):
        while rig.now < began + (i + steps) * TURN and not all(ended(rig, one) for one in range(len(STEPS))):
            rig.turn()
        if not ended(rig, i):
            rig.turn([Abort(i)])
    return {i: (rig.results[i].tokens, end.reason if (end := rig.results[i].end) else None) for i in range(len(STEPS))}


def takes_time(rig: Rig) -> None:
    """Has a step take a turn's time: a rig collects it in the instant in which it was launched."""
    commit = rig.scheduler.commit
    rig.scheduler.commit = lambda result, now: commit(result, now + 0.99 * TURN)  # type: ignore[method-assign]


def ended(rig: Rig, attempt: int) -> bool:
    found = rig.results.get(key_of(attempt, 0))
    return found is not None and found.end is not None


def check(found: dict[int, tuple[list[int], EndReason | None]]) -> None:
    for i, (tokens, reason) in found.items():
        assert reason is EndReason.STOP, i
        assert STEPS[i] / 2 < len(tokens) < STEPS[i], "its time is not used"
        assert set(json.loads(tokenizer().decode(tokens[:-1], skip_special_tokens=False))) >= {"text"}
        assert tokens[-1] == END


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_output_is_complete_before_its_deadline(llama: Path, schedule: str) -> None:
    check(outputs(make_rig(llama, **SCHEDULES[schedule])))


def test_so_are_those_of_a_search(llama: Path) -> None:
    for tokens, reason in outputs(make_rig(llama), Beam(3)).values():
        assert reason is EndReason.STOP
        json.loads(tokenizer().decode(tokens[:-1], skip_special_tokens=False))


def test_a_search_with_time_does_not_end_with_another(llama: Path) -> None:
    """It forks no mask that another request's deadline has bounded, though both have the same constraint."""

    def run(*deadlines: float | None) -> list[list[int]]:
        rig = make_rig(llama)
        takes_time(rig)
        begun = {99: constrained(rig, PROMPTS[0], LONG, 40, SHORT), 98: constrained(rig, PROMPTS[1], LONG, 40, SHORT)}
        rig.run(begun)
        searches = {
            i: replace(constrained(rig, PROMPTS[2], LONG, 90, SHORT, beam=Beam(4)), deadline=deadline)
            for i, deadline in enumerate(deadlines)
        }
        results = rig.run(searches)
        return [results[i].tokens for i in searches]

    (alone,) = run(None)
    first, second, third = run(30 * TURN, None, 30 * TURN)
    assert second == alone
    assert first != alone
    assert third != alone


def test_without_it_they_are_cut_off(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: nobody tells the rows that their time runs out."""

    def nothing(self: ClosingTime, now: float) -> Ints:
        return NO_CLOSING

    monkeypatch.setattr(ClosingTime, "take", nothing)
    with pytest.raises((AssertionError, KeyError)):
        check(outputs(make_rig(llama)))


def test_a_completion_that_no_longer_fits_is_followed_all_the_same(llama: Path) -> None:
    """One that needs more steps than there is time for ends as soon as it can, not at its last token."""
    rig = make_rig(llama)
    ten = {name: {"type": "integer", "minimum": 100000} for name in "abcdefghij"}
    required = Structured.json_schema({"type": "object", "properties": ten, "required": [*ten]})
    short = len(json.dumps(dict.fromkeys(ten, 100000), separators=(",", ":"))) + 1
    takes_time(rig)
    request = constrained(rig, PROMPTS[0], required, MOST, short, temperature=2.0, seed=1)
    result = rig.run({1: replace(request, deadline=20 * TURN)})[1]
    assert result.end is not None
    assert result.end.reason is EndReason.STOP
    values = json.loads(tokenizer().decode(result.tokens[:-1], skip_special_tokens=False))
    assert set(values) >= set(ten)
