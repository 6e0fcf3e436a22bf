"""Constrained outputs of a simulated engine: complete in any schedule, and on another engine from any token on."""

import json
import re
from collections.abc import Iterator

import pytest

from model.settings import ModelSettings
from model.simulated.distribution import END, VOCABULARY
from model.simulated.grammars import open_grammars
from model.structured.grammar_store import GrammarStore
from rpc.frontend.prepare import Preparer, load_preparer
from scheduler.limits import Limits
from scheduler.parameters import Sampling, Stopping
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from scheduler.spec import Spec
from scheduler.structured import Structured
from tests.model.simulated.engine import run

LIMITS = Limits(VOCABULARY, 4096, 65536, 8, structured_output=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarStore]:
    store = open_grammars()
    assert store is not None
    yield store
    store.close()


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    loaded = load_preparer(ModelSettings("sim:llama-3.1-8b-h100"))
    yield loaded
    loaded.close()


def requests(preparer: Preparer) -> list[Request]:
    """Six of a schema, one of them greedy, and one of a pattern."""
    schema, pattern = Structured.json_schema(SCHEMA), Structured.regex("[ab]{3,9}")
    stopping = Stopping(max_tokens=80)
    asked = [(schema, seed) for seed in range(6)] + [(pattern, 1)]
    return [
        preparer.prepare(
            Spec("Who?", sampling=Sampling(seed=seed, temperature=float(seed > 0)), stopping=stopping, structured=one),
            LIMITS,
        )
        for one, seed in asked
    ]


def text_of(preparer: Preparer, tokens: list[int]) -> str:
    return preparer.tokenizer.decode([token for token in tokens if token != END], skip_special_tokens=True)


@pytest.mark.parametrize("mean", [0.0, 20.0, 500.0])
def test_constrained_outputs_are_complete(preparer: Preparer, grammars: GrammarStore, mean: float) -> None:
    found = run(requests(preparer), mean=mean, grammars=grammars)
    texts = [text_of(preparer, found.tokens[i, 0]) for i in range(7)]
    for text in texts[:6]:
        value = json.loads(text)
        assert set(value) == set(SCHEMA["required"])
        assert all(isinstance(size, int) for size in value["sizes"])
    assert re.fullmatch("[ab]{3,9}", texts[6])


def test_they_do_not_depend_on_the_schedule_nor_on_the_engine(preparer: Preparer, grammars: GrammarStore) -> None:
    asked = requests(preparer)
    settings = SchedulerSettings(64, 3, steps_in_flight=1)
    first, second = run(asked, grammars=grammars), run(asked, settings, pages=20, grammars=grammars)
    assert first.tokens == second.tokens
    begun = [first.tokens[i, 0][: 5 + 3 * i] for i in range(6)]
    again = run(asked[:6], emitted=begun, grammars=grammars)
    assert [again.tokens[i, 0] for i in range(6)] == [first.tokens[i, 0][5 + 3 * i :] for i in range(6)]
