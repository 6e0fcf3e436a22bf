"""Structural tags as clients write them: both forms give the same tags, and what is not supported is named."""

import json
from typing import Any

import pytest

from scheduler.invalid import InvalidRequest
from scheduler.structural_tags import MOST_TAGS, MOST_TRIGGERS, Tag, read_tags
from scheduler.structured import Structured

SCHEMA = {"type": "object"}
TAG = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}
NEWER = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
OLDER_FORM = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f="]}
NEWER_FORM = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [NEWER]}}
PATH = "structured_output.structural_tag"


def older(tag: Any = TAG, **more: Any) -> dict[str, Any]:
    return OLDER_FORM | {"structures": [tag]} | more


def newer(tag: Any = NEWER, **more: Any) -> dict[str, Any]:
    return {"format": NEWER_FORM["format"] | {"tags": [tag]} | more}  # type: ignore[operator]


def content(**content: Any) -> dict[str, Any]:
    return newer(NEWER | {"content": content})


def test_both_forms_give_the_same_tags() -> None:
    text = json.dumps(SCHEMA)
    wanted = Tag("<f=a>", "</f>", "json_schema", text, f"{PATH}.structures[0]", "schema", "<f=")
    assert wanted.field == f"{PATH}.structures[0].schema"
    assert read_tags(json.dumps(OLDER_FORM), PATH).tags == (wanted,)
    (found,) = read_tags(json.dumps(NEWER_FORM), PATH).tags
    assert (found.begin, found.end, found.text, found.trigger) == ("<f=a>", "</f>", text, "<f=")
    assert found.field == f"{PATH}.format.tags[0].content.json_schema"


@pytest.mark.parametrize("form", [OLDER_FORM, NEWER_FORM])
def test_they_are_an_object_or_json(form: Any) -> None:
    assert Structured.structural_tag(form) == Structured.structural_tag(json.dumps(form))
    assert Structured.structural_tag({key: form[key] for key in form if key != "type"}).tags


def test_a_schema_may_be_json_too_and_neutral_values_say_nothing() -> None:
    plain = {"type": "json_schema", "json_schema": json.dumps(SCHEMA), "style": "json", "any_order": False}
    tags = Structured.structural_tag(content(**plain) | {"type": "structural_tag"}).tags
    assert tags == Structured.structural_tag(NEWER_FORM).tags
    assert Structured.structural_tag(newer(excludes=[])).tags == tags
    flags = Structured.structural_tag(newer(at_least_one=True, stop_after_first=True)).tags
    assert (flags.at_least_one, flags.stop_after_first) == (True, True)


def test_of_triggers_that_begin_alike_the_shorter_counts() -> None:
    tags = [TAG, TAG | {"begin": "<form>"}]
    made = Structured.structural_tag(older(structures=tags, triggers=["<f=", "<f", "<f"])).tags
    assert [tag.trigger for tag in made.tags] == ["<f", "<f"]


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        ("{", "", "is no JSON"),
        ("[]", "", "must be a JSON object"),
        ('{"a":' * 9999, "", "is nested too deeply"),
        ('{"format":' * 300 + "1" + "}" * 300, ".format.type", "is not supported"),
        (r'{"triggers": ["\ud800"]}', "", "lone surrogate"),
        ({}, ".structures", "must be a list of at least one"),
        (older(type="json"), ".type", "must be structural_tag"),
        (older(format={}), ".structures", "is not supported: type, format are"),
        (older(structures=[]), ".structures", "at least one"),
        (older(structures={}), ".structures", "at least one"),
        (older(structures=[TAG | {"begin": f"<f={i}>"} for i in range(MOST_TAGS + 1)]), ".structures", "at most 256"),
        (older("<f>"), ".structures[0]", "must be a JSON object"),
        (older(TAG | {"x": 1}), ".structures[0].x", "is not supported: begin, schema, end are"),
        (older(TAG | {"begin": ""}), ".structures[0].begin", "must be a text, and not empty"),
        (older(TAG | {"begin": 3}), ".structures[0].begin", "must be a text, and not empty"),
        (older(TAG | {"begin": "<g>"}), ".triggers[0]", "begins no tag"),
        (older(structures=[TAG, TAG | {"begin": "<g>"}]), ".structures[1].begin", "starts with none of the triggers"),
        (older(TAG | {"end": ""}), ".structures[0].end", "must be a text, and not empty"),
        (older(TAG | {"end": ["a", "b"]}), ".structures[0].end", "must be a text"),
        (older(TAG | {"schema": None}), ".structures[0].schema", "must be a JSON schema"),
        (older(TAG | {"schema": True}), ".structures[0].schema", "true means {}"),
        (older(structures=[TAG, TAG | {"schema": {}}]), ".structures[1].begin", "the begin of structures[0]"),
        (older(structures=[TAG | {"begin": "<f=a>b"}, TAG]), ".structures[0].begin", "the begin of structures[1]"),
        (older(triggers=[]), ".triggers", "at least one"),
        (older(triggers="<f="), ".triggers", "at least one"),
        (older(triggers=["<f=", ""]), ".triggers[1]", "must be a text, and not empty"),
        (older(triggers=["<f="] * (MOST_TRIGGERS + 1)), ".triggers", "at most 64"),
        (older(triggers=["<f=", "<g="]), ".triggers[1]", "begins no tag"),
        (
            older(structures=[TAG, TAG | {"begin": "=a"}], triggers=["<f=", "="]),
            ".triggers[0]",
            "has the trigger '=' within it",
        ),
        ({"format": None}, ".format", "must be a JSON object"),
        ({"format": {"type": "tag"}}, ".format.type", "is not supported: triggered_tags is"),
        ({"format": {"type": "tags_with_separator"}}, ".format.type", "is not supported: triggered_tags is"),
        (newer(excludes=["x"]), ".format.excludes", "is not supported but []"),
        (newer(at_least_one=1), ".format.at_least_one", "must be true or false"),
        (newer(NEWER | {"end": ["</f>"]}), ".format.tags[0].end", "must be a text"),
        (newer(NEWER | {"begin": {"type": "token", "token": 3}}), ".format.tags[0].begin", "must be a text"),
        (newer(NEWER | {"content": "a"}), ".format.tags[0].content", "must be a JSON object"),
        (content(type="sequence"), ".format.tags[0].content.type", "json_schema, regex, grammar, any_text are"),
        (content(type=["regex"]), ".format.tags[0].content.type", "is not supported"),
        (content(type="regex", pattern=""), ".format.tags[0].content.pattern", "not empty"),
        (content(type="regex", pattern="a", excludes=["b"]), ".format.tags[0].content.excludes", "but []"),
        (content(type="any_text", excludes=["b"]), ".format.tags[0].content.excludes", "but []"),
        (content(type="grammar"), ".format.tags[0].content.grammar", "must be a text"),
        (
            content(type="json_schema", json_schema={}, style="qwen_xml"),
            ".format.tags[0].content.style",
            "is not supported but 'json'",
        ),
        (content(type="json_schema", json_schema={}, any_order=True), ".format.tags[0].content.any_order", "but False"),
    ],
)
def test_what_is_not_supported_is_named(value: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Structured.structural_tag(value)
    assert refused.value.field == PATH + field
    assert says in str(refused.value)
    assert len(str(refused.value)) < 800
