"""Reasoning is ended in time, so that the constrained answer or the calls behind it are complete."""

import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from model.inputs import grammar_process
from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_output.grammar_form import OutputForm
from model.inputs.completion import Completions
from model.inputs.grammar_process import WIDE, answer_to, encoded, output_grammar, tokenizer_of
from model.inputs.grammars import FIRST_SPECIAL
from model.structured.closing import Closing
from model.structured.forbidding import apply_masks
from model.structured.forcing import Forcing
from model.structured.grammar_mask import GrammarMask
from scheduler.structured import Structured
from scheduler.tools import NO_TOOLS, Tool, ToolChoice, ToolUse
from tests.support.chats import TOOLED

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = Tool("weather", parameters=json.dumps(SCHEMA), strict=True)
WANTED = {
    "call": (ToolUse((TOOL,), ToolChoice.REQUIRED, parallel=False), None),
    "answer": (NO_TOOLS, Structured.json_schema(SCHEMA)),
}
SPECIAL = {5: "<think>", 6: "</think>", 7: "<tool_call>", 8: "</tool_call>"}
CASES = [("call", True), ("call", False), ("answer", True), ("answer", False)]
BEGUN = "<think>\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that runs out of time finds less, as beside other tests."""
    monkeypatch.setattr(
        grammar_process, "completions_of", lambda special: Completions(tokenizer_of(special), 10.0, WIDE, WIDE)
    )


@cache
def made(wanted: str, special: bool) -> tuple[OutputForm, LLMatcher, str, bool]:
    """The form of an output that begins within reasoning, its matcher, and a short output with whether it is sure."""
    use, structured = WANTED[wanted]
    form = ChatOutput.of(TOOLED, SPECIAL if special else {}).form(use, structured, BEGUN)
    assert form is not None
    assert form.thinks
    answer = answer_to(json.dumps({"kind": "output", "text": form.constraint().text}))
    return form, output_grammar(form)[1], answer["short"], "sure" in answer


def end_of(form: OutputForm) -> list[int]:
    assert form.reasoning is not None
    return encoded(form.reasoning.end.strip(), list(form.ids))


@pytest.mark.parametrize(("wanted", "special"), CASES)
def test_the_shortest_output_has_the_end_of_the_reasoning(wanted: str, special: bool) -> None:
    form, matcher, short, sure = made(wanted, special)
    ids = encoded(short, list(form.ids))
    assert sure
    assert ids[: len(end_of(form))] == end_of(form)
    copy = matcher.deep_copy()
    assert copy.try_consume_tokens(ids) == len(ids)
    assert copy.is_accepting()


@pytest.mark.parametrize(("wanted", "special"), CASES)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**32), st.integers(0, 60))
@example(192, 43620, 1)  # the model is within a character when its completion is first looked for
def test_what_is_behind_the_reasoning_is_complete(wanted: str, special: bool, more: int, seed: int, until: int) -> None:
    """until: tokens behind which the model itself ends the reasoning."""
    form, begun, short, _ = made(wanted, special)
    marks, end = list(form.ids), end_of(form)
    vocabulary = tokenizer_of(len(marks))
    least = len(encoded(short, marks))
    closing, matcher = Closing(Completions(vocabulary, 10.0), least + more, least, end), begun.deep_copy()
    tokens, rng, ending = list[int](), random.Random(seed), list(end)
    while len(tokens) < least + more and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        complete = matcher.is_accepting() or matcher.is_stopped()
        allowed = [t for t in range(vocabulary.vocab_size) if mask >> t & 1 and (complete or t != vocabulary.eos_token)]
        token = rng.choice([t for t in allowed if t != end[-1]] or allowed)
        if len(tokens) >= until and ending and mask >> ending[0] & 1:
            token = ending.pop(0)
        token = closing.settled(matcher, token) if closing.near else token
        closing.drew(matcher, token)
        assert matcher.consume_token(token)
        tokens.append(token)
    assert matcher.is_accepting() or matcher.is_stopped()
    text = "".join(
        marks[t - FIRST_SPECIAL] if t >= FIRST_SPECIAL else chr(t) for t in tokens if t != vocabulary.eos_token
    )
    assert form.reasoning is not None
    answer = text.partition(form.reasoning.end.strip())[2]
    value = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    jsonschema.validate(value["arguments"] if wanted == "call" else value, SCHEMA)


@pytest.mark.parametrize(("wanted", "special"), CASES)
def test_an_output_cannot_end_within_its_reasoning(wanted: str, special: bool) -> None:
    """The library's own mask has the end token there, and fails when it is drawn."""
    form, begun, short, _ = made(wanted, special)
    vocabulary = tokenizer_of(len(form.ids))
    end, output = vocabulary.eos_token, encoded(short, list(form.ids))
    for text in ([], [*b"so"], [*b"so", 0xC3], output, output[:-1]):
        matcher = begun.deep_copy()
        assert matcher.try_consume_tokens(text) == len(text)
        logits = torch.zeros((1, vocabulary.vocab_size))
        mask = GrammarMask(matcher, Forcing(vocabulary), ends=[end])
        apply_masks(logits, np.zeros(1, np.int64), [mask])
        assert (logits[0, end] > -torch.inf) == (text == output)
        assert (logits > -torch.inf).any()
