"""Lines of a batch job: what is a request, what is an error, and how results are written."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.lines import KEYS, OwnLine, failure_line, parse_line, result_line
from rpc.frontend.errors import RequestFailed
from rpc.image_files import MOST_BYTES
from rpc.services.convert import spec_from
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.tools import Tool, ToolCall, ToolChoice, ToolUse


def parse(values: object) -> OwnLine:
    return parse_line(4, 7, values if isinstance(values, bytes) else json.dumps(values).encode())


def test_a_whole_line_becomes_the_request_that_it_says() -> None:
    line = parse(
        {
            "id": "a-1",
            "prompt": "ROMEO:",
            "sampling": {"temperature": 0.5, "top_k": 3, "seed": 2**64 - 1},
            "stopping": {"max_tokens": 9, "stop": ["x"], "ignore_eos": True},
            "output": {"top_logprobs": 2},
        }
    )
    assert (line.index, line.number, line.id, line.failure) == (4, 7, "a-1", None)
    assert line.request is not None
    spec = spec_from(line.request.spec)
    assert spec.prompt == "ROMEO:"
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.seed) == (0.5, 3, 2**64 - 1)
    assert (spec.stopping.max_tokens, spec.stopping.stop, spec.stopping.ignore_eos) == (9, ("x",), True)
    assert (spec.output.token_ids, spec.output.top_logprobs, spec.output.text) == (True, 2, True)


def test_token_ids_and_ids_of_both_kinds() -> None:
    line = parse({"id": 12, "prompt_token_ids": [1, 2, 3]})
    assert line.request is not None
    assert (line.id, list(line.request.spec.token_ids.ids)) == (12, [1, 2, 3])
    assert parse({"prompt": "A"}).id == 7


def test_messages_become_a_conversation() -> None:
    messages = [{"role": "system", "content": ""}, {"content": "Hé", "role": "user"}]
    line = parse({"messages": messages, "template_arguments": {"enable_thinking": False, "tone": "dry"}})
    assert line.request is not None
    assert spec_from(line.request.spec).prompt == Chat(
        (ChatMessage("system", ""), ChatMessage("user", "Hé")), (("enable_thinking", "false"), ("tone", '"dry"'))
    )
    empty = parse({"messages": []})
    assert empty.request is not None
    with pytest.raises(RequestFailed, match=r"chat.messages is '0 messages': must be 1 to 4096"):
        spec_from(empty.request.spec)


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_tools_and_turns_with_calls() -> None:
    """JSON of parameters and of arguments is an object or a text."""
    call = {"id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}
    line = parse({
        "messages": [
            {"role": "user", "content": "Rain?", "name": "bob"},
            {"role": "assistant", "tool_calls": [call, call | {"arguments": "{}"}], "reasoning": "Hm."},
            {"role": "tool", "content": "3 mm", "tool_call_id": "c1"},
        ],
        "tools": [
            {"name": "weather", "description": "Rain", "parameters": WEATHER, "strict": True},
            {"name": "now", "parameters": json.dumps(WEATHER)},
            {"name": "stop"},
        ],
        "tool_choice": "required", "tool_name": "weather", "parallel_tool_calls": False,
    })  # fmt: skip
    assert line.request is not None, line.failure
    chat = spec_from(line.request.spec).prompt
    assert isinstance(chat, Chat)
    calls = (ToolCall("c1", "weather", '{"city": "Oslo"}'), ToolCall("c1", "weather", "{}"))
    assert chat.messages == (
        ChatMessage("user", "Rain?", name="bob"),
        ChatMessage("assistant", "", calls, reasoning="Hm."),
        ChatMessage("tool", "3 mm", tool_call_id="c1"),
    )
    schema = json.dumps(WEATHER)
    tools = (Tool("weather", "Rain", schema, strict=True), Tool("now", "", schema), Tool("stop"))
    assert chat.tool_use == ToolUse(tools, ToolChoice.REQUIRED, "weather", parallel=False)


def test_images_are_base64_or_files_beside_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.PNG").write_bytes(b"first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.jpg").write_bytes(b"second")
    values = {"prompt": "A", "images": ["a.PNG", "+/+/+w==", "-_-_-w", str(elsewhere / "b.jpg"), "", "none.png"]}
    line = parse_line(0, 1, json.dumps(values).encode(), tmp_path)
    assert line.request is not None
    held = base64.b64decode("+/+/+w==")
    assert [image.data for image in line.request.spec.images] == [b"", held, held, b"", b"", b""], "not read yet"
    with pytest.raises(RequestFailed, match=r"images\[5\] .* cannot be read: .*No such file"):
        line.read_files()
    (tmp_path / "none.png").mkdir()
    with pytest.raises(RequestFailed, match=r"images\[5\] .* is no regular file"):
        line.read_files()
    (tmp_path / "none.png").rmdir()
    (tmp_path / "none.png").write_bytes(b"third")
    line.read_files()
    assert [image.data for image in line.request.spec.images] == [b"first", held, held, b"second", b"", b"third"]


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    line = parse_line(0, 1, b'{"prompt": "A", "images": ["a.png"]}', tmp_path)
    with pytest.raises(RequestFailed, match=f"an image may have {MOST_BYTES}"):
        line.read_files()


def test_parts_of_a_message_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"first")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Hé"}, {"type": "image", "image": "QQ=="}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    line = parse_line(0, 1, json.dumps({"messages": messages}).encode(), tmp_path)
    assert line.request is not None
    line.read_files()
    spec = spec_from(line.request.spec)
    content = (ImageHere(), "Hé", ImageHere())
    assert spec.prompt == Chat((ChatMessage("user", content), ChatMessage("assistant", "x")))
    assert spec.images == (b"first", b"A")
    assert spec.image_fields == ("chat.messages[0].parts[0].image", "chat.messages[0].parts[2].image")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (b"{", "line 7 is no JSON"),
        (b"[" * 100_000, "line 7 is no JSON"),
        (b'{"prompt": "\xff"}', "line 7 is no JSON"),
        ([1], "line 7 is no JSON object"),
        ({}, "exactly one of prompt, prompt_token_ids, messages; there is none"),
        ({"prompt": "A", "prompt_token_ids": [1]}, "there is prompt, prompt_token_ids"),
        ({"prompt": 3}, "prompt is 3: must be a string"),
        ({"prompt": "\ud800"}, "is no Unicode text"),
        ({"prompt_token_ids": [1, "2"]}, "must be a list of token ids"),
        ({"prompt_token_ids": [True]}, "must be a list of token ids"),
        ({"prompt_token_ids": [-1]}, "must be a list of token ids"),
        ({"prompt_token_ids": [2**32]}, "must be a list of token ids"),
        ({"prompt": "A", "temperature": 1}, "temperature is 1: is not known here"),
        ({"prompt": "A", "sampling": 1}, "sampling is 1: must be an object"),
        ({"prompt": "A", "sampling": {"heat": 1}}, 'has no field named "heat"'),
        ({"prompt": "A", "sampling": {"temperature": "hot"}}, "temperature"),
        ({"prompt": "A", "sampling": {"temperature": 10**400}}, "too large"),
        ({"prompt": "A", "stopping": {"max_tokens": -1}}, "max_tokens"),
        ({"prompt": "A", "stopping": {"max_tokens": 1.5}}, "max_tokens"),
        ({"prompt": "A", "id": [1]}, "id is [1]: must be a string or a whole number"),
        ({"prompt": "A", "id": True}, "id is True: must be"),
        ({"messages": "Hi"}, "messages is 'Hi': must be a list of messages"),
        ({"messages": ["Hi"]}, "messages[0] is 'Hi': must be an object of role and content"),
        ({"messages": [{"role": "user"}]}, "must be an object of role and content"),
        ({"messages": [{"role": "user", "content": "Hi", "named": "x"}]}, "must be an object of role and content"),
        ({"messages": [{"role": "user", "content": "Hi", "name": 3}]}, "messages[0].name is 3: must be a string"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "must be an object of role and content"),
        ({"messages": [{"role": "assistant", "tool_calls": {"id": "a"}}]}, "tool_calls is {'id': 'a'}: must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": ["a"]}]}, "messages[0].tool_calls[0] is 'a': must be an"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 'has no field named "function"'),
        ({"messages": [], "tools": {"name": "a"}}, "tools is {'name': 'a'}: must be a list of tools"),
        ({"messages": [], "tools": [{"type": "function"}]}, 'has no field named "type"'),
        ({"messages": [], "tools": [{"name": "a", "parameters": 3}]}, "tools[0] is"),
        ({"messages": [], "tools": [{"name": "a", "parameters": {"\ud800": 3}}]}, "tools[0] is"),
        ({"messages": [], "tool_choice": "any"}, "tool_choice is 'any': must be one of auto, none, required"),
        ({"messages": [], "tool_choice": ["auto"]}, "tool_choice is ['auto']: must be one of"),
        ({"messages": [], "tool_name": 3}, "tool_name is {'tool_name': 3}"),
        ({"messages": [], "parallel_tool_calls": "no"}, "parallel_tool_calls is"),
        ({"prompt": "A", "tools": []}, "tools is []: needs messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3: must be a string or a list"),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "messages[0].content[0] is"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0] is"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "is no Unicode text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "?"}]}]}, "content[0].image is '?'"),
        ({"messages": [{"role": 1, "content": "Hi"}]}, "messages[0].role is 1: must be a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "is no Unicode text"),
        ({"messages": [], "prompt": "A"}, "there is prompt, messages"),
        ({"messages": [], "template_arguments": 1}, "template_arguments is 1: must be an object"),
        ({"messages": [], "template_arguments": {"\ud800": 1}}, "is no Unicode text"),
        ({"prompt": "A", "template_arguments": {}}, "template_arguments is {}: needs messages"),
        ({"prompt": "A", "images": "QQ=="}, "images is 'QQ==': must be a list of images"),
        ({"prompt": "A", "images": ["QQ==", 3]}, "images[1] is 3: must be base64 or the name of a file"),
        ({"prompt": "A", "images": ["a cat.gif"]}, "images[0] is 'a cat.gif': is no base64, and no name of a file"),
        ({"prompt": "A", "images": ["A"]}, "images[0] is 'A': is no base64"),
    ],
)
def test_a_line_that_is_no_request_says_why(values: object, message: str) -> None:
    line = parse(values)
    assert line.request is None
    assert line.failure is not None
    assert message in line.failure.message
    assert line.failure.code == "INVALID_ARGUMENT"
    assert json.loads(failure_line(line, line.failure))["error"]["message"] == line.failure.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_line_raises(data: bytes) -> None:
    line = parse_line(0, 1, data)
    assert (line.request is None) != (line.failure is None)
    if line.failure is not None:
        assert "\n" not in failure_line(line, line.failure)


def sequence(text: str, *token_ids: int) -> pb.SequenceResult:
    logprobs = [pb.TokenLogprobs(tokens=[pb.TokenLogprob(token_id=i, logprob=-0.5, rank=1)]) for i in token_ids]
    return pb.SequenceResult(text=text, token_ids=token_ids, logprobs=logprobs, finish_reason=pb.FINISH_REASON_LENGTH)


USAGE = pb.Usage(prompt_tokens=4, cached_prompt_tokens=1, completion_tokens=2)


def test_result_has_the_documented_shape() -> None:
    line = parse({"id": "a", "prompt": "A"})
    response = pb.GenerateResponse(sequences=[sequence("O\u2028ho\n", 5, 6)], usage=USAGE)
    written = result_line(line, response)
    assert written.splitlines() == [written]
    assert json.loads(written) == {
        "id": "a",
        "text": "O\u2028ho\n",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 4, "cached_prompt_tokens": 1, "completion_tokens": 2},
        "logprobs": [[{"token_id": i, "logprob": -0.5, "rank": 1}] for i in (5, 6)],
    }
    plain = pb.GenerateResponse(sequences=[pb.SequenceResult(text="O")], usage=USAGE)
    assert "logprobs" not in json.loads(result_line(line, plain))


def test_several_sequences_stand_in_a_list() -> None:
    line = parse({"id": "a", "prompt": "A", "sampling": {"sequence_count": 2}})
    response = pb.GenerateResponse(sequences=[sequence("x", 1), sequence("y", 2)], usage=USAGE)
    values = json.loads(result_line(line, response))
    assert [s["text"] for s in values["sequences"]] == ["x", "y"]
    assert values.keys() == {"id", "sequences", "usage"}
    assert values["sequences"][0].keys() == {"text", "token_ids", "finish_reason", "logprobs"}


def test_what_a_search_found_has_its_score() -> None:
    line = parse({"id": "a", "prompt": "A", "sampling": {"sequence_count": 2, "beam_search": {"width": 2}}})
    found = [pb.SequenceResult(text="x", score=-0.5), pb.SequenceResult(text="y", score=-0.75)]
    values = json.loads(result_line(line, pb.GenerateResponse(sequences=found, usage=USAGE)))
    assert [s["score"] for s in values["sequences"]] == [-0.5, -0.75]


def test_calls_and_reasoning_are_typed() -> None:
    calls = [pb.ToolCall(id="c1", name="weather", arguments='{"city": "Oslo"}')]
    made = pb.SequenceResult(tool_calls=calls, reasoning="Hm.", finish_reason=pb.FINISH_REASON_CLOSED)
    values = json.loads(result_line(parse({"messages": []}), pb.GenerateResponse(sequences=[made], usage=USAGE)))
    assert values["tool_calls"] == [{"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}]
    assert (values["text"], values["reasoning"], values["finish_reason"]) == ("", "Hm.", "closed")


def test_failure_names_code_and_reason() -> None:
    failure = RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", "full")
    values = json.loads(failure_line(parse({"id": 3, "prompt": "A"}), failure))
    assert values == {"id": 3, "error": {"code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "message": "full"}}
