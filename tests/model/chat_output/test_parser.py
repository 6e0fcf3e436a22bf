"""The parser of tool calls and reasoning: forms of published models, and its laws over any text and any cuts."""

import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_output.families import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES
from model.inputs.chat_output.parsed import Parsed
from model.inputs.chat_output.parser import OutputParser
from model.inputs.chat_output.schema_types import types_of
from scheduler.structured import Structured
from scheduler.tools import Tool, ToolUse
from tests.support.written_calls import CALLS, SCHEMAS, SINGLE, WRITTEN

TOOLS = ToolUse(tuple(Tool(name, parameters=json.dumps(schema)) for name, schema in SCHEMAS.items()))
TOKENS = re.compile(r"<\|?/?[\w:▁]+\|?>|<\|\"\|>|<｜[\w▁]+｜>|｜DSML｜|\[/?[A-Z_]+\]")
"""Texts in published forms that are single tokens of the models."""


@dataclass
class Whole:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, new: Parsed) -> None:
        self.content += new.content
        self.reasoning += new.reasoning
        for part in new.calls:
            if part.name:
                self.calls.append([part.name, part.call_id, ""])
            assert part.index == len(self.calls) - 1
            self.calls[-1][2] += part.arguments


def form_of(name: str, special: bool, reasoning: str = "") -> ChatOutput:
    """special: the tokens of the form are special tokens, as in some published tokenizers."""
    tokens = dict.fromkeys(TOKENS.findall(WRITTEN.get(name, "") + "<think></think>")) if special else ()
    kept = [token for token in tokens if token not in ("<invoke>",)]
    reasoning = reasoning or (name if name in REASONING_FORMAT_NAMES else "think")
    return ChatOutput.of("", {1000 + i: token for i, token in enumerate(kept)}, name, reasoning)


