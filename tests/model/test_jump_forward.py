"""Forced tokens: what they are, and that putting them in without draws changes no bit."""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.inputs.grammars import UNFORCED, grammar_of, limits
from model.structured import grammar_mask
from model.structured.forcing import AHEAD, Forcing
from model.structured.grammar_mask import GrammarMask
from scheduler.settings import SchedulerSettings
from scheduler.structured import Structured
from tests.model.test_grammars import TOKENS
from tests.model.test_structured_output import DRAWN, PROMPTS, TIGHT, constrained, llama, run, valid
from tests.support.engines import make_rig
from tests.support.grammar_backends import BACKENDS
from tests.support.grammar_backends import matcher as matcher_by
from tests.support.sentence_pieces import SETTINGS, load

__all__ = ["llama"]  # a fixture

pytestmark = pytest.mark.sample(3)

ROOMY = SchedulerSettings(max_batched_tokens=512, max_sequences=128)
NAMES = ["name", "age", "tags", "a_long_name_of_a_property", "naïve", "x", "name of it"]
TEXTS = [
    '{"name": "Ann", "age": 3, "tags": ["a", "bb"]}', '{"a_long_name_of_a_property": "text and more text"}',
    '"name of it": "x",', '{"naïve": 12.5, "x": null}', "red green blue red green", "the end of the text",
] * 4  # fmt: skip


def byte_pairs(size: int) -> LLTokenizer:
    """A small vocabulary of JSON, with pieces that cross the ends of names."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>", "<call>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[0])


PAIRS = {size: byte_pairs(size) for size in (258, 290, 360)}
FORCING = {size: Forcing(vocabulary) for size, vocabulary in PAIRS.items()}


@st.composite
def constraints(draw: st.DrawFn) -> Structured:
    kind = draw(st.sampled_from(["schema", "choice", "regex", "lark"]))
    if kind == "schema":
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        values = st.sampled_from(
            [{"type": "integer"}, {"enum": ["red", "green"]}, {"const": "the end"}, {"type": "string", "maxLength": 5}]
        )
        properties = {name: draw(values) for name in names}
        return Structured.json_schema(
            {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        )
    if kind == "choice":
        return Structured.choice(draw(st.lists(st.sampled_from([*TEXTS[:6], "red", "rest"]), min_size=1, unique=True)))
    if kind == "regex":
        return Structured.regex(draw(st.sampled_from(["(red|green) text", "name of it: [0-9]{2}", "x?name"])))
    return Structured.grammar('start: "the " ("end"|"text")')


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80)
@given(constraints(), st.sampled_from(sorted(PAIRS)), st.integers(0, 2**32))
def test_what_is_forced_is_the_only_text(backend: str, structured: Structured, size: int, seed: int) -> None:
    """No other text can follow, the tokenizer writes it so, and it depends on the state alone."""
    vocabulary, forcing, rng = PAIRS[size], FORCING[size], random.Random(seed)
    matcher = matcher_by(backend, structured, vocabulary)
    for _ in range(60):
        bits = forcing.mask(matcher)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        forced = forcing.tokens(matcher, bits, 8, time.thread_time() + 60)
        assert forced[:1] == forcing.tokens(matcher, bits, 1, time.thread_time() + 60)
        if forced:
            text = vocabulary.decode_bytes(forced)
            others = [vocabulary.decode_bytes([token]) for token in allowed]
            assert all(text.startswith(other) or other.startswith(text) for other in others)
            behind = matcher.deep_copy()
            assert behind.consume_token(forced[0])
            further = forcing.tokens(behind, forcing.mask(behind), 7, time.thread_time() + 60)
            assert further[: len(forced) - 1] == forced[1:]
            alone = forcing.alone(forced[0])
            assert (alone & bits).tolist() == alone.tolist()
        token = forced[0] if forced else rng.choice(allowed)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            break


def test_a_special_token_may_be_forced() -> None:
    """As the marks of a tool call are, which a request's own grammar may not have."""
    vocabulary, forcing = PAIRS[360], FORCING[360]
    grammar = f'start: <call> "name" <call>\n{UNFORCED}'
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits())
    mask = GrammarMask(matcher, forcing, ends=[0])
    assert vocabulary.decode_str(mask.jump()) == "<call>name<call><end>"


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_are_spelt_as_the_tokenizer_does(backend: str) -> None:
    structured = Structured.json_schema(
        {"properties": {NAMES[3]: {"const": "red"}}, "required": [NAMES[3]], "additionalProperties": False}
    )
    vocabulary, forcing = PAIRS[360], FORCING[360]
    matcher = matcher_by(backend, structured, vocabulary)
    assert matcher.consume_tokens(vocabulary.tokenize_str('{"'))
    forced = forcing.tokens(matcher, forcing.mask(matcher), 64, time.thread_time() + 60)
    name = vocabulary.tokenize_str(NAMES[3])
    assert len(forced) >= len(name) - 1  # the last may be one with the quote behind it
    assert forced[: len(name) - 1] == name[:-1]


