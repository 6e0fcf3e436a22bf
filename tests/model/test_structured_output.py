"""A constraint holds in the engine, whatever the schedule, and changes nothing for others."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models
from torch import Tensor

from model.errors import CheckpointError
from model.inputs.completion import Completions
from model.inputs.grammar_backends import LLGUIDANCE, XGRAMMAR
from model.inputs.tokenizer import Tokenizer
from model.sampling import processor_rows
from model.structured import grammar_store
from model.structured.vocabulary import load_vocabulary
from scheduler.events import EndReason, Submit
from scheduler.limits import ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.request import Request
from scheduler.resolve import resolve
from scheduler.settings import SchedulerSettings
from scheduler.spec import Spec
from scheduler.structured import Structured
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import byte_tokenizer, write_llama
from tests.support.engines import Rig, make_request, make_rig
from tests.support.grammar_backends import BACKENDS
from tests.support.grammar_backends import grammar as grammar_by
from tests.support.grammar_backends import matcher as matcher_by
from tests.support.tagged_text import Tagged

END, MOST = 0, 200
PROMPTS = random_prompts([5, 20, 3, 11, 9, 14], seed=4)
TIGHT = SchedulerSettings(max_sequences=6, max_batched_tokens=11, prefill_chunk=5)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = Structured.json_schema(PERSON)
DRAWN = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 2.0, "top_k": 40, "seed": 6}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


@pytest.fixture(autouse=True)
def searches_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a completion that runs out of time finds more or less, by the machine; so do hypotheses together."""
    monkeypatch.setattr(grammar_store, "SECONDS", 10.0)
    monkeypatch.setattr(processor_rows, "SLOW", 10.0)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def constrained(
    rig: Rig,
    prompt: list[int],
    structured: Structured = SCHEMA,
    max_tokens: int = MOST,
    short: int | None = None,
    backend: str = LLGUIDANCE,
    **sampling: Any,
) -> Request:
    stopping = Stopping(max_tokens, sampling.pop("min_tokens", 0), stop_token_ids=sampling.pop("stop_token_ids", ()))
    spec = Spec(
        tuple(prompt), sampling=Sampling(**({"temperature": 0.0} | sampling)), output=Output(),
        stopping=stopping, structured=structured,
    )  # fmt: skip
    grammar = grammar_by(backend, structured)
    defaults = ModelDefaults(eos_token_ids=rig.loaded.config.eos_token_ids)
    return resolve(spec, prompt, rig.loaded.limits, defaults, minted_seed=0, grammar=grammar, short=short)


def run(rig: Rig, requests: Mapping[int, Request]) -> dict[Any, list[int]]:
    """Returns tokens by sequence, each of which has ended with the end token."""
    results = rig.run(requests)
    assert {result.end.reason for result in results.values() if result.end} == {EndReason.STOP}
    return {key: result.tokens for key, result in results.items()}


def text(tokens: list[int]) -> str:
    assert tokens[-1] == END
    return tokenizer().decode(tokens[:-1], skip_special_tokens=False)


def valid(tokens: list[int]) -> bool:
    jsonschema.validate(json.loads(text(tokens)), PERSON)
    return True


@pytest.mark.sample(2)
@pytest.mark.parametrize("drawing", DRAWN)
@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_schedule_gives_the_same_valid_output(
    llama: Path, drawing: dict[str, Any], ahead: bool, backend: str
) -> None:
    """Prompts in chunks, preemption and recompute; a preempted sequence waits for its grammar again."""
    drawing = drawing | {"backend": backend}
    rig = make_rig(llama, ahead=ahead)
    roomy = run(rig, {i: constrained(rig, prompt, **drawing) for i, prompt in enumerate(PROMPTS)})
    assert all(valid(tokens) for tokens in roomy.values())
    tight = make_rig(llama, 4, 220, TIGHT, ahead=ahead)
    assert run(tight, {i: constrained(tight, prompt, **drawing) for i, prompt in enumerate(PROMPTS)}) == roomy
    # XGrammar compiles for longer: requests may become ready one by one, so that each has room.
    assert tight.preemptions or backend == XGRAMMAR
    again = make_rig(llama, settings=SchedulerSettings(max_batched_tokens=2048, recompute=True), prefix_cache=False)
    assert run(again, {i: constrained(again, prompt, **drawing) for i, prompt in enumerate(PROMPTS)}) == roomy