def parsed(form: ChatOutput, text: str, cuts: list[int] | None = None, prompt: str = "") -> Whole:
    parsing = form.parsing(TOOLS, SCHEMAS, form.thinks(prompt), lambda number: f"id{number}")
    assert parsing is not None
    parser, whole, text = OutputParser(parsing), Whole(), form.marks.marked(text)
    ends = [*sorted({cut % (len(text) + 1) for cut in cuts or ()}), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        whole.add(parser.push(text[start:end]))
    whole.add(parser.end())
    return whole


def expected(name: str) -> list[tuple[str, dict[str, Any]]]:
    return CALLS[:1] if name in SINGLE else CALLS


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_published_forms(name: str, special: bool) -> None:
    found = parsed(form_of(name, special), WRITTEN[name])
    assert [(call, json.loads(arguments)) for call, _, arguments in found.calls] == expected(name)
    assert (found.content, found.reasoning) == ("", "")


@pytest.mark.parametrize("name", [name for name in TOOL_FORMAT_NAMES if name not in ("harmony", "pythonic", "llama3")])
def test_text_and_reasoning_before_calls(name: str) -> None:
    found = parsed(form_of(name, False, "think"), "<think>\nI see: <b> .\n</think>\n\nLet me look.\n" + WRITTEN[name])
    assert (found.content, found.reasoning) == ("Let me look.", "I see: <b> .")
    assert len(found.calls) == len(CALLS)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_arguments_that_are_cut_off_do_not_look_whole(name: str, special: bool) -> None:
    form = form_of(name, special)
    text = form.marks.marked(WRITTEN[name])
    for end in range(len(text)):
        for (_, _, arguments), (_, whole) in zip(parsed(form, text[:end]).calls, expected(name), strict=False):
            with suppress(ValueError):
                assert json.loads(arguments) == whole, text[:end]


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "get_time", "arguments": {"tz": "U\\"TC"}}', "\n",
    " ", "text", '{"name"', "}", '"', "<function=get_time>", "<parameter=tz>", "</parameter>", "</function>", "[", "]",
    "get_time(", "tz='x'", ")", ",", "[TOOL_CALLS]", "[ARGS]", "{}", "<|channel|>", "analysis", "<|message|>",
    "commentary to=functions.get_time", "<|end|>", "<arg_key>tz</arg_key>", "<arg_value>", "<tool_", "<", "\\",
    "<|tool_call>call:get_time{", 'tz:<|"|>', '<|"|>', "<tool_call|>", "<|channel>thought\n", "<channel|>", "🙂",
]  # fmt: skip
NAMES = ["hermes", "qwen3_coder", "glm45", "mistral", "mistral_v3", "pythonic", "llama3", "harmony", "gemma4", "lfm2"]


@given(st.sampled_from(NAMES), st.booleans(), st.lists(st.sampled_from(FRAGMENTS), max_size=24),
       st.lists(st.integers(0, 10**4), max_size=30), st.booleans())  # fmt: skip
def test_cuts_make_no_difference(name: str, special: bool, fragments: list[str], cuts: list[int], thinks: bool) -> None:
    form, text = form_of(name, special), "".join(fragments)
    prompt = "".join(form.literal(form.reasoning.begin)) if thinks and form.reasoning else ""
    assert parsed(form, text, cuts, prompt) == parsed(form, text, None, prompt)


@given(st.sampled_from(NAMES), st.lists(st.sampled_from(FRAGMENTS), max_size=24))
def test_what_is_no_call_is_text(name: str, fragments: list[str]) -> None:
    """Nothing is lost: without a call and without reasoning the content is the text."""
    text = "".join(fragments)
    found, form = parsed(form_of(name, False), text), form_of(name, False)
    assert form.reasoning is not None
    markers = (form.reasoning.begin.strip(), *form.reasoning.dropped)
    if not found.calls and not any(marker in text for marker in markers):
        assert found.content == text


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"arguments":{"tz":"a"},"name":"get_time"}</tool_call>', {"tz": "a"}),
        ("hermes", '<tool_call> { "name" : "get_time" } </tool_call>', {}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"tz\\": \\"b\\"}"}</tool_call>', {"tz": "b"}),
        ("hermes", '<tool_call>{"id": 3, "name": "get_time", "arguments": {"a": [1, {"b": "}"}]}}',
         {"a": [1, {"b": "}"}]}),
        ("qwen3_coder", "<tool_call><function=get_time><parameter=tz> a\nb </parameter></function></tool_call>",
         {"tz": " a\nb "}),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>\nNone\n</parameter></function></tool_call>",
         {"days": None}),
        ("qwen3_coder", "<tool_call>\n<function=x>\n<parameter=y>\n{'a': True}\n</parameter>\n</function></tool_call>",
         {"y": {"a": True}}),
        ("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", {}),
        ("glm47", "<tool_call>get_time</tool_call>", {}),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:7<|tool_call_argument_begin|>"
         '{"tz": "ü"}', {"tz": "ü"}),
        ("olmo3", "<function_calls>\nget_time(tz='it\\'s', n=[1, 2.5], o=None, p={'a': \"b\"})\n</function_calls>",
         {"tz": "it's", "n": [1, 2.5], "o": None, "p": {"a": "b"}}),
        ("gemma4", '<|tool_call>call:get_time{a:{b:[<|"|>x, y}<|"|>,2]},tz:<|"|>q"\'<|"|>}<tool_call|>',
         {"a": {"b": ["x, y}", 2]}, "tz": "q\"'"}),
        ("harmony", ' to=functions.get_time<|channel|>commentary json<|message|>{"tz": "z"}', {"tz": "z"}),
        ("gemma4", '<|tool_call>call:get_time{"tz":"a", n:[1,"b"]}<tool_call|>', {"tz": "a", "n": [1, "b"]}),
        ("qwen3_coder", "<function=get_time>\n<parameter=tz>\na\n</parameter>\n</function>\n</tool_call>", {"tz": "a"}),
        ("granite", '<|tool_call|> [{"name": "get_time", "arguments": {"tz": "a"}}]', {"tz": "a"}),
        ("granite", '<tool_call> [{"name": "get_time", "arguments": {"tz": "a"}}]', {"tz": "a"}),
        ("hunyuan", '<tool_calls>\n[{"name": "get_time", "arguments": {"tz": "a"}}]\n</tool_calls>', {"tz": "a"}),
        ("mistral_v3", '[TOOL_CALLS] {"name": "get_time", "arguments": {"tz": "a"}}', {"tz": "a"}),
        ("nemotron", '<TOOLCALL> [{"name": "get_time", "arguments": {"tz": "a"}}]</TOOLCALL>', {"tz": "a"}),
        ("phi4_mini", '<|tool_call|>{"name": "get_time", "arguments": {"tz": "a"}}<|/tool_call|>', {"tz": "a"}),
    ],
)  # fmt: skip
def test_ways_of_writing(name: str, text: str, arguments: dict[str, Any]) -> None:
    found = parsed(form_of(name, False), text)
    assert [json.loads(call[2]) for call in found.calls] == [arguments]
    assert found.content == ""


