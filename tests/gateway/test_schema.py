"""Requests that are refused before any server is asked, and the words of the refusals."""

from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import FunctionTool, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import ValidationError

from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.errors import ApiError, of_validation
from rpc.gateway.parameters import chat_spec, completion_spec
from rpc.gateway.responses_schema import read_responses
from rpc.gateway.schema import CommonRequest
from rpc.services.convert import spec_from

PROMPT = {"prompt": "A"}
IMAGE = {"type": "input_image"}
CHAT = {"messages": [{"role": "user", "content": "A"}]}


def refusal(schema: type[CommonRequest], asked: dict[str, Any]) -> ApiError:
    try:
        raise AssertionError(f"accepted: {schema.model_validate(asked)}")
    except ValidationError as error:
        return of_validation(error)
    except ApiError as error:
        return error


@pytest.mark.parametrize(
    ("asked", "param", "code", "says"),
    [
        ({"foo": 1}, "foo", "unknown_parameter", "Unknown parameter: 'foo'."),
        (
            {"temperature": "hot"},
            "temperature",
            "invalid_value",
            "temperature is 'hot': Input should be a valid number",
        ),
        ({"temperature": float("nan")}, "temperature", "invalid_value", "finite"),
        ({"n": True}, "n", "invalid_value", "n is true"),
        ({"n": 1.5}, "n", "invalid_value", "integer"),
        ({"max_tokens": 2**32}, "max_tokens", "invalid_value", "less than or equal to 4294967295"),
        ({"max_tokens": 10**80}, "max_tokens", "invalid_value", "a huge number"),
        ({"seed": 2**64}, "seed", "invalid_value", "less than"),
        ({"stop": ["a", 1]}, "stop[1]", "invalid_value", "stop[1] is 1"),
        ({"stop": {}}, "stop", "invalid_value", "list"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "keys must be token ids"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "invalid_value", "values must be numbers"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_value", "object"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value", "at least 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None, "goes with stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "Unknown"),
        ({"length_penalty": 1.5}, "length_penalty", None, "use_beam_search"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value", "greater than or equal to -1"),
        ({"truncation_side": "middle"}, "truncation_side", "unsupported_value", "'left', 'right'"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None, "not available with stream"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value", "greater than or equal to 0"),
        ({"stream_interval": 0}, "stream_interval", "invalid_value", "greater than or equal to 1"),
        ({"request_id": "a b"}, "request_id", "invalid_value", "pattern"),
        ({"guided_json": {}}, "guided_json", "unknown_parameter", "Unknown parameter: 'guided_json'."),
        ({f"k{i}": 1 for i in range(300)}, None, "invalid_value", "too many keys"),
    ],
)
def test_of_both_endpoints(asked: dict[str, Any], param: str | None, code: str | None, says: str) -> None:
    for schema, rest in ((CompletionRequest, PROMPT), (ChatRequest, CHAT)):
        error = refusal(schema, rest | asked)
        assert (error.status, error.param, error.code) == (400, param, code)
        assert says in error.message


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"prompt": None}, "prompt", "must be text, token ids"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ["a", 1]}, "prompt", "part 1"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": [[1], [-1]]}, "prompt", "part 1"),
        ({"prompt": [1.0]}, "prompt", "part 0"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [[1], []]}, "prompt", "part 1 has no tokens"),
        (PROMPT | {"suffix": "x"}, "suffix", "suffix is not supported"),
        (PROMPT | {"best_of": 3}, "best_of", "best_of is not supported unless it is n"),
        (PROMPT | {"logprobs": True}, "logprobs", "integer"),
        (PROMPT | {"messages": []}, "messages", "Unknown"),
        ({}, "prompt", "Missing required parameter: 'prompt'."),
    ],
)
def test_of_completions(asked: dict[str, Any], param: str, says: str) -> None:
    error = refusal(CompletionRequest, asked)
    assert (error.status, error.param) == (400, param)
    assert says in error.message


