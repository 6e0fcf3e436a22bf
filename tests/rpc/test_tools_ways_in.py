"""Every way in makes the same conversation of tools, calls and results that its clients write."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.lines import parse_line
from rpc.client.specs import spec_of
from rpc.frontend.errors import RequestFailed
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.errors import ApiError, of_validation, translated
from rpc.gateway.parameters import chat_spec, names_of
from rpc.gateway.responses_schema import read_responses
from rpc.offline.prompts import read_conversation, read_tools
from rpc.services.convert import spec_from
from scheduler.invalid import InvalidRequest
from scheduler.prompts import Chat
from scheduler.spec import Spec
from scheduler.tools import Tool, ToolCall, ToolChoice, ToolUse

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
OWN: list[dict[str, Any]] = [
    {"name": "one", "description": "One é.", "parameters": SCHEMA, "strict": True},
    {"name": "two"},
]
OPENAIS = [{"type": "function", "function": one} for one in OWN]
TOOLS = (Tool("one", "One é.", json.dumps(SCHEMA, ensure_ascii=False), strict=True), Tool("two"))
CALL = ToolCall("id1", "two", '{"a": 1}')
OWN_CALL = {"id": "id1", "name": "two", "arguments": '{"a": 1}'}
OPENAIS_CALL = {"id": "id1", "type": "function", "function": {"name": "two", "arguments": '{"a": 1}'}}


def turns(call: dict[str, Any], reasoning: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm", "tool_calls": [call], reasoning: "I see"},
        {"role": "tool", "content": "3", "tool_call_id": "id1", "name": "two"},
    ]


def chat_of(spec: Spec) -> Chat:
    assert isinstance(spec.prompt, Chat)
    return spec.prompt


@pytest.mark.parametrize("choice", list(ToolChoice))
@pytest.mark.parametrize("name", ["", "two"])
@pytest.mark.parametrize("parallel", [True, False])
def test_they_agree(choice: ToolChoice, name: str, parallel: bool) -> None:
    if name and choice is not ToolChoice.REQUIRED:
        return
    options = {"tools": OWN, "tool_choice": choice.value, "tool_name": name, "parallel_tool_calls": parallel}
    native = chat_of(spec_from(spec_of(turns(OWN_CALL, "reasoning"), **options)))
    assert native.tool_use == ToolUse(TOOLS, choice, name, parallel)
    assert native.messages[1].tool_calls == (CALL,)
    assert native.messages[1].reasoning == "I see"
    assert (native.messages[2].tool_call_id, native.messages[2].name) == ("id1", "two")
    mapping = OWN_CALL | {"arguments": {"a": 1}}  # as transformers has it
    assert read_conversation(turns(mapping, "reasoning"), {}).prompt.messages[1].tool_calls == (CALL,)
    line = parse_line(0, 1, json.dumps({"messages": turns(OWN_CALL, "reasoning"), **options}).encode())
    assert line.request is not None
    assert chat_of(spec_from(line.request.spec)) == native
    wanted = {"type": "function", "function": {"name": name}} if name else choice.value
    body = {"messages": turns(OPENAIS_CALL, "reasoning_content"), "tools": OPENAIS, "tool_choice": wanted,
            "parallel_tool_calls": parallel}  # fmt: skip
    asked = ChatRequest.model_validate(body)
    assert chat_of(spec_from(chat_spec(asked))) == native
    if parallel:
        for tools, call in ((OWN, OWN_CALL), (OPENAIS, OPENAIS_CALL), (OPENAIS, CALL)):
            read = read_conversation(turns(call, "reasoning"), {}, tool_use=read_tools(tools, choice.value, name))  # type: ignore[arg-type]
            assert read.prompt == native


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "retrieval", "function": {"name": "a"}}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a", "unknown": 1}}]},
        {"tools": OPENAIS, "tool_choice": "sometimes"},
        {"tool_choice": "required"},
        {"tools": OPENAIS * 300},
        {"thinking_token_budget": -2},
        {"reasoning": {"effort": "some"}},
    ],
)
def test_the_gateway_refuses_other_forms(body: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, ApiError)) as refused:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **body})
    error = refused.value if isinstance(refused.value, ApiError) else of_validation(refused.value)  # type: ignore[arg-type]
    assert error.status == 400
    assert error.param


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_that_are_offered(mode: str) -> None:
    names = [one["function"]["name"] for one in OPENAIS]
    named = [{"type": "function", "function": {"name": names[-1]}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": OPENAIS, "tool_choice": choice}
    flat = [{"type": "function", **one["function"]} for one in OPENAIS]
    own = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": names[-1]}]}
    for asked in (
        ChatRequest.model_validate(chat),
        read_responses({"input": "a", "tools": flat, "tool_choice": own}),
    ):
        use = chat_of(spec_from(chat_spec(asked))).tool_use
        assert use is not None
        assert [tool.name for tool in use.tools] == names[-1:]
        assert use.choice is ToolChoice(mode)
        # An error has the position among the client's own tools.
        assert f"tools[{len(names) - 1}]" in str(translated("chat.tools[0].parameters", names_of(asked)))
    named[0]["function"] = {"name": "nobody"}
    with pytest.raises(ApiError, match="'nobody'") as refused:
        ChatRequest.model_validate(chat)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "param", "says"),
    [
        ({"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": []}}, "allowed_tools.mode", "'auto'"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "allowed_tools.tools", "at least"),
        ({"type": "function", "name": "two"}, "function", "Missing"),
        ({"type": "tool"}, "type", "'function'"),
        (3, "", "a valid string"),
    ],
)
def test_a_wrong_choice_is_said(choice: Any, param: str, says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(
            {"messages": [{"role": "user", "content": "a"}], "tools": OPENAIS, "tool_choice": choice}
        )
    error = of_validation(refused.value)
    assert error.param == ".".join(filter(None, ("tool_choice", param)))
    assert says in error.message


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("chat.tools[3].parameters", "tools[3].function.parameters"),
        ("chat.tools[0].name", "tools[0].function.name"),
        ("chat.tools", "tools"),
        ("chat.tool_name", "tool_choice"),
        ("chat.messages[1].tool_calls[2].arguments", "messages[1].tool_calls[2].function.arguments"),
        ("reasoning.max_tokens", "thinking_token_budget"),
    ],
)
def test_fields_have_openais_names(theirs: str, ours: str) -> None:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    assert translated(theirs, names_of(asked)) == ours


@pytest.mark.parametrize(
    ("given", "tokens", "arguments"),
    [
        ({}, None, {}),
        ({"thinking_token_budget": -1}, None, {}),
        ({"thinking_token_budget": 7}, 7, {}),
        ({"reasoning": {"max_tokens": 9}}, 9, {}),
        ({"reasoning": {"enabled": False}}, None, {"enable_thinking": "false", "thinking": "false"}),
        ({"reasoning": {"effort": "high"}}, None,
         {"enable_thinking": "true", "thinking": "true", "reasoning_effort": '"high"'}),
        ({"reasoning_effort": "none"}, None,
         {"enable_thinking": "false", "thinking": "false", "reasoning_effort": '"none"'}),
    ],
)  # fmt: skip
def test_reasoning_of_the_gateway(given: dict[str, Any], tokens: int | None, arguments: dict[str, str]) -> None:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **given})
    spec = chat_spec(asked)
    assert spec_from(spec).reasoning_tokens == tokens
    assert dict(spec.chat.template_arguments) == arguments


def test_wrong_forms_are_errors_at_once() -> None:
    for options in ({"tool_choice": "sometimes"}, {"tools": [{"name": 3}]}, {"tools": [{"title": "a"}]}):
        with pytest.raises((TypeError, ValueError)):
            spec_of([{"role": "user", "content": "a"}], **options)
    with pytest.raises(TypeError):
        spec_of("text", tools=OWN)
    spec = spec_of([{"role": "user", "content": "a"}])
    spec.chat.tool_choice = 9  # type: ignore[assignment]
    with pytest.raises(RequestFailed) as refused:
        spec_from(spec)
    assert refused.value.field == "chat.tool_choice"
    for tools in ([3], [{"description": "a"}], [{"name": "a", "extra": 1}]):
        with pytest.raises(InvalidRequest):
            read_tools(tools, "auto", "")
    with pytest.raises(InvalidRequest):
        read_tools([], "sometimes", "")
    assert pb.TOOL_CHOICE_REQUIRED