def test_a_block_may_have_several_functions() -> None:
    call = "<function=get_time>\n<parameter=tz>\n{}\n</parameter>\n</function>\n"
    found = parsed(
        form_of("qwen3_coder", False), "Both.\n<tool_call>\n" + call.format("a") + call.format("b") + "</tool_call>"
    )
    assert [json.loads(call[2]) for call in found.calls] == [{"tz": "a"}, {"tz": "b"}]
    assert found.content == "Both."


@pytest.mark.parametrize("name", [name for name in TOOL_FORMAT_NAMES if name not in SINGLE])
def test_calls_behind_the_first_are_dropped_where_one_is_wanted(name: str) -> None:
    form = form_of(name, True)
    parsing = form.parsing(replace(TOOLS, parallel=False), SCHEMAS, False, str)
    assert parsing is not None
    parser, whole = OutputParser(parsing), Whole()
    for char in form.marks.marked(WRITTEN[name]):
        whole.add(parser.push(char))
    whole.add(parser.end())
    assert [(call[0], json.loads(call[2])) for call in whole.calls] == CALLS[:1]
    assert whole.content == ""


OPTIONAL = {
    "type": "object",
    "properties": {
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"]},
        "code": {"enum": ["1", "2"]},
        "shared": {"$ref": "#/$defs/Code"},
        "count": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "any": {},
    },
    "$defs": {"Code": {"type": "string", "enum": ["1", "2"]}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("either", "12345", "12345"),
        ("either", "null", None),
        ("either", "nullify", "nullify"),
        ("either", '{"a": 1}', '{"a": 1}'),
        ("listed", "True", "True"),
        ("listed", "null", None),
        ("code", "1", "1"),
        ("shared", "2", "2"),
        ("count", "7", 7),
        ("count", "7.5", "7.5"),
        ("count", '{"a": 1}', '{"a": 1}'),
        ("any", "7", 7),
        ("any", "seven", "seven"),
    ],
)  # fmt: skip
def test_a_value_is_a_text_where_its_schema_has_texts(name: str, key: str, value: str, read: Any) -> None:
    form = form_of(name, False)
    assert form.tools is not None
    assert form.tools.tags is not None
    tags = form.tools.tags
    text = form.tools.opening + form.tools.begin + "get_time" + form.tools.named
    text += tags.begin + key + tags.named + value + tags.end + form.tools.end + form.tools.closing
    parsing = form.parsing(
        ToolUse((Tool("get_time", parameters=json.dumps(OPTIONAL)),)), {"get_time": OPTIONAL}, False, str
    )
    assert parsing is not None
    for parts in ([text], [*text]):
        parser, whole = OutputParser(parsing), Whole()
        for part in parts:
            whole.add(parser.push(part))
        whole.add(parser.end())
        assert [json.loads(call[2]) for call in whole.calls] == [{key: read}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "Write <function=other> there"),
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "bad name!", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
        ("mistral", "[TOOL_CALLS]get_time{}"),
        ("pythonic", "[link](https://x.y)"),
        ("pythonic", "[unknown(a=1)]"),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", 'It is {"name": "get_time", "parameters": {}}'),
        ("gemma4", "<|tool_call>call:get_time(x)"),
        ("harmony", "He went to=functions.get_time and back"),
    ],
)
def test_what_looks_like_a_call_is_text(name: str, text: str) -> None:
    found = parsed(form_of(name, False), text)
    assert (found.content, found.calls) == (text, [])