UNSUPPORTED = {
    "functions": [{}], "function_call": {"name": "f"},
    "audio": {}, "modalities": ["text", "audio"], "store": True,
    "web_search_options": {}, "moderation": {"model": "m"}, "echo": True, "add_special_tokens": True,
    "documents": [{"text": "a"}], "chat_template": "{{ x }}", "media_io_kwargs": {"a": {}},
    "mm_processor_kwargs": {"a": 1},
}  # fmt: skip
UNSUPPORTED_IN_BOTH = {
    "logprob_token_ids": [1],
    "repetition_detection": {}, "watermarking": True, "return_weight_versions": True,
    "routed_experts_prompt_start": 1, "return_prompt_text": True, "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "store": True,
}  # fmt: skip
HINTS = {
    "user": "me", "safety_identifier": "a", "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "a",
    "prompt_cache_retention": "24h", "prompt_cache_options": {},
    "prediction": {"type": "content", "content": "a"}, "verbosity": "low",
    "session_id": "a", "spaces_between_special_tokens": False, "return_token_offsets": True, "mm_payload": "none",
    "return_mm_kwargs": False,
}  # fmt: skip
VLLMS_DEFAULTS = {
    "store": False, "length_penalty": 1.0, "logprob_token_ids": [], "thinking_token_budget": -1, "watermarking": False,
    "structured_outputs": None, "routed_experts_prompt_start": 0, "vllm_xargs": {}, "use_beam_search": False,
    "stop": [], "stop_token_ids": [], "bad_words": [], "min_tokens": 0, "ignore_eos": False, "top_k": 0, "priority": 0,
    "spaces_between_special_tokens": True, "return_token_ids": None, "prompt_logprobs": None,
}  # fmt: skip
NEUTRAL = {
    "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": False,
    "parallel_tool_calls": True, "functions": None, "audio": None, "top_logprobs": 0, "echo": False,
    "add_special_tokens": False, "documents": [], "media_io_kwargs": {},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named(name: str) -> None:
    error = refusal(ChatRequest, CHAT | {name: UNSUPPORTED[name]})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize("name", UNSUPPORTED_IN_BOTH)
def test_what_neither_endpoint_has_is_named(name: str) -> None:
    for schema, rest in ((CompletionRequest, PROMPT), (ChatRequest, CHAT)):
        error = refusal(schema, rest | {name: UNSUPPORTED_IN_BOTH[name]})
        assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


def test_completions_have_no_reasoning() -> None:
    error = refusal(CompletionRequest, PROMPT | {"thinking_token_budget": 5})
    assert (error.status, error.param, error.code) == (400, "thinking_token_budget", "unsupported_parameter")


@pytest.mark.parametrize("hints", [HINTS, VLLMS_DEFAULTS, dict.fromkeys(HINTS), dict.fromkeys(UNSUPPORTED_IN_BOTH)])
def test_hints_and_defaults_change_nothing(hints: dict[str, Any]) -> None:
    plain = CompletionRequest.model_validate(PROMPT)
    hinted = CompletionRequest.model_validate(PROMPT | hints)
    expected, made = (spec_from(completion_spec(one, "A")) for one in (plain, hinted))
    if "top_k" in hints:  # unset is the model's own
        expected = replace(expected, sampling=replace(expected.sampling, top_k=0))
    assert made == expected
    message = {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]}
    sent_back = {"provider_specific_fields": {"refusal": None}}
    named = message | {"name": "bob", "cache_control": {"type": "ephemeral"}} | sent_back
    chats = ({"messages": [message]}, {"messages": [named]} | hints)
    expected, made = (spec_from(chat_spec(ChatRequest.model_validate(one))) for one in chats)
    if "top_k" in hints:
        expected = replace(expected, sampling=replace(expected.sampling, top_k=0))
    assert made == expected


def test_the_detail_of_an_image_is_a_hint() -> None:
    url = "data:image/png;base64,aGVsbG8="
    images = ({"url": url}, {"url": url, "detail": "high", "uuid": "a"})
    made = [
        chat_spec(
            ChatRequest.model_validate(
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": i}]}]}
            )
        )
        for i in images
    ]
    assert made[0] == made[1]


