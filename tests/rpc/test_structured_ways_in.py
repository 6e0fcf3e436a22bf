"""Every way in makes the same constraint of what its clients write, and names what is wrong in their words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.lines import parse_line
from rpc.cli.structured import StructuredOptions
from rpc.client.specs import spec_of
from rpc.frontend.errors import RequestFailed
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.errors import ApiError, of_validation, translated
from rpc.gateway.parameters import chat_spec, completion_spec, names_of
from rpc.gateway.responses_schema import read_responses
from rpc.services.convert import spec_from
from rpc.services.inference.asking import renamed
from rpc.services.inference.parameters import read_parameters
from scheduler.invalid import InvalidRequest
from scheduler.structured import Structured

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TAGS = {
    "type": "structural_tag", "structures": [{"begin": "<f=é>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="],
}  # fmt: skip
WANTED = {
    "json_schema": Structured.json_schema(SCHEMA),
    "json_object": Structured.json_object(),
    "regex": Structured.regex("a+"),
    "choice": Structured.choice(["yes", "é"]),
    "grammar": Structured.grammar('start: "a"'),
    "structural_tag": Structured.structural_tag(TAGS),
}
GIVEN: dict[str, Any] = {
    "json_schema": SCHEMA, "json_object": True, "regex": "a+", "choice": ["yes", "é"], "grammar": 'start: "a"',
    "structural_tag": TAGS,
}  # fmt: skip
VLLMS = {"json_schema": "json"}


def native(kind: str, given: Any) -> Structured | None:
    return spec_from(spec_of("x", structured_output={kind: given})).structured


def batch_line(kind: str, given: Any) -> Structured | None:
    line = parse_line(0, 1, json.dumps({"prompt": "x", "structured_output": {kind: given}}).encode(), Path())
    if line.failure is not None:
        raise line.failure
    assert line.request is not None
    return spec_from(line.request.spec).structured


def vllms(kind: str, given: Any) -> Structured | None:
    asked = CompletionRequest.model_validate({"prompt": "x", "structured_outputs": {VLLMS.get(kind, kind): given}})
    return spec_from(completion_spec(asked, "x")).structured


def open_inference(kind: str, given: Any) -> Structured | None:
    return read_parameters({"structured_outputs": {VLLMS.get(kind, kind): given}}).structured


def open_inference_text(kind: str, given: Any) -> Structured | None:
    return read_parameters({"structured_outputs": json.dumps({VLLMS.get(kind, kind): given})}).structured


@pytest.mark.parametrize("kind", WANTED)
@pytest.mark.parametrize("way", [native, batch_line, vllms, open_inference, open_inference_text])
def test_they_agree(way: Callable[[str, Any], Structured | None], kind: str) -> None:
    assert way(kind, GIVEN[kind]) == WANTED[kind]


@pytest.mark.parametrize("way", [native, batch_line, vllms, open_inference])
def test_a_schema_and_tags_may_be_json_too(way: Callable[[str, Any], Structured | None]) -> None:
    assert way("json_schema", WANTED["json_schema"].text) == WANTED["json_schema"]
    assert way("structural_tag", WANTED["structural_tag"].text) == WANTED["structural_tag"]


def test_the_command_line(tmp_path: Path) -> None:
    schema, grammar, tags = (tmp_path / name for name in ("schema.json", "grammar.lark", "tags.json"))
    tags.write_text(WANTED["structural_tag"].text, encoding="utf-8")
    schema.write_text(WANTED["json_schema"].text, encoding="utf-8")
    grammar.write_text('start: "a"')
    for kind, options in {
        "json_schema": StructuredOptions(json_schema=schema), "json_object": StructuredOptions(json_object=True),
        "regex": StructuredOptions(regex="a+"), "choice": StructuredOptions(choice=["yes", "é"]),
        "grammar": StructuredOptions(grammar=grammar), "structural_tag": StructuredOptions(structural_tag=tags),
    }.items():  # fmt: skip
        assert spec_from(spec_of("x", structured_output=options.option())).structured == WANTED[kind]
    assert StructuredOptions().option() is None
    with pytest.raises(ValueError, match="one constraint at most: --regex, --choice"):
        StructuredOptions(regex="a", choice=["b"]).option()


def chat(response_format: object, **more: object) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format} | more
    return ChatRequest.model_validate(body)


@pytest.mark.parametrize("strict", [{"strict": True}, {"strict": False}, {"strict": None}, {}])
def test_openais_response_format(strict: dict[str, Any]) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": SCHEMA} | strict}
    assert spec_from(chat_spec(chat(named))).structured == WANTED["json_schema"]
    assert spec_from(chat_spec(chat({"type": "json_object"}))).structured == WANTED["json_object"]
    for free in ({"type": "text"}, None):
        assert spec_from(chat_spec(chat(free))).structured is None
    asked = chat({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}})
    assert names_of(asked)["structured_output.json_schema"] == "response_format"


def test_vllms_structural_tags_in_response_format() -> None:
    older = {"structures": TAGS["structures"], "triggers": TAGS["triggers"]}
    made = spec_from(chat_spec(chat({"type": "structural_tag", **older}))).structured
    assert made is not None
    assert made.tags == WANTED["structural_tag"].tags
    content = {"type": "regex", "pattern": "a+"}
    newer = {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<a>", "content": content, "end": "</a>"}]}
    asked = chat({"type": "structural_tag", "format": newer})
    made = spec_from(chat_spec(asked)).structured
    assert made == Structured.structural_tag({"format": newer})
    assert translated("structured_output.structural_tag.format.tags[0].end", names_of(asked)) == (
        "response_format.format.tags[0].end"
    )


def test_text_format_of_responses() -> None:
    content = {"type": "regex", "pattern": "a+"}
    newer = {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<a>", "content": content, "end": "</a>"}]}
    for given, wanted in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, WANTED["json_object"]),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, WANTED["json_schema"]),
        ({"type": "structural_tag", "format": newer}, Structured.structural_tag({"format": newer})),
    ):
        asked = read_responses({"input": "x", "text": {"format": given}})
        assert spec_from(chat_spec(asked)).structured == wanted
    older = {"structures": TAGS["structures"], "triggers": TAGS["triggers"]}
    made = spec_from(
        chat_spec(read_responses({"input": "x", "text": {"format": {"type": "structural_tag", **older}}}))
    ).structured
    assert made is not None
    assert made.tags == WANTED["structural_tag"].tags
    assert translated("structured_output.structural_tag.format.tags[0].end", names_of(asked)) == (
        "text.format.format.tags[0].end"
    )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": 3}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}", "regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "tags": []}}, "response_format"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"lark": "start: 'a'"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_the_gateway_names_what_is_wrong(more: dict[str, Any], param: str) -> None:
    from pydantic import ValidationError

    try:
        chat(more.pop("response_format", None), **more)
    except ApiError as error:
        found = error
    except ValidationError as error:
        found = of_validation(error)
    else:
        raise AssertionError("it is taken")
    assert (found.status, (found.param or "").split(".")[0]) == (400, param)


@pytest.mark.parametrize(
    "value",
    [{}, {"regex": "a", "grammar": "b"}, {"lark": "a"}, {"regex": 3}, {"choice": "yes"}, {"choice": [1]}, "a", 3],
)
def test_a_client_and_a_line_name_what_is_wrong(value: Any) -> None:
    with pytest.raises(TypeError, match="structured_output"):
        spec_of("x", structured_output=value)
    line = parse_line(0, 1, json.dumps({"prompt": "x", "structured_output": value}).encode(), Path())
    assert line.failure is not None
    assert line.failure.field == "structured_output"


def test_tags_are_named_in_each_way_in() -> None:
    wrong = TAGS | {"structures": [{"begin": "<f=", "schema": {}, "end": ""}]}
    with pytest.raises(RequestFailed) as plain:
        native("structural_tag", wrong)
    assert plain.value.field == "structured_output.structural_tag.structures[0].end"
    with pytest.raises(InvalidRequest) as refused:
        open_inference("structural_tag", wrong)
    assert refused.value.field == "structured_outputs.structural_tag.structures[0].end"
    field = "structured_output.structural_tag.structures[0].schema"
    failure = renamed(RequestFailed("INVALID_ARGUMENT", "INVALID_VALUE", f"{field} is 3: no", field=field))
    assert failure.field == "structured_outputs.structural_tag.structures[0].schema"
    assert str(failure).startswith(failure.field)


@pytest.mark.parametrize(
    "value", [{"lark": "a"}, {"regex": 3}, {"json_object": 1}, {"structural_tag": 3}, {"regex": "a", "json": "{}"}, [1]]
)
def test_open_inference_names_what_is_wrong(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_parameters({"structured_outputs": value})
    assert refused.value.field == "structured_outputs"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.StructuredOutput(), "structured_output"),
        (pb.StructuredOutput(json_object=False), "structured_output.json_object"),
        (pb.StructuredOutput(choice=pb.TextChoice()), "structured_output.choice"),
        (pb.StructuredOutput(regex=""), "structured_output.regex"),
        (pb.StructuredOutput(structural_tag=""), "structured_output.structural_tag"),
    ],
)
def test_an_empty_constraint_is_none(message: pb.StructuredOutput, field: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        spec_from(pb.GenerationSpec(text="x", structured_output=message))
    assert refused.value.field == field