def test_a_special_token_is_no_text_and_text_is_no_special_token() -> None:
    form = form_of("mistral", True)
    parsing = form.parsing(TOOLS, SCHEMAS, False, str)
    assert parsing is not None
    whole, parser = Whole(), OutputParser(parsing)
    whole.add(parser.push('[TOOL_CALLS]get_time[ARGS]{"tz": "a"}'))  # letters, as a user may have written them
    whole.add(parser.end())
    assert whole.content == '[TOOL_CALLS]get_time[ARGS]{"tz": "a"}'
    assert not whole.calls


def test_types_of_a_hostile_schema_are_found_at_once() -> None:
    """A schema of alternatives that are itself: without a bound there would be 50 to the power of their depth."""
    itself = {"$ref": "#/$defs/a"}
    whole = {
        "$defs": {"a": {"anyOf": [itself] * 50}, "b": {"$ref": "#/$defs/b"}, "c": {"oneOf": [itself, {"type": "null"}]}}
    }
    for name in whole["$defs"]:
        assert types_of({"$ref": f"#/$defs/{name}"}, whole) == frozenset()
    assert types_of({"anyOf": [{"type": "string"}] * 1000}, whole) == frozenset()
    assert types_of({"anyOf": [{"type": ["string", 3]}, {"const": None}]}, whole) == {"string", "null"}


def test_reasoning_that_the_template_began() -> None:
    form = form_of("hermes", False)
    found = parsed(form, "so\n</think>\n\nyes", prompt="<|im_start|>assistant\n<think>\n")
    assert (found.reasoning, found.content) == ("so", "yes")
    closed = parsed(form, "yes", prompt="<think>\n\n</think>\n\n")
    assert (closed.reasoning, closed.content) == ("", "yes")


@pytest.mark.parametrize(("reasoning", "tag"), [("hunyuan", "answer"), ("ernie", "response")])
def test_an_answer_within_tags(reasoning: str, tag: str) -> None:
    form, begin, end = form_of("hermes", False, reasoning), f"<{tag}>", f"</{tag}>"
    cases = {
        f"\n{begin}\nHello\n{end}\n": "Hello",
        f"{begin}Hello {end} you{end}": f"Hello {end} you",
        f"{begin}Hello": "Hello",
        f"Write {begin}x{end}": f"Write {begin}x{end}",
        f"{begin}a{begin}b{end}": f"a{begin}b",
        f"Hello\n{end}\n": f"Hello\n{end}\n",
    }
    for text, content in cases.items():
        for cuts in ([], [*range(len(text) + 30)]):
            found = parsed(form, f"<think>\nhm\n</think>{text}", cuts)
            assert (found.reasoning, found.content, found.calls) == ("hm", content, [])
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    found = parsed(form, f"<think>hm</think>{begin}I look.\n{call}\n{end}")
    assert found.content == "I look."
    assert len(found.calls) == 1


def test_reasoning_that_does_not_end() -> None:
    found = parsed(form_of("hermes", False), "<think>\n<tool_call> a \n")
    assert (found.reasoning, found.content, found.calls) == ("<tool_call> a \n", "", [])


def test_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant" + WRITTEN["harmony"]
    )
    for special in (False, True):
        found = parsed(form_of("harmony", special), text)
        assert (found.reasoning, found.content, len(found.calls)) == ("Hm.", "I look.", 1)
        final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
        found = parsed(form_of("harmony", special), final)
        assert (found.reasoning, found.content) == ("Hm.", "Yes")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", '<tool_call><function=x><parameter=a>\n["x</parameter>y"]\n</parameter></function></tool_call>',
         '{"a": ["x</parameter>y"]}'),
        ("lfm2", "<|tool_call_start|>[x(n=1e999, m=" + "9" * 5000 + ")]<|tool_call_end|>",
         '{"n": 1e999, "m": ' + "9" * 5000 + "}"),
        ("hermes", '<tool_call>{"name": "get_time", "parameters": {"tz": "a"}}</tool_call>', '{"tz": "a"}'),
        ("llama3", '{"type": "function", "name": "get_time", "parameters": {"tz": "a"}}', '{"tz": "a"}'),
        ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {"tz": "a"}}', '{"tz": "a"}'),

    ],
)  # fmt: skip
def test_arguments_are_not_changed(name: str, text: str, arguments: str) -> None:
    found = parsed(form_of(name, False), text)
    assert [call[2] for call in found.calls] == [arguments]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "query": {"tz": "a"}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"get_time","arguments":"{\\"tz\\":\\"\\ud8ff\\"}"}</tool_call>'),
        ("pythonic", "[get_time(see below) is how you call it]"),
        ("pythonic", '[get_time("UTC")]'),
        ("harmony", "set to=functions.x then more and more of it, far more than sixty-four characters of text"),
    ],
)
def test_nothing_is_called_with_arguments_that_are_lost(name: str, text: str) -> None:
    form = form_of(name, False)
    parsing = form.parsing(TOOLS, SCHEMAS, False, str)
    assert parsing is not None
    parser, whole = OutputParser(parsing), Whole()
    whole.add(parser.push(text))
    if name == "harmony":
        assert whole.content, "it does not wait for the end"
    whole.add(parser.end())
    assert (whole.content, whole.calls) == (text, [])