def test_what_asks_for_nothing_is_taken() -> None:
    asked = ChatRequest.model_validate(CHAT | NEUTRAL | dict.fromkeys(UNSUPPORTED.keys() - NEUTRAL.keys()))
    assert asked.sequences == 1
    said = {"role": "assistant", "content": "B", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    ChatRequest.model_validate({"messages": [*CHAT["messages"], said]})
    for silent in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        spec = chat_spec(ChatRequest.model_validate({"messages": [*CHAT["messages"], silent]}))
        assert (spec.chat.messages[1].role, len(spec.chat.messages[1].parts)) == ("assistant", 0)
    CompletionRequest.model_validate(PROMPT | {"suffix": "", "best_of": 2, "n": 2, "echo": None})


def test_what_openais_helpers_have_parsed_comes_back_beside_its_text() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    said = {"role": "assistant", "content": '{"a": 1}', "tool_calls": [{"id": "1", "function": function}]}
    call = {"id": "1", "function": function | {"parsed_arguments": {"a": 1}}}
    chats = ([*CHAT["messages"], said], [*CHAT["messages"], said | {"parsed": {"a": 1}, "tool_calls": [call]}])
    plain, parsed = (chat_spec(ChatRequest.model_validate({"messages": messages})) for messages in chats)
    assert parsed == plain
    text = {"type": "output_text", "text": '{"a": 1}'}
    item = {"type": "function_call", "call_id": "1"} | function
    inputs = (
        [{"role": "assistant", "content": [text]}, item],
        [{"role": "assistant", "content": [text | {"parsed": {"a": 1}}]}, item | {"parsed_arguments": {"a": 1}}],
    )
    plain, parsed = (chat_spec(read_responses({"input": one})) for one in inputs)
    assert parsed == plain


@pytest.mark.parametrize("field", [{"metadata": {"a": 1e999}}, {"user": 1e999}], ids=lambda field: next(iter(field)))
def test_what_a_response_echoes_is_text(field: dict[str, Any]) -> None:
    """JSON has no infinity, so that the answer would be none."""
    with pytest.raises(ValidationError, match=next(iter(field))):
        read_responses({"input": "hi", **field})


def test_a_bad_image_of_a_response_is_named_as_the_client_wrote_it() -> None:
    items = [{"role": "user", "content": "hi"}, {"role": "user", "content": [IMAGE | {"image_url": "http://x/a.png"}]}]
    with pytest.raises(ValidationError) as refused:
        read_responses({"input": items})
    error = of_validation(refused.value)
    assert (error.param, error.code) == ("input[1].content[0].image_url", "invalid_value")
    assert "must be a data URL" in error.message
    good = [{"role": "user", "content": [IMAGE | {"image_url": "data:image/png;base64,QUJD"}]}]
    assert list(chat_spec(read_responses({"input": good})).chat.messages[0].parts[0].image.data) == list(b"ABC")


def test_instructions_are_one_turn_with_the_systems_first_ones() -> None:
    """Templates refuse a second turn of the system."""
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "Now in French."},
    ]
    asked = chat_spec(read_responses({"instructions": "Be brief.", "input": items}))
    turns = [(turn.role, turn.parts[0].text) for turn in asked.chat.messages]
    assert turns == [
        ("system", "Be brief.\n\nUse tools.\n\nBe kind."),
        ("user", "hi"),
        ("developer", "Now in French."),
    ]
    assert [turn.role for turn in chat_spec(read_responses({"input": items})).chat.messages][:2] == [
        "developer",
        "system",
    ]
    (alone, _) = chat_spec(read_responses({"instructions": "Be brief.", "input": "hi"})).chat.messages
    assert (alone.role, alone.parts[0].text) == ("system", "Be brief.")


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        (None, "messages[0].content", "must be text or a list of parts"),
        (5, "messages[0].content", "list"),
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content[0].type", "not supported"),
        ([{"type": "text"}], "messages[0].content[0]", "must have text"),
        ([{"type": "text", "text": "a"}, {"type": "text", "image_url": {"url": "data:image/png;base64,"}}],
         "messages[0].content[1]", "must have text"),
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "messages[0].content[0].image_url.url",
         "the server fetches nothing"),
        ([{"type": "image_url", "image_url": "https://a/b.png"}], "messages[0].content[0].image_url.url", "data URL"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "messages[0].content[0].image_url.url",
         "data URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/gif;base64,aGk="}}],
         "messages[0].content[0].image_url.url", "must begin with data:image/png"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,aGk="}}], "messages[0].content[0].image_url.url",
         "must begin with"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}],
         "messages[0].content[0].image_url.url", "no base64"),
    ],
)  # fmt: skip
def test_contents(content: Any, param: str, says: str) -> None:
    error = refusal(ChatRequest, {"messages": [{"role": "user", "content": content}]})
    assert (error.status, error.param) == (400, param)
    assert says in error.message


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"metadata": {str(i): "" for i in range(257)}}, "metadata"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"echo": True}, "echo"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_of_chats(asked: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, CHAT | asked)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("schema", "asked", "param"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 65}] * 64}, "messages"),
        (ChatRequest, {"messages": [1] * 5000}, "messages"),
        (ChatRequest, {"messages": []}, "messages"),
        (CompletionRequest, {"prompt": [[-1]] * 5000}, "prompt"),
        (CompletionRequest, PROMPT | {"logit_bias": {str(i): None for i in range(20_000)}}, "logit_bias"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_looked_at(
    schema: type[CommonRequest], asked: dict[str, Any], param: str
) -> None:
    error = refusal(schema, asked)
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")


def test_a_huge_value_costs_one_error() -> None:
    """Lists are read up to what is wrong in them, objects are counted first."""
    error = refusal(CompletionRequest, PROMPT | {"stop_token_ids": ["x"] * 10**6})
    assert error.param == "stop_token_ids[0]"
    error = refusal(ChatRequest, {"messages": [{f"k{i}": 1 for i in range(10**5)}]})
    assert len(error.message) < 200


def test_a_refusal_of_an_earlier_answer_is_its_text() -> None:
    """Answers of other services that a client keeps in its conversation."""
    ways: list[dict[str, Any]] = [
        {"content": "No."},
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
    ]
    turns = [chat_spec(ChatRequest.model_validate({"messages": [{"role": "assistant"} | way]})) for way in ways]
    assert turns[0].chat.messages[0].parts[0].text == "No."
    assert turns[1:] == [turns[0]] * 2
    for way in ({"content": "hi", "refusal": "No."}, ways[2]):
        error = refusal(ChatRequest, {"messages": [{"role": "user"} | way]})
        assert (error.status, error.param) == (400, "messages[0]")
    part = {"type": "refusal", "text": "No."}
    assert refusal(ChatRequest, {"messages": [{"role": "assistant", "content": [part]}]}).status == 400


def test_items_of_a_response_come_back_as_openais_models_dump_them() -> None:
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
    ]  # fmt: skip
    models = [ResponseReasoningItem, ResponseOutputMessage, ResponseFunctionToolCall]
    made = [model.model_validate(item) for model, item in zip(models, output, strict=True)]
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    tool = FunctionTool(type="function", name="f", parameters={"type": "object"}, strict=True)
    expected = chat_spec(read_responses({"input": [*output, result], "tools": [tool.model_dump(exclude_unset=True)]}))
    for by_alias in (False, True):
        dumped = [one.model_dump(by_alias=by_alias) for one in made]
        more = {"caller": {"type": "direct"}, "namespace": None, "name": "f"}
        asked = {"input": [*dumped, result | more], "tools": [tool.model_dump(by_alias=by_alias)]}
        assert chat_spec(read_responses(asked)) == expected


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"model": "m" * 1025}, "model"),
    ],
)
def test_what_a_response_cannot_have_is_named(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as refused:
        read_responses({"input": "hi"} | more)
    assert of_validation(refused.value).param == param
