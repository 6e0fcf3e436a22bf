"""OpenAI's Responses API through a real gateway, with OpenAI's own client: text, calls, reasoning, structure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, Field

from tests.support.chats import TOOLED
from tests.support.checkpoints import write_llama
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import running_server

MODEL = "tiny"
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PLACE, "strict": True}]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Rain?", "temperature": 1.0, "extra_body": {"seed": 3}}
CALLING = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
THINKING = {"seed": 4, "chat_template_kwargs": {"enable_thinking": True}, "reasoning": {"max_tokens": 5}}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    directory: Path = write_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(TOOLED)
    flags = ("--model", str(directory), "--served-model-name", MODEL, "--kv-cache-memory", "64MiB")
    with running_server(*flags) as server, running_gateway([server.address]) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[list[Any], Response]:
    """Events and the last response. The client's own accumulation must agree with it."""
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    if last.status == "completed":  # the client's accumulation takes no other end
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        assert without_ids(last.to_dict()["output"]) == without_ids(final.to_dict()["output"])
    return events, last


def without_ids(items: Any) -> Any:
    kept = ("type", "role", "status", "name", "arguments", "call_id")
    return [
        {name: item[name] for name in kept if name in item}
        | {"texts": [part["text"] for part in item.get("content") or ()]}
        for item in items
    ]


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 20, "instructions": "Be brief.", "metadata": {"a": "b"}}
    whole = client.responses.create(**asked)
    assert whole.object == "response"
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 20
    if whole.status == "incomplete":
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.instructions, whole.metadata, whole.store if hasattr(whole, "store") else False) == (
        "Be brief.", {"a": "b"}, False,
    )  # fmt: skip
    events, last = streamed(client, asked)
    assert last.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    whole = client.responses.create(**CALLING)
    (call,) = whole.output
    assert (call.type, whole.status) == ("function_call", "completed")
    jsonschema.validate(json.loads(call.arguments), PLACE)
    events, last = streamed(client, CALLING)
    assert without_ids(last.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments
    turns = [
        {"role": "user", "content": "Rain?"}, *whole.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "3 mm"},
    ]  # fmt: skip
    again = client.responses.create(
        **{**CALLING, "input": turns, "tool_choice": {"type": "function", "name": "weather"}}
    )
    assert again.output[0].call_id != call.call_id
    assert again.tool_choice.name == "weather"


def test_reasoning_is_an_item_and_goes_back_in(client: openai.OpenAI) -> None:
    body = {"seed": 4, "chat_template_kwargs": {"enable_thinking": True}}
    asked = {**CALLING, "extra_body": {**body, "reasoning": {"max_tokens": 5}}}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "function_call"]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens >= 5
    _, last = streamed(client, asked)
    assert without_ids(last.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    result = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "3 mm"}
    turns = [{"role": "user", "content": "Rain?"}, *whole.output, result]
    assert client.responses.create(**{**asked, "input": turns}).status == "completed"


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(text_format=Person, max_output_tokens=400, **ASKED)
    assert isinstance(answer.output_parsed, Person)


def test_structural_tags_are_kept(client: openai.OpenAI) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "boolean"}}
    form = {
        "type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "stop_after_first": True,
        "tags": [{"begin": "<f>", "content": content, "end": "</f>"}],
    }  # fmt: skip
    asked = {"text": {"format": {"type": "structural_tag", "format": form}}, "max_output_tokens": 400}
    answer = client.responses.create(**{**ASKED, **asked})
    assert answer.output_text in ("<f>true</f>", "<f>false</f>")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "structural_tag"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tools": [{**TOOLS[0], "parameters": {"not": {}}}]}, "tools[0].parameters"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 5000}]}, "input"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
            "input[0].output[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "weather", "arguments": "[]"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "triggers": ["<f"]}}}, "text.format"),
        (
            {"text": {"format": {"type": "structural_tag", "structures": [], "triggers": ["<f"]}}},
            "text.format.structures",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format"),
        ({"extra_body": {"reasoning": {"max_tokens": 2**31}}}, "reasoning.max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**ASKED, **more})
    assert refused.value.param == param