@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
def test_structural_tags_are_kept_and_closed_in_any_schedule(llama: Path, ahead: bool) -> None:
    tags = Tagged(("<f",), (("<f>", PERSON, "</f>"), ("<fx>", None, "!")), at_least_one=True)
    structured, short = Structured.structural_tag(tags.newer()), len('<f>{"name":"","age":0,"tags":[]}</f>')
    made = list[dict[Any, list[int]]]()
    for rig in (make_rig(llama, ahead=ahead), make_rig(llama, 4, 220, TIGHT, ahead=ahead)):
        asked = {i: constrained(rig, p, structured, 40 + 9 * i, short, **DRAWN[1]) for i, p in enumerate(PROMPTS)}
        results = rig.run(asked)
        assert {result.end.reason for result in results.values() if result.end} <= {EndReason.STOP, EndReason.LENGTH}
        made.append({key: result.tokens for key, result in results.items()})
    assert made[0] == made[1]
    for tokens in made[0].values():
        assert tags.read(tokenizer().decode([t for t in tokens if t != END], skip_special_tokens=False))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_same_output(llama: Path, ranks: int) -> None:
    one, several = make_rig(llama, backend="reference"), make_rig(llama, backend="reference", ranks=ranks)
    tokens = [run(rig, {0: constrained(rig, PROMPTS[0], temperature=1.0, seed=1)})[0] for rig in (one, several)]
    assert all(map(valid, tokens))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_others_do_not_see_it(llama: Path, backend: str) -> None:
    """Neither rows without a constraint nor rows with another one, to the bit."""
    rig = make_rig(llama)
    choice = Structured.choice(["yes", "no", "maybe"])
    alone = [
        make_rig(llama).run({0: make(rig)})[0].tokens
        for make in (
            lambda r: make_request(r, PROMPTS[1], 40),
            lambda r: constrained(r, PROMPTS[2], choice, backend=backend),
        )
    ]
    results = rig.run({
        0: make_request(rig, PROMPTS[1], 40), 1: constrained(rig, PROMPTS[0], backend=backend),
        2: constrained(rig, PROMPTS[2], choice, backend=backend),
    })  # fmt: skip
    assert [results[0].tokens, results[2].tokens] == alone
    assert valid(results[1].tokens)
    assert text(results[2].tokens) in ("yes", "no", "maybe")


def test_every_sequence_of_a_prompt_keeps_it(llama: Path) -> None:
    rig = make_rig(llama)
    results = run(rig, {0: constrained(rig, PROMPTS[0], temperature=1.5, seed=3, sequence_count=4)})
    assert len(results) == 4
    assert all(map(valid, results.values()))
    assert len({tuple(tokens) for tokens in results.values()}) == 4