def test_a_text_without_an_end_is_looked_at_as_far_as_is_needed() -> None:
    """The library itself follows it for ever."""
    structured = Structured.grammar('start: /a+/ "ab"')
    matcher = LLMatcher(TOKENS, grammar_of(structured.kind, structured.text), log_level=0, limits=limits())
    forcing = Forcing(TOKENS)
    assert forcing.tokens(matcher, forcing.mask(matcher), 3, time.thread_time() + 60) == 3 * TOKENS.tokenize_str("a")
    with pytest.raises(TimeoutError):
        forcing.tokens(matcher, forcing.mask(matcher), AHEAD, 0.0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [600, 1000])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokenizers_that_see_the_beginning_of_a_text_force_no_other(
    tmp_path: Path, name: str, width: int, backend: str
) -> None:
    """As those of SentencePiece, which put a space before a text."""
    vocabulary = load(tmp_path, name).vocabulary(width, [2])
    forcing = Forcing(vocabulary)
    for text in ("the end", "end", " the"):
        structured = Structured.choice([text])
        matcher = matcher_by(backend, structured, vocabulary)
        while not matcher.is_stopped():
            bits = forcing.mask(matcher)
            forced = forcing.tokens(matcher, bits, 5, time.thread_time() + 60)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            assert matcher.consume_token(forced[0] if forced else allowed[-1])


@pytest.mark.parametrize("drawing", DRAWN)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_and_off_give_the_same_bits(
    llama: Path, drawing: dict[str, Any], depth: int, ahead: bool, backend: str
) -> None:
    drawing = drawing | {"backend": backend}
    outputs, logits, steps, scores = [], [], [], []
    for on in (False, True):
        chosen = replace(ROOMY, jump_forward=on, steps_in_flight=depth)
        rig = make_rig(llama, settings=chosen, record_logits=True, ahead=ahead)
        outputs.append(run(rig, {i: constrained(rig, prompt, **drawing) for i, prompt in enumerate(PROMPTS)}))
        logits.append({attempt: rig.logits_of(attempt) for attempt in range(len(PROMPTS))})
        scores.append([rig.results[attempt].logprobs for attempt in range(len(PROMPTS))])
        steps.append(rig.scheduler.stats())
    assert outputs[0] == outputs[1]
    assert all(map(valid, outputs[1].values()))
    assert steps[0].jump_forward_tokens == 0
    assert steps[1].jump_forward_tokens > 20
    assert steps[1].steps < steps[0].steps
    for without, some in zip(logits[0].values(), logits[1].values(), strict=True):
        assert {position: without[position] for position in some} == some
    assert scores[0] == scores[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [{}, {"recompute": True, "max_batched_tokens": 2048}], ids=str)
@pytest.mark.parametrize("drawing", DRAWN)
def test_nor_does_preemption_or_recompute_matter(llama: Path, drawing: dict[str, Any], change: dict[str, Any]) -> None:
    rig = make_rig(llama)
    roomy = run(rig, {i: constrained(rig, prompt, **drawing) for i, prompt in enumerate(PROMPTS)})
    tight = make_rig(llama, 4, 220, replace(TIGHT, **change), prefix_cache="recompute" not in change)
    assert run(tight, {i: constrained(tight, prompt, **drawing) for i, prompt in enumerate(PROMPTS)}) == roomy
    assert tight.scheduler.stats().jump_forward_tokens


def test_rows_whose_logprobs_are_told_draw_all_tokens(llama: Path) -> None:
    rig = make_rig(llama)
    plain = run(rig, {0: constrained(rig, PROMPTS[0], temperature=1.0, seed=1)})[0]
    before = rig.scheduler.stats().jump_forward_tokens
    request = constrained(rig, PROMPTS[0], temperature=1.0, seed=1)
    told = replace(request, controls=replace(request.controls, top_logprobs=2))
    assert before > 0
    assert run(rig, {1: told})[1] == plain
    assert rig.scheduler.stats().jump_forward_tokens == before
    assert all(logprob < 0 for logprob in rig.results[1].logprobs)


def test_rows_with_min_tokens_draw_all_tokens(llama: Path) -> None:
    """A token that may not be drawn yet might be the only one. Then nothing is left, whatever the schedule."""
    ends = []
    for on in (False, True):
        rig = make_rig(llama, settings=replace(ROOMY, jump_forward=on))
        request = constrained(rig, PROMPTS[0], Structured.choice(["the end is near"]), min_tokens=10)
        stop = TOKENS.tokenize_str("n")[-1]
        params = replace(request.controls.logits_params, not_yet=(stop, *request.controls.logits_params.not_yet))
        request = replace(
            request, stop_ids=(stop, *request.stop_ids), controls=replace(request.controls, logits_params=params)
        )
        result = rig.run({0: request})[0]
        assert result.end is not None
        ends.append((result.end.reason, result.tokens))
    assert ends[0] == ends[1]


def test_looking_ahead_costs_no_request_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is not found in time is drawn. Masks take 1 ms here, and 33 are needed to know a forced token."""
    clock, real = [0.0], Forcing.mask

    def mask(forcing: Forcing, matcher: LLMatcher) -> Any:
        clock[0] += 0.001
        return real(forcing, matcher)

    monkeypatch.setattr(grammar_mask.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(Forcing, "mask", mask)
    text = "the common beginning of all texts " * 8
    matcher = LLMatcher(TOKENS, grammar_of("regex", text), log_level=0, limits=limits())
    constraint, output = GrammarMask(matcher, Forcing(TOKENS), ends=[0]), list[int]()
    while 0 not in output:
        tokens = constraint.jump()
        assert tokens
        before = clock[0]
        for token in tokens:
            constraint.drew(token)
        output += tokens
        assert clock[0] - before < 0.05
    assert TOKENS.decode_str(output) == text + "<|end|>"
