"""Masks that wait for their draws: the draws are those behind masks, and most masks are not computed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from model.structured import grammar_mask
from model.structured.forcing import Forcing
from model.structured.grammar_mask import GrammarMask
from scheduler.structured import Structured
from tests.model.test_closing import OTHERS, SCHEMAS
from tests.model.test_parity import random_prompts
from tests.model.test_structured_output import constrained, llama, run, searches_have_time, tokenizer, valid
from tests.support.engines import make_rig
from tests.support.grammar_backends import BACKENDS
from tests.support.grammar_backends import matcher as matcher_by
from tests.support.grammar_engine import Substrings

__all__ = ["llama", "searches_have_time"]  # fixtures

pytestmark = pytest.mark.sample(3)

VOCABULARY = LLTokenizer(Substrings(2000))  # type: ignore[arg-type] # it has what is asked
FORCING = Forcing(VOCABULARY)
END = VOCABULARY.eos_token
LETTERS = Structured.regex("[ab]{3,30}c[a-z ]{1,20}[0-9]{2,4}")
PROMPTS = random_prompts([5, 9, 3, 11, 7, 4, 8, 6], seed=2)
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 1.0, "logit_bias": ((101, 4.0),)},
    {"temperature": 1.0, "seed": 5, "top_k": 30},
    {"temperature": 1.0, "seed": 6, "top_p": 0.8},
    {"temperature": 1.0, "seed": 7, "min_p": 0.1},
]


def bit(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*SCHEMAS, *OTHERS, "letters"])
@settings(max_examples=4)
@given(st.integers(0, 2**32))
def test_what_is_allowed_is_what_the_mask_has(backend: str, name: str, seed: int) -> None:
    source = random.Random(seed)
    made = SCHEMAS.get(name) or OTHERS.get(name, LETTERS)
    structured = made if isinstance(made, Structured) else Structured.json_schema(made)
    matcher = matcher_by(backend, structured, VOCABULARY)
    mask, waited = GrammarMask(matcher, FORCING, ends=(END,)), 0
    for _ in range(25):
        asked = [END, *source.sample(range(VOCABULARY.vocab_size), 60)]
        waits = mask.can_wait()
        allowed = {token for token in asked if waits and mask.allows(token)}
        bits = mask.mask()
        waited += waits
        assert not waits or allowed == {token for token in asked if bit(bits, token)}
        assert not (waits and mask.is_forced)
        assert not mask.can_wait(), "the mask is known"
        mask.drew(source.choice([token for token in range(VOCABULARY.vocab_size) if bit(bits, token)]))
        if mask.can_only_end:
            break
    assert waited or name != "letters"


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_those_behind_masks(llama: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def outputs() -> object:
        rig = make_rig(llama)
        asked = {
            i: constrained(rig, prompt, **{"backend": backend} | DRAWN[i % len(DRAWN)])
            for i, prompt in enumerate(PROMPTS)
        }
        return run(rig, asked)

    monkeypatch.setattr(GrammarMask, "is_slow", True)
    late = outputs()
    monkeypatch.setattr(Forcing, "is_free", lambda *_: False)
    assert outputs() == late


CUTS: list[dict[str, Any]] = [{}, {"top_k": 20}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.95}]


def computed_part(llama: Path, monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]) -> float:
    """Returns the masks that are computed for each token of texts."""
    computed = list[object]()
    mask = Forcing.mask

    def counted(self: Forcing, matcher: Any) -> Any:
        computed.append(matcher)
        return mask(self, matcher)

    monkeypatch.setattr(Forcing, "mask", counted)
    rig = make_rig(llama)
    text = Structured.regex("[ -~]{60}")
    letters = tuple((token, 30.0) for letter in "cdefgh" for token in tokenizer().encode(letter, False))
    asked = {
        i: constrained(rig, prompt, text, temperature=1.0, seed=i, logit_bias=letters, **cut)
        for i, prompt in enumerate(PROMPTS)
    }
    outputs = run(rig, asked)
    assert min(map(len, outputs.values())) > 30
    return len(computed) / sum(map(len, outputs.values()))


@pytest.mark.parametrize("cut", CUTS)
def test_most_masks_within_a_text_are_not_computed(
    llama: Path, monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]
) -> None:
    monkeypatch.setattr(grammar_mask, "WORTH", 0.0)
    assert computed_part(llama, monkeypatch, cut) < 1 / 4


@pytest.mark.parametrize("cut", CUTS[1:])
def test_masks_that_are_quick_are_computed_where_few_tokens_are_drawn_from(
    llama: Path, monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]
) -> None:
    monkeypatch.setattr(grammar_mask, "WORTH", float("inf"))
    assert computed_part(llama, monkeypatch, cut) > 0.95, "all but those of the first states, which outputs share"


@pytest.mark.parametrize("wrong", [True, False])
def test_harness_catches_a_wrong_answer(llama: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """One that allows all breaks outputs. One that allows nothing costs masks alone."""
    monkeypatch.setattr(GrammarMask, "allows", lambda *_: wrong)
    rig = make_rig(llama)
    results = rig.run({i: constrained(rig, p, temperature=1.5, seed=i) for i, p in enumerate(PROMPTS)})
    if wrong:
        assert any(result.end and result.end.message for result in results.values())
    else:
        assert all(valid(result.tokens) for result in results.values())
