"""The grammar of calls and reasoning allows the published forms, and the parser reads what it allows as calls."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_output.families import TOOL_FORMAT_NAMES
from model.inputs.chat_output.grammar_form import OutputForm
from model.inputs.chat_output.parser import OutputParser
from model.inputs.grammar_checker import GrammarChecker
from model.inputs.grammar_process import output_grammar, tokenizer_of, trial_ids
from model.inputs.grammars import GrammarRefused, limits
from scheduler.structured import Structured
from scheduler.tools import Tool, ToolChoice, ToolUse
from tests.model.chat_output.test_parser import Whole, form_of, parsed
from tests.support.written_calls import CALLS, SCHEMAS, SINGLE, WRITTEN

pytestmark = pytest.mark.sample(3)


def tools(strict: bool = True, choice: ToolChoice = ToolChoice.AUTO, **more: Any) -> ToolUse:
    made = (Tool(name, parameters=json.dumps(schema), strict=strict) for name, schema in SCHEMAS.items())
    return ToolUse(tuple(made), choice, **more)


def canonical(name: str) -> str:
    """The calls as the grammar writes them: of the ways in which models do, one."""
    text = WRITTEN[name]
    match name:
        case "mistral_v3":
            return re.sub(r', "id": "\w+"', "", text)
        case "minimax_m2":
            return text.replace("</parameter><", "</parameter>\n<").replace("</parameter></", "</parameter>\n</")
        case "olmo3" | "lfm2":
            return text.replace("'", '"')
    return text


class Language:
    """Texts that a form allows."""

    def __init__(self, form: OutputForm) -> None:
        self.form = form
        self.grammar, self.tokenizer = output_grammar(form)[0].text(trial_ids(form)), tokenizer_of(len(form.ids))
        self.numbers = trial_ids(form)

    def reads(self, text: str) -> tuple[int, bool]:
        """How many of the marked text's tokens may follow each other, and whether the output may end there."""
        ids = list(self.ids(text))
        matcher = LLMatcher(self.tokenizer, self.grammar, log_level=0, limits=limits())
        assert not matcher.is_error(), matcher.get_error()
        count = matcher.validate_tokens(ids)
        if count < len(ids):
            return count, False
        matcher.consume_tokens(ids)
        return count, matcher.is_accepting()

    def allows(self, text: str) -> bool:
        return self.reads(text)[1]

    def ids(self, text: str) -> Iterator[int]:
        for char in text:
            if char in self.numbers:
                yield self.numbers[char]
            else:
                yield from char.encode("utf-8", "surrogatepass")


@cache
def language(
    name: str, special: bool, strict: bool, choice: ToolChoice, parallel: bool = True
) -> tuple[ChatOutput, Language]:
    made = form_of(name, special)
    form = made.form(tools(strict, choice, parallel=parallel), None, "")
    if form is None:
        form = made.form(tools(strict, ToolChoice.REQUIRED, parallel=parallel), None, "")
        assert form is not None
        form = replace(form, required=False)
    assert OutputForm.of_text(form.constraint().text) == replace(form, ids=dict(form.ids))
    return made, Language(form)


@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_published_forms(name: str, special: bool, strict: bool, choice: ToolChoice) -> None:
    form, texts = language(name, special, strict, choice)
    text = form.marks.marked(canonical(name))
    assert texts.reads(text) == (len(list(texts.ids(text))), True)
    assert not texts.allows(text[:-1]) or name in ("harmony", "mistral", "mistral_v11")
    plain = "<|channel|>final<|message|>Yes [or no]: <a>" if name == "harmony" else "Yes [or no]: <a>"
    assert texts.allows(form.marks.marked(plain)) == (choice is ToolChoice.AUTO)
    if name not in SINGLE:
        assert texts.allows(form.marks.marked(canonical(name).replace("UTC", "CET")))
        assert not (strict and texts.allows(form.marks.marked(canonical(name).replace("UTC", "XYZ"))))
        one = language(name, special, strict, choice, parallel=False)[1]
        assert not one.allows(text)


@pytest.mark.parametrize("name", [name for name in TOOL_FORMAT_NAMES if name not in ("pythonic", "llama3", "harmony")])
def test_text_and_reasoning_before_calls(name: str) -> None:
    form, texts = language(name, False, True, ToolChoice.AUTO)
    assert form.reasoning is not None
    begin, end = form.reasoning.begin, form.reasoning.end
    assert texts.allows(f"{begin}I <b> see.{end}\n\nLet me look.\n{canonical(name)}")
    assert not texts.allows(f"{begin}I <b> see.\n{canonical(name)}")


