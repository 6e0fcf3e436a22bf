"""Law: a beam search under a constraint finds what the plain definition finds among the outputs that it allows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from model.inputs.grammar_backends import LLGUIDANCE
from model.sampling.processor_rows import ProcessorRows
from model.structured.forcing import Forcing
from model.structured.grammar_mask import GrammarMask
from model.structured.vocabulary import load_vocabulary
from scheduler.events import EndReason
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from scheduler.structured import Structured
from tests.model.test_parity import BOTH, CHUNKED, PIPELINED, random_prompts
from tests.model.test_structured_output import END, PERSON, SCHEMA, constrained, llama, searches_have_time, tokenizer
from tests.support.engines import Rig, key_of, make_rig
from tests.support.grammar_backends import BACKENDS, matcher

__all__ = ["llama", "searches_have_time"]  # fixtures

MOST = 16
PROMPTS = random_prompts([1, 6, 21], seed=8)
CONSTRAINTS = {
    "choice": Structured.choice(["yes", "no", "maybe", "may", "never", "no one"]),
    "regex": Structured.regex("[ab]{2,4}(-[0-9]{1,3})?"),
    "json": Structured.json_schema({"enum": [1, "two", [3], {"four": 5}, None, True]}),
    "longer than the output": Structured.regex("[a-z ]*"),
}
SEARCHES = [(1, 1, 1.0), (3, 2, 0.0), (4, 4, 2.0), (5, 1, -0.5)]
"""Width, results, length penalty."""

Result = tuple[list[int], float]


def allowed_after(
    structured: Structured, vocabulary: LLTokenizer, tokens: list[int], backend: str
) -> NDArray[np.bool_]:
    """Returns which tokens may follow others, by a mask of its own: where a text must follow, its first one alone."""
    mask = GrammarMask(matcher(backend, structured, vocabulary), Forcing(vocabulary), None, (END,))
    for token in tokens:
        mask.drew(token)
    return np.unpackbits(mask.mask().view(np.uint8), bitorder="little") == 1


def plain_search(
    logprobs: Callable[[list[list[int]]], NDArray[np.float32]],
    allowed: Callable[[list[int]], NDArray[np.bool_]],
    prompt: list[int],
    search: tuple[int, int, float],
) -> list[Result]:
    """The definition. It never ends early. Logprobs are the model's own: what is forbidden is left out, no more."""
    width, count, penalty = search
    live: list[Result] = [([], 0.0)]
    finished: list[Result] = []
    for _ in range(MOST):
        rows = [] if not live else logprobs([prompt + tokens for tokens, _ in live])
        every = [
            (total + float(row[token]), [*tokens, token])
            for (tokens, total), row in zip(live, rows, strict=True)
            for token in np.flatnonzero(allowed(tokens)[: len(row)]).tolist()
        ]
        best = sorted(every, key=lambda one: -one[0])[: 2 * width]
        finished += [(tokens, total) for total, tokens in best if tokens[-1] == END]
        live = [(tokens, total) for total, tokens in best if tokens[-1] != END][:width]
    scored = [(tokens, total / len(tokens) ** penalty) for tokens, total in finished + live]
    return sorted(scored, key=lambda one: -one[1])[:count]


