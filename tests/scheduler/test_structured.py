"""Constraints on an output: how they are made, and what goes with them."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Stopping
from scheduler.resolve import check_structured, resolve
from scheduler.settings import RequestLimits
from scheduler.spec import Spec
from scheduler.structured import Structured

LIMITS = Limits(320, 256, 4096, 8, RequestLimits(structured_output_bytes=100), structured_output=True)
ENDS = ModelDefaults(eos_token_ids=(0,))


class Model(BaseModel):
    name: str


@dataclass
class Data:
    name: str


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}'])
def test_a_schema_is_an_object_or_json(schema: Any) -> None:
    assert Structured.json_schema(schema) == Structured("json_schema", '{"type": "object"}')


@pytest.mark.parametrize("kind", [Model, Data])
def test_a_class_gives_its_schema(kind: type) -> None:
    schema = json.loads(Structured.json_schema(kind).text)
    assert (schema["properties"]["name"]["type"], schema["required"]) == ("string", ["name"])


def test_a_class_without_a_schema_is_named() -> None:
    with pytest.raises(TypeError, match="LLM has no JSON schema"):
        Structured.json_schema(type("LLM", (), {}))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Structured("xml", "a"), "structured_output"),
        (lambda: Structured.regex(""), "structured_output.regex"),
        (lambda: Structured.regex("\ud800"), "structured_output.regex"),
        (lambda: Structured.grammar(""), "structured_output.grammar"),
        (lambda: Structured.choice([]), "structured_output.choice"),
        (lambda: Structured.choice("yes"), "structured_output.choice"),
        (lambda: Structured.choice(["a", ""]), "structured_output.choice[1]"),
        (lambda: Structured.choice(["a", 3]), "structured_output.choice[1]"),
        (lambda: Structured.json_schema({"a": float("nan")}), "structured_output.json_schema"),
        (lambda: Structured.json_schema({"a": object()}), "structured_output.json_schema"),
    ],
)
def test_what_is_no_constraint_is_refused(make: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.field == field


def check(structured: Structured, limits: Limits = LIMITS, **beside: Any) -> None:
    check_structured(Spec("a", structured=structured, **beside), structured, limits)


@pytest.mark.parametrize(
    ("beside", "field"),
    [
        ({"stopping": Stopping(ignore_eos=True)}, "stopping.ignore_eos"),
        ({"limits": Limits(320, 256, 4096, 8)}, "structured_output.regex"),
    ],
)
def test_what_would_end_the_output_elsewhere_and_an_engine_without_it_are_refused(beside: Any, field: str) -> None:
    check(Structured.regex("a"), stopping=Stopping(stop=("a",), stop_token_ids=(5,)))
    with pytest.raises(InvalidRequest) as refused:
        check(Structured.regex("a"), **beside)
    assert refused.value.field == field


def test_its_size_is_bounded() -> None:
    check(Structured.regex("é" * 50))
    with pytest.raises(InvalidRequest, match=r"structured_output.regex is '102 bytes': at most 100 bytes"):
        check(Structured.regex("é" * 51))


def test_an_engine_gets_the_grammar_its_stop_tokens_and_whom_it_is_shared_with() -> None:
    stopping = Stopping(stop_token_ids=(7, 5))
    spec = Spec((1,), structured=Structured.regex("a"), tenant="t", cache_salt="s", stopping=stopping)
    params = resolve(spec, [1], LIMITS, ENDS, 0, grammar="G").controls.logits_params
    assert (params.grammar, params.grammar_salt, params.grammar_stops) == ("G", "t/s", (7, 5))
    params = resolve(Spec((1,), tenant="t", stopping=stopping), [1], LIMITS, ENDS, 0).controls.logits_params
    assert (params.grammar, params.grammar_salt, params.grammar_stops) == ("", "", ())