EDITS = st.lists(
    st.tuples(st.integers(0, 10**4), st.integers(0, 12), st.sampled_from([*' \n}"a1<[,', ""])),
    min_size=1,
    max_size=3,
)  # fmt: skip


@given(st.sampled_from(TOOL_FORMAT_NAMES), st.booleans(), st.booleans(), EDITS, st.text(max_size=4))
def test_what_is_allowed_is_read_as_calls(
    name: str, special: bool, required: bool, edits: list[tuple[int, int, str]], before: str
) -> None:
    form, texts = language(name, special, True, ToolChoice.REQUIRED if required else ToolChoice.AUTO)
    text = before.encode("utf-8", "replace").decode() + canonical(name)
    for at, count, put in edits:
        at %= len(text) + 1
        text = text[:at] + put + text[at + count :]
    text = form.marks.marked(text)
    if texts.allows(text):
        found = parsed(form, text)
        assert found.calls or not required
        for call, _, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[call])
        assert texts.form.tools is not None
        if found.calls and required:
            assert found.content == ""


ARGUMENTS = st.fixed_dictionaries({"city": st.text(max_size=8)}, optional={"days": st.integers(-(10**6), 10**6)})


@given(st.sampled_from(["hermes", "qwen3_coder", "glm45", "deepseek_v32", "lfm2", "gemma4", "mistral"]), ARGUMENTS)
def test_all_arguments_can_be_written(name: str, arguments: dict[str, Any]) -> None:
    form, texts = language(name, True, True, ToolChoice.REQUIRED)
    city, text = arguments["city"], canonical(name)
    control = re.search(r"[\x00-\x07\x0b\x0e-\x1f\x7f]", city)
    raw = name in ("qwen3_coder", "glm45", "deepseek_v32", "gemma4")
    if control or (raw and (city.strip("\n") != city or "</" in city or "<|" in city)):
        return
    if "days" in arguments:
        text = (
            text.replace("3", str(arguments["days"]), 1)
            if name != "deepseek_v32"
            else text.replace('string="false">3', f'string="false">{arguments["days"]}')
        )
    else:
        arguments = {**arguments, "days": 3}
    written = city if raw else json.dumps(city, ensure_ascii=False)[1:-1]
    text = form.marks.marked(text).replace("Paris", written)
    assert texts.allows(text)
    assert json.loads(parsed(form, text).calls[0][2]) == arguments