@pytest.fixture(scope="module")
def expected(llama: Path) -> Callable[[str, str], dict[int, list[Result]]]:
    """Returns results by attempt: ten times the index of the prompt, and that of the search."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    vocabulary = load_vocabulary(llama, 320, (END,))

    def logprobs(sequences: list[list[int]]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor(sequences)).logits[:, -1], -1).numpy()

    def results(name: str, backend: str) -> dict[int, list[Result]]:
        def allowed(tokens: list[int]) -> NDArray[np.bool_]:
            return allowed_after(CONSTRAINTS[name], vocabulary, tokens, backend)

        return {
            10 * i + j: plain_search(logprobs, allowed, prompt, search)
            for i, prompt in enumerate(PROMPTS)
            for j, search in enumerate(SEARCHES)
        }

    return results


def run(rig: Rig, structured: Structured, backend: str = LLGUIDANCE) -> Rig:
    """All prompts with all searches at once, and beside them sampled sequences with the same constraint."""
    requests = {}
    for i, prompt in enumerate(PROMPTS):
        for j, (width, count, penalty) in enumerate(SEARCHES):
            asked: dict[str, Any] = {"sequence_count": count, "beam": Beam(width, penalty)}
            requests[10 * i + j] = constrained(rig, prompt, structured, MOST, backend=backend, **asked)
        requests[10 * i + 9] = constrained(rig, prompt, structured, MOST, backend=backend, temperature=1.0, seed=3)
    rig.run(requests, limit=5000)
    return rig


def check(rig: Rig, expected: dict[int, list[Result]]) -> None:
    for attempt, results in expected.items():
        found = [rig.results[key_of(attempt, index)] for index in range(len(results))]
        assert [one.tokens for one in found] == [tokens for tokens, _ in results], attempt
        penalty = SEARCHES[attempt % 10][2]
        scores = [sum(one.logprobs) / len(one.tokens) ** penalty for one in found]
        assert scores == pytest.approx([score for _, score in results], abs=1e-3)


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"settings": CHUNKED},
    "pipelined": {"settings": PIPELINED},
    "device draws": {"ahead": True},
    "few rows": {"settings": SchedulerSettings(max_sequences=6, max_batched_tokens=16)},
    "preempted": {"settings": BOTH, "pool_tokens": 44, "page_size": 4},
    "recompute": {"settings": SchedulerSettings(max_sequences=128, recompute=True), "prefix_cache": False},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_search_finds_what_the_definition_finds(
    llama: Path, expected: Callable[[str, str], dict[int, list[Result]]], name: str, schedule: str
) -> None:
    rig = run(make_rig(llama, **SCHEDULES[schedule]), CONSTRAINTS[name])
    check(rig, expected(name, LLGUIDANCE))
    assert rig.preemptions or schedule != "preempted"


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_other_library_finds_the_same(
    llama: Path, expected: Callable[[str, str], dict[int, list[Result]]], backend: str
) -> None:
    check(run(make_rig(llama), CONSTRAINTS["json"], backend), expected("json", backend))


def draws(self: ProcessorRows, row: int, token: int) -> None:
    """A fault: the constraint of a hypothesis takes what its row drew, not what the search goes on with."""


def shared(self: GrammarMask) -> GrammarMask:
    """A fault: a hypothesis shares its constraint's state with the one that it came from."""
    return self


@pytest.mark.parametrize(("owner", "name", "fault"), [(ProcessorRows, "told", draws), (GrammarMask, "copy", shared)])
def test_a_constraint_of_another_hypothesis_is_caught(
    llama: Path, expected: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Any
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        check(run(make_rig(llama), CONSTRAINTS["regex"]), expected("regex", LLGUIDANCE))


@pytest.mark.parametrize("tight", [False, True])
def test_every_hypothesis_is_closed_in_time(llama: Path, tight: bool) -> None:
    """Whatever the longest output is, from the shortest one that keeps the schema on."""
    short = len('{"name":"","age":0,"tags":[]}') + 1
    settings = SchedulerSettings(max_sequences=12, max_batched_tokens=17, prefill_chunk=5) if tight else None
    rig = make_rig(llama, 4, 400 if tight else 4096, settings)
    made = {
        most: constrained(rig, PROMPTS[1], SCHEMA, most, short, sequence_count=3, beam=Beam(4))
        for most in range(short, short + 24, 5)
    }
    results = rig.run(made, limit=9000)
    assert len(results) == 3 * len(made)
    for most in made:
        outputs = [results[key_of(most, index)].tokens for index in range(3)]
        assert len({tuple(one) for one in outputs}) == 3
        for tokens in outputs:
            text = tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False)
            jsonschema.validate(json.loads(text), PERSON)


def test_fewer_outputs_than_are_wanted_are_an_error_that_says_so(llama: Path) -> None:
    rig = make_rig(llama)
    few = constrained(rig, PROMPTS[1], Structured.choice(["a", "b"]), MOST, sequence_count=3, beam=Beam(3))
    beside = constrained(rig, PROMPTS[1], Structured.choice(["a", "b"]), MOST, sequence_count=2, beam=Beam(3))
    results = rig.run({1: few, 2: beside})
    ends = [results[key_of(1, index)].end for index in range(3) if key_of(1, index) in results]
    assert {end.reason for end in ends if end} == {EndReason.STUCK}
    assert {end.message for end in ends if end} == {"the search found 2 outputs, sequence_count is 3"}
    assert {bytes(results[key_of(2, index)].tokens[:1]) for index in range(2)} == {
        bytes(tokenizer().encode(text, add_special_tokens=False)) for text in "ab"
    }


def test_reported_alternatives_are_allowed_ones(llama: Path) -> None:
    """Two of the vocabulary may begin the output; the others have no logprob."""
    rig = make_rig(llama)
    asked = constrained(rig, PROMPTS[1], Structured.regex("[ab]x"), MOST, sequence_count=2, beam=Beam(2))
    allowed = {tokenizer().encode(text, add_special_tokens=False)[0] for text in "ab"}
    first = rig.run({1: asked})
    assert {first[key_of(1, index)].tokens[0] for index in range(2)} == allowed