@pytest.mark.parametrize(
    "beside",
    [
        {"repetition_penalty": 1.9, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": tuple((token, 100.0) for token in range(1, 60))},
        {"logit_bias": ((END, -100.0),)},
        {"top_k": 1, "top_p": 0.01, "min_p": 1.0, "temperature": 1.0},
        {"min_tokens": MOST},
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_controls_choose_among_what_it_allows(llama: Path, beside: dict[str, Any], backend: str) -> None:
    """A control against the end token yields: an output to which nothing can be added ends."""
    rig = make_rig(llama)
    assert valid(run(rig, {0: constrained(rig, PROMPTS[0], backend=backend, **beside)})[0])


def test_a_users_processor_cannot_break_it(llama: Path) -> None:
    rig = make_rig(llama, factories=[lambda prompt: Shifting()])
    assert valid(run(rig, {0: constrained(rig, PROMPTS[0])})[0])


class Shifting:
    """Forbids nothing, and makes all that was forbidden likely."""

    def drew(self, token: int) -> None:
        pass

    def apply(self, logits: Tensor, position: int) -> Tensor:
        return logits.nan_to_num(neginf=100.0) * -1


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_goes_on_from_every_token(llama: Path, backend: str) -> None:
    """As after the loss of an engine: another one gets the output so far."""
    rig = make_rig(llama)
    request = constrained(rig, PROMPTS[0], temperature=1.0, seed=9, backend=backend)
    whole = run(rig, {0: request})[0]
    other = make_rig(llama, prefix_cache=False)
    for known in range(0, len(whole), 4):
        results = other.play({0: [Submit(known, request, emitted=(tuple(whole[:known]),))]})
        assert results[known].tokens == whole


@cache
def shortest(backend: str) -> int:
    vocabulary = tokenizer().vocabulary(320, (END,))
    path = Completions(vocabulary, 10.0).find(matcher_by(backend, SCHEMA, vocabulary))
    assert path is not None
    return len(path)


@pytest.mark.sample(8)
@pytest.mark.parametrize("drawing", DRAWN)
@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_closed_in_time_at_every_number_of_tokens(
    llama: Path, drawing: dict[str, Any], ahead: bool, batched: bool, backend: str
) -> None:
    rig, short = make_rig(llama, ahead=ahead), shortest(backend)
    drawing = drawing | {"backend": backend}
    made = {m: constrained(rig, PROMPTS[m % 6], SCHEMA, m, short, **drawing) for m in range(short, short + 40)}
    results = rig.run(made) if batched else {most: rig.run({most: request})[most] for most, request in made.items()}
    other = make_rig(llama, ahead=ahead, prefix_cache=False)
    for most, result in results.items():
        assert result.end is not None
        assert len(result.tokens) <= most
        assert result.end.reason in (EndReason.STOP, EndReason.LENGTH)
        tokens = [token for token in result.tokens if token != END]
        jsonschema.validate(json.loads(tokenizer().decode(tokens, skip_special_tokens=False)), PERSON)
        known = result.tokens[: len(result.tokens) * 2 // 3]
        again = other.play({0: [Submit(most, made[most], emitted=(tuple(known),))]})
        assert again[most].tokens == result.tokens, "as on another engine"


def test_output_that_cannot_be_its_beginning_ends_the_request_alone(llama: Path) -> None:
    rig, plain = make_rig(llama), make_rig(llama)
    other = make_request(rig, PROMPTS[1], 9)
    results = rig.play({0: [Submit(0, constrained(rig, PROMPTS[0]), emitted=((44, 44),)), Submit(1, other)]})
    assert results[0].end is not None
    assert results[0].end.reason is EndReason.FAULT
    assert "structured_output cannot be kept: token 44 of the output cannot follow" in results[0].end.message
    assert results[1].tokens == plain.run({1: other})[1].tokens


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(llama: Path) -> None:
    """A frontend refuses it; this engine gets it nevertheless."""
    rig, plain = make_rig(llama), make_rig(llama)
    request, other = constrained(rig, PROMPTS[0]), make_request(rig, PROMPTS[1], 9)
    params = replace(request.controls.logits_params, grammar="start: nothing_of_this_name")
    broken = replace(request, controls=replace(request.controls, logits_params=params))
    results = rig.run({0: broken, 1: other})
    assert results[0].end is not None
    assert results[0].end.reason is EndReason.FAULT
    assert "structured_output cannot be compiled: " in results[0].end.message
    assert results[1].tokens == plain.run({1: other})[1].tokens


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
    Library(models.WordPiece({"a": 0, "##b": 1})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="its tokenizer is of a kind that structured output does not read"):
        load_vocabulary(tmp_path, 2, (0,))


def test_ids_beyond_the_tokenizer_are_never_drawn(tmp_path: Path) -> None:
    """Logits may be wider than the vocabulary: padding."""
    padded = write_llama(tmp_path, vocab_size=384)
    rig = make_rig(padded)
    assert re.fullmatch("[ab]{40}", text(run(rig, {0: constrained(rig, [1], Structured.regex("[ab]{40}"))})[0]))
