"""Stop tokens beside a constraint: they end an output where it is complete, and stand nowhere else."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import RequestFault
from model.inputs.grammar_backends import LLGUIDANCE
from model.structured.forcing import Forcing
from model.structured.grammar_mask import GrammarMask
from model.structured.next_tokens import NextTokens
from scheduler.events import EndReason, Submit
from scheduler.parameters import Beam
from scheduler.structured import Structured
from tests.model.test_closing import OTHERS, SCHEMAS
from tests.model.test_structured_output import (
    END,
    PERSON,
    PROMPTS,
    SCHEMA,
    TIGHT,
    constrained,
    llama,
    searches_have_time,
    shortest,
    tokenizer,
)
from tests.support.engines import make_rig
from tests.support.grammar_backends import BACKENDS
from tests.support.grammar_backends import matcher as matcher_by
from tests.support.planted import plant

__all__ = ["llama", "searches_have_time"]  # fixtures

pytestmark = pytest.mark.sample(3)

STOP, OTHER = 300, 301  # ids that no token of text has
VOCABULARY = tokenizer().vocabulary(320, (END,))
FORCING = Forcing(VOCABULARY)
WORDS = OTHERS | {"letters": Structured.regex("[ab]{3,9}[a-z]*")}
WANTED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "stop_token_ids": (STOP,), "logit_bias": ((STOP, 100.0),)}


def bit(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token >> 5] >> (token & 31) & 1)


def walk(backend: str, name: str, seed: int) -> None:
    """Checks the masks along some output."""
    source = random.Random(seed)
    structured = WORDS[name] if name in WORDS else Structured.json_schema(SCHEMAS[name])
    matcher = matcher_by(backend, structured, VOCABULARY)
    mask, plain = (GrammarMask(matcher.deep_copy(), FORCING, ends=(END,), stops=stops) for stops in ((STOP, END), ()))
    for _ in range(40):
        waits, allowed = mask.can_wait(), mask.allows(STOP)
        bits, without = mask.mask(), plain.mask()
        assert bit(bits, STOP) == (bit(bits, END) and not mask.is_forced)
        assert not waits or allowed == bit(bits, STOP)
        assert mask.is_forced == plain.is_forced
        others = bits.copy()
        others[STOP >> 5] &= ~np.int32(1 << (STOP & 31))
        assert (others == without).all()
        if bit(bits, STOP):
            ended = mask.copy()
            assert ended is not None
            ended.drew(STOP)
            assert ended.can_only_end
            ended.mask()  # as a step in flight asks for
        token = source.choice([token for token in range(OTHER) if bit(without, token)])
        for one in (mask, plain):
            one.drew(token)
        if mask.can_only_end:
            break


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*SCHEMAS, *WORDS])
@settings(max_examples=4)
@given(st.integers(0, 2**32))
def test_they_are_allowed_where_the_end_token_is(backend: str, name: str, seed: int) -> None:
    walk(backend, name, seed)


def ended(results: Any, stops: tuple[int, ...] = (STOP,)) -> list[list[int]]:
    """Returns outputs without their last tokens: each is complete, and an end token or a stop token ends it."""
    made = list[list[int]]()
    for result in results.values():
        assert result.end is not None
        assert result.end.reason is EndReason.STOP
        *tokens, last = result.tokens
        assert last in (END, *stops)
        assert not {END, *stops} & {*tokens}
        jsonschema.validate(json.loads(tokenizer().decode(tokens, skip_special_tokens=False)), PERSON)
        made.append(tokens)
    return made


@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_schedule_gives_the_same_output(llama: Path, ahead: bool, backend: str) -> None:
    drawing = WANTED | {"backend": backend}
    asked = [
        lambda rig: {i: constrained(rig, prompt, **drawing) for i, prompt in enumerate(PROMPTS)},
        lambda rig: {0: constrained(rig, PROMPTS[0], **drawing | {"top_k": 5, "min_tokens": 30})},
    ]
    for make in asked:
        outputs = list[Any]()
        for rig in (make_rig(llama, ahead=ahead), make_rig(llama, 4, 220, TIGHT, ahead=ahead)):
            results = rig.run(make(rig))
            ended(results)
            outputs.append({key: result.tokens for key, result in results.items()})
        assert outputs[0] == outputs[1]


def test_they_end_an_output_as_soon_as_it_is_complete(llama: Path) -> None:
    rig, word = make_rig(llama), Structured.regex("[ab]{3,40}")
    results = rig.run({
        0: constrained(rig, PROMPTS[0], word, **WANTED),
        1: constrained(rig, PROMPTS[0], word, **WANTED | {"temperature": 0.0}),
        2: constrained(rig, PROMPTS[0], word, **WANTED | {"min_tokens": 9}),
        3: constrained(rig, PROMPTS[0], word, temperature=1.0, seed=5, logit_bias=((STOP, 100.0), (END, -100.0))),
        4: constrained(rig, PROMPTS[0], word, **WANTED | {"stop_token_ids": (OTHER, STOP)}),
    })  # fmt: skip
    assert [results[i].tokens[-1] for i in range(5)] == [STOP, STOP, STOP, END, STOP]
    texts = [tokenizer().decode(results[i].tokens[:-1], skip_special_tokens=False) for i in range(5)]
    assert all(len(texts[i]) in (3, 4, 5) for i in (0, 1, 4)), texts
    assert len(results[2].tokens) == 10
    assert len(texts[3]) == 40, "a token that the request does not name is none"


@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
def test_it_is_closed_in_time(llama: Path, ahead: bool) -> None:
    rig, short = make_rig(llama, ahead=ahead), shortest(LLGUIDANCE)
    made = {m: constrained(rig, PROMPTS[m % 6], SCHEMA, m, short, **WANTED) for m in range(short, short + 20)}
    for most, result in rig.run(made).items():
        assert result.end is not None
        assert result.end.reason in (EndReason.STOP, EndReason.LENGTH)
        assert len(result.tokens) <= most
        tokens = [token for token in result.tokens if token not in (END, STOP)]
        assert len(tokens) >= len(result.tokens) - 1
        jsonschema.validate(json.loads(tokenizer().decode(tokens, skip_special_tokens=False)), PERSON)


def test_it_goes_on_from_every_token(llama: Path) -> None:
    rig = make_rig(llama)
    request = constrained(rig, PROMPTS[0], **WANTED)
    whole = rig.run({0: request})
    (output,) = ended(whole)
    other = make_rig(llama, prefix_cache=False)
    for known in range(0, len(output) + 1, 5):
        results = other.play({0: [Submit(known, request, emitted=(tuple(output[:known]),))]})
        assert results[known].tokens == whole[0].tokens


def test_a_search_may_end_with_them(llama: Path) -> None:
    rig = make_rig(llama)
    words = Structured.regex("[ab]{3}")
    results = rig.run({0: constrained(rig, PROMPTS[0], words, beam=Beam(4), sequence_count=4, stop_token_ids=(STOP,))})
    assert all(result.tokens[-1] in (STOP, END) for result in results.values())


def as_text(_: Callable[..., Any]) -> Callable[..., Any]:
    """A stop token is none that the grammar ends with."""
    return lambda self, token: token


def anywhere(_: Callable[..., Any]) -> Callable[..., Any]:
    """A stop token may stand anywhere."""

    def put(_: GrammarMask, found: NextTokens) -> Any:
        mask = found.mask.copy()
        mask[STOP >> 5] |= np.int32(1 << (STOP & 31))
        return mask

    return put


@pytest.mark.parametrize(("name", "fault"), [("_as_end", as_text), ("_with_stops", anywhere)])
def test_the_laws_catch_stop_tokens_that_are_taken_otherwise(
    name: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, GrammarMask, name, fault)
    with pytest.raises((AssertionError, RequestFault)):
        walk(LLGUIDANCE, "letters", 1)