OPTIONAL = {
    "type": "object",
    "properties": {
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"], "enum": ["a", "b"]},
        "code": {"enum": ["1", "2", None]},
        "shared": {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "additionalProperties": False,
    "$defs": {"Code": {"type": "string", "enum": ["1", "2"]}},
}
KEPT = {
    "either": ["12", "null", "nullify", '{"a": 1}', '"a"'],
    "listed": ["a"],
    "code": ["1", "null"],
    "shared": ["2", "null"],
    "count": ["7", '"seven"'],
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32"])
def test_texts_that_may_be_missing_are_kept_and_read(name: str) -> None:
    form = form_of(name, False)
    use = ToolUse((Tool("f", parameters=json.dumps(OPTIONAL), strict=True),), ToolChoice.REQUIRED)
    wanted, parsing = form.form(use, None, ""), form.parsing(use, {"f": OPTIONAL}, False, str)
    assert wanted is not None
    assert parsing is not None
    assert form.tools is not None
    assert form.tools.tags is not None
    texts, tools, tags = Language(wanted), form.tools, form.tools.tags
    for key, kept in KEPT.items():
        for value in {value for values in KEPT.values() for value in values} | {"c", "true", "[]"}:
            for typed in ("true", "false") if tags.typed else ("",):
                argument = f"{tags.begin}{key}{tags.named}{typed}{tags.typed}{value}{tags.end}"
                text = f"{tools.opening}{tools.begin}f{tools.named}{argument}{tools.end}{tools.closing}"
                assert texts.allows(text) or value not in kept or typed
                if texts.allows(text):
                    parser = OutputParser(parsing)
                    found = [*parser.push(text).calls, *parser.end().calls]
                    jsonschema.validate(json.loads("".join(part.arguments for part in found)), OPTIONAL)
    beside = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/C", "maxLength": 1}},
        "$defs": {"C": {"type": "string"}},
    }
    strict = ToolUse((Tool("f", parameters=json.dumps(beside), strict=True),), ToolChoice.REQUIRED)
    refused = form.form(strict, None, "")
    assert refused is not None
    with pytest.raises(GrammarRefused, match=r"maxLength: is not enforced beside \$ref"):
        Language(refused)


def test_an_answer_behind_reasoning() -> None:
    form = form_of("hermes", False)
    structured = Structured.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for prompt, begun in (("", "<think>\n"), ("<think>\n", "")):
        wanted = form.form(ToolUse(), structured, prompt)
        assert wanted is not None
        texts = Language(wanted)
        assert texts.allows(f'{begun}It is {{"b"}}.\n</think>\n\n{{"a": 1}}')
        assert not texts.allows(f'{begun}It is.\n</think>\n\n{{"b": 1}}')
        assert texts.allows('{"a": 1}') == (begun != "")
    assert form.form(ToolUse(), structured, "<think>\n\n</think>\n\n") is None, "the whole output is the answer"
    with_tools = form.form(tools(), structured, "</think>")
    assert with_tools is not None
    texts = Language(with_tools)
    assert texts.allows('{"a": 1}')
    assert texts.allows(canonical("hermes"))
    assert not texts.allows("text")


@pytest.mark.parametrize(
    ("reasoning", "structured", "gaps", "answers"),
    [
        ("think", Structured.regex(r"( |\n)*x"), ["\n\n"], ["x", "\nx", " x", "\n\n\n x", "  \n x"]),
        ("think", Structured.choice(["\n\n\na", " b"]), ["\n\n"], ["\n\n\na", " b"]),
        ("think", Structured.regex(" *x"), ["", "\n", "\n\n"], ["x", "  x"]),
        ("hunyuan", Structured.regex("<answer>x</answer>"), ["", "\n\n"], ["<answer>x</answer>"]),
        ("harmony", Structured.regex(r"( |\n)*x"), ["\n\n<|channel|>final<|message|>"], ["x", "\n\n x"]),
        ("harmony", Structured.regex(r"( |\n)*x"), ["<|channel|>final<|message|>"], ["x", "\n\n x"]),
    ],
)
def test_white_space_of_an_answer_behind_reasoning_is_its_own(
    reasoning: str, structured: Structured, gaps: list[str], answers: list[str]
) -> None:
    form = form_of("hermes", False, reasoning)
    wanted, parsing = form.form(ToolUse(), structured, ""), form.parsing(ToolUse(), {}, False, str, structured)
    assert wanted is not None
    assert parsing is not None
    assert form.reasoning is not None
    texts, before = Language(wanted), form.reasoning.begin + "hm" + form.reasoning.end + form.reasoning.behind
    for answer in answers:
        assert texts.allows(form.marks.marked(before + answer.lstrip("\n"))) == ("" in gaps)
        for gap in gaps:
            written = form.marks.marked(before + gap + answer)
            assert texts.allows(written)
            for step in (1, 2, len(written)):
                parser, content = OutputParser(parsing), ""
                for at in range(0, len(written), step):
                    content += parser.push(written[at : at + step]).content
                assert content + parser.end().content == answer


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral_v3", "harmony"])
@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_calls_beside_an_answer_with_white_space(name: str, choice: ToolChoice) -> None:
    form, structured = form_of(name, False), Structured.regex(r"( |\n)*x")
    wanted = form.form(tools(choice=choice), structured, "")
    parsing = form.parsing(tools(choice=choice), SCHEMAS, False, str, structured)
    assert wanted is not None
    assert parsing is not None
    assert form.reasoning is not None
    texts, calls = Language(wanted), canonical(name)
    reasoning = form.reasoning.begin + "hm" + form.reasoning.end + form.reasoning.behind
    for before in ("", reasoning, f"{reasoning}\n", f"{reasoning}\n\n"):
        if name == "harmony" and before:
            calls = calls.removeprefix("<|start|>assistant")
        text = form.marks.marked(before + calls)
        assert texts.allows(text), before
        for step in (1, len(text)):
            parser, whole = OutputParser(parsing), Whole()
            for at in range(0, len(text), step):
                whole.add(parser.push(text[at : at + step]))
            whole.add(parser.end())
            assert (whole.content, len(whole.calls)) == ("", 1 if name in SINGLE else len(CALLS))
    if choice is ToolChoice.AUTO and name != "harmony":
        assert texts.allows(form.marks.marked(f"{reasoning}\n\n\n x"))
        assert not texts.allows(form.marks.marked(f"{reasoning}\n x"))


@pytest.mark.parametrize("reasoning", ["think", "hunyuan"])
def test_text_between_tags_is_read_as_without_a_constraint(reasoning: str) -> None:
    form, tag = form_of("hermes", False, reasoning), {"begin": "<f>", "schema": {}, "end": "</f>"}
    structured = Structured.structural_tag({"structures": [tag], "triggers": ["<f>"]})
    parsing = form.parsing(ToolUse(), {}, False, str, structured)
    assert parsing is not None
    begin, end = form.reasoning.answer if form.reasoning and form.reasoning.answer else ("", "")
    parser = OutputParser(parsing)
    found = parser.push(f"<think>hm</think>\n\n\n{begin}\n hello <f>{{}}</f>\n{end}").content + parser.end().content
    assert found.rstrip() == "hello <f>{}</f>"


def test_a_call_at_the_start_is_known_by_its_first_key() -> None:
    """A text that the mask of a strict tool does not take for a call is none."""
    form, texts = language("llama3", False, True, ToolChoice.AUTO)
    for text in (
        '{,"name": "get_time", "parameters": {"tz": 1}}',
        '{"n\\u0061me": "get_time", "parameters": {"tz": 1}}',
        '{\x1c"name": "get_time", "parameters": {"tz": 1}}',
    ):
        assert not (texts.allows(text) and parsed(form, text).calls)
    assert parsed(form, '{"name": "get_time", "parameters": {"tz": "UTC"}}').calls


@pytest.mark.parametrize(
    ("name", "schema", "why"),
    [
        ("hermes", {"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ("hermes", {"type": "array"}, "arguments are an object"),
        ("hermes", {"x-guidance": {}}, "options of the library"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}},
         "properties/a/pattern"),
        ("qwen3_coder", {"type": "object", "properties": {"a\nb": {}}}, "cannot have this name"),
        ("qwen3_coder", {"type": "object", "minProperties": 1}, "minProperties"),
        ("glm45", {"type": "object", "required": ["b"]}, "is no property"),
        ("lfm2", {"type": "object", "properties": {"a b": {}}}, "letters, digits"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "$ref"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}}, "allows no text"),
        ("glm45", {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"], "const": "a"}}}, "no text"),
        ("glm45", {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["a", "null"]}}},
         "reads as null"),
        ("hermes", {"type": "object", "properties": {"\ud800": {}}}, "lone surrogate"),
        ("gemma4", {"type": "object", "properties": {"a": {}}}, "can have texts, numbers"),
        ("gemma4", {"type": "object", "properties": {"a": True}}, "need a type"),
    ],
)  # fmt: skip
def test_a_strict_schema_is_kept_or_refused_by_name(name: str, schema: dict[str, Any], why: str) -> None:
    form = form_of(name, False)
    good = Tool("good", parameters=json.dumps(SCHEMAS["get_time"]), strict=True)
    for strict in (True, False):
        bad = Tool("bad", parameters=json.dumps(schema), strict=strict)
        wanted = form.form(ToolUse((good, bad), ToolChoice.REQUIRED), None, "")
        assert wanted is not None
        checker = GrammarChecker()
        try:
            if strict:
                with pytest.raises(GrammarRefused, match=re.escape(why)) as refused:
                    checker.grammar(wanted.constraint(), "")
                assert refused.value.field == "chat.tools[1].parameters"
            else:
                assert checker.grammar(wanted.constraint(), "")
        finally:
            checker.close()


def test_a_tool_without_arguments() -> None:
    for name in TOOL_FORMAT_NAMES:
        form = form_of(name, False)
        wanted = form.form(ToolUse((Tool("now", strict=True),), ToolChoice.REQUIRED, "now"), None, "")
        assert wanted is not None
        assert not LLMatcher.validate_grammar(output_grammar(wanted)[0].text({}), tokenizer_of(0)), name


def test_only_the_named_tool() -> None:
    form = form_of("hermes", False)
    wanted = form.form(tools(False, ToolChoice.REQUIRED, name="get_time"), None, "")
    assert wanted is not None
    texts = Language(wanted)
    first, _, second = canonical("hermes").partition("</tool_call>\n")
    assert texts.allows(second)
    assert not texts.allows(first + "</tool_call>")
    assert len(CALLS) == 2