def test_a_special_token_within_arguments_is_text() -> None:
    form = form_of("gemma4", True)
    text = form.marks.marked('<|tool_call>call:get_time{tz:x<|"|>y<|"|>}<tool_call|>')
    assert all(json.loads(call[2] or "{}") is not None for call in parsed(form, text).calls if call[2].endswith("}"))
    hermes = ChatOutput.of("", {1000: "<tool_call>", 1001: '<"quote">'}, "hermes", "none")
    (call,) = parsed(hermes, '<tool_call>{"name": "get_time", "arguments": {"tz": "<tool_call>"}}').calls
    assert json.loads(call[2]) == {"tz": "<tool_call>"}


def test_an_answer_has_no_calls_in_it() -> None:
    form = form_of("qwen3_coder", False)
    text = '{"a": "<tool_call><function=get_time></function></tool_call>"}'
    parsing = form.parsing(TOOLS, SCHEMAS, False, str, Structured.json_schema({}))
    assert parsing is not None
    parser, whole = OutputParser(parsing), Whole()
    whole.add(parser.push(text))
    whole.add(parser.end())
    assert (whole.content, whole.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("lfm2", "<|tool_call_start|>[f(a=1 and more text here) hello", "and more text here) hello", '{"a": 1'),
        ("lfm2", "<|tool_call_start|>[f(a=1, b=) hello", "b=) hello", '{"a": 1'),
        ("lfm2", '<|tool_call_start|>[f(a="\\ud83d\\ude00 \\ud800")]<|tool_call_end|>', "", '{"a": "😀 \ufffd"}'),
    ],
)
def test_text_that_breaks_arguments_off_is_content(name: str, text: str, content: str, arguments: str) -> None:
    found = parsed(form_of(name, False), text)
    assert (found.content, [call[2] for call in found.calls]) == (content, [arguments])


def test_time_is_linear_in_values_that_are_no_json() -> None:
    value = "<parameter=a>\n[[[[[[[[[[\n</parameter>\n"
    form = form_of("qwen3_coder", False)
    found = parsed(form, "<tool_call>\n<function=x>\n" + value * 3000 + "</function>\n</tool_call>")
    assert found.calls[0][2].count('"a": "[[[[[[[[[["') == 3000


@pytest.mark.parametrize("part", ['<tool_call>{"a":[', " " * 16, "<think>", "\n<tool_call>", '<tool_call>{"name": "'])
def test_time_is_linear(part: str) -> None:
    """Counted in what is looked at, not in seconds: of twice the text, at most some more than twice."""

    def work(count: int) -> int:
        form = form_of("hermes", False)
        parsing = form.parsing(TOOLS, SCHEMAS, False, str)
        assert parsing is not None
        parser, looked = OutputParser(parsing), 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal looked
            looked += event == "call" and "chat_output" in frame.f_code.co_filename
            return None

        sys.setprofile(trace)
        try:
            for _ in range(count):
                parser.push(part)
            parser.end()
        finally:
            sys.setprofile(None)
        return looked

    assert work(4000) < 2.6 * work(2000)


def test_continued_reasoning() -> None:
    form = form_of("hermes", False)
    assert form.thinks("<think>\nI was about", continues=True)
    assert not form.thinks("What does <think> mean?\nassistant:")
    assert not form.thinks("<think></think>I was about", continues=True)
