"""Which outputs of conversations, calls and structural tags max_tokens has ended in time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from model.inputs import grammar_checker
from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.grammar_checker import Constraint, GrammarChecker, GrammarUnchecked
from model.inputs.line_process import LineProcess
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.output import Finish, FinishReason, StepTokens
from rpc.frontend.outputs import Outputs
from rpc.frontend.stream import RequestStream
from scheduler.events import End, EndReason
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Output, Stopping
from scheduler.prompts import Chat, ChatMessage
from scheduler.resolve import resolve
from scheduler.spec import Spec
from scheduler.structured import Structured
from scheduler.tools import Tool, ToolChoice, ToolUse
from tests.support.checkpoints import byte_tokenizer
from tests.support.frontends import outputs

LIMITS = Limits(320, 4096, 65536, 8, structured_output=True)
EMPTY = '{"type": "object", "additionalProperties": false}'
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
CLOSED, LENGTH, STOPPED = FinishReason.CLOSED, FinishReason.LENGTH, FinishReason.STOP
REASONING = ["<think>", "</think>"]
SPECIAL = ["<tool_call>", "</tool_call>", *REASONING, "<|f|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    library = byte_tokenizer()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(library)


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> Iterator[Outputs]:
    special = tokenizer.marker_texts
    outputs = Outputs(ChatOutput.of("", special, "hermes", "think"), special=special)
    yield outputs
    outputs.close()


def asked(choice: ToolChoice | None = None, structured: Structured | None = None, **more: Any) -> Spec:
    use = ToolUse((Tool("look", parameters=EMPTY, strict=True),), choice) if choice is not None else ToolUse(())
    return Spec(Chat((ChatMessage("user", "a"),), tool_use=use), structured=structured, **more)


def ends(made: Outputs, tokenizer: Tokenizer, spec: Spec, text: str) -> RequestStream:
    """Returns the stream of an output that takes all of its tokens."""
    made.check(spec, LIMITS)
    grammar = made.grammar(spec, "").grammar
    request = resolve(spec, [9, 10], LIMITS, ModelDefaults(eos_token_ids=(0,)), 0, grammar=grammar)
    parsings = made.parsings(spec, request, tokenizer)
    stream = RequestStream(spec, request, tokenizer, parsings, made.completeness(spec, request, tokenizer))
    step = StepTokens.from_outputs(outputs([(0, i, token) for i, token in enumerate(tokenizer.encode(text, False))]))
    for i in range(len(step.tokens)):
        if stream.accept(step, i) or stream.sequences[0].settle():
            return stream
    stream.end(End(0, EndReason.LENGTH))
    stream.sequences[0].settle()
    return stream


ANSWER = Structured.json_schema({"type": "array", "items": {"type": "integer"}})
TAGS = Structured.structural_tag(
    {"structures": [{"begin": "<|f|>", "schema": {"type": "integer"}, "end": ";"}], "triggers": ["<|f|>"]}
)
PLAIN_TAGS = Structured.structural_tag(
    {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": ";"}], "triggers": ["<f"]}
)

CASES = {
    "a call": (asked(ToolChoice.REQUIRED), CALL, CLOSED),
    "two calls": (asked(ToolChoice.REQUIRED), f"{CALL}\n{CALL}", CLOSED),
    "a call, cut off": (asked(ToolChoice.REQUIRED), CALL.removesuffix("</tool_call>"), LENGTH),
    "a second call, cut off": (asked(ToolChoice.REQUIRED), f"{CALL}\n{CALL[:30]}", LENGTH),
    "a call that may come": (asked(ToolChoice.AUTO), CALL, CLOSED),
    "an answer beside tools": (asked(ToolChoice.AUTO), "I look.", LENGTH),
    "a call behind an answer": (asked(ToolChoice.AUTO), f"I look.{CALL}", CLOSED),
    "a call behind reasoning": (asked(ToolChoice.AUTO), f"<think>Hm.</think>{CALL}", CLOSED),
    "reasoning, cut off": (asked(ToolChoice.AUTO), "<think>Hm.", LENGTH),
    "a call instead of a constrained answer": (asked(ToolChoice.AUTO, ANSWER), CALL, CLOSED),
    "a constrained answer": (asked(None, ANSWER), "[1, 2]", CLOSED),
    "it, cut off": (asked(None, ANSWER), "[1, 2", LENGTH),
    "it behind reasoning": (asked(None, ANSWER), "<think>[1]</think>[1, 2]", CLOSED),
    "reasoning before it": (asked(None, ANSWER), "<think>[1]", LENGTH),
    "reasoning before what may be empty": (asked(None, Structured.regex("a*")), "<think>a", LENGTH),
    "raw text": (asked(None, ANSWER, output=Output(raw_text=True)), "<think>[1]</think>[1, 2]", CLOSED),
    "no text": (asked(None, ANSWER, output=Output(text=False)), "[1, 2]", CLOSED),
    "a call without text": (asked(ToolChoice.REQUIRED, output=Output(text=False)), CALL, CLOSED),
    "it, cut off, without text": (asked(ToolChoice.REQUIRED, output=Output(text=False)), CALL[:30], LENGTH),
    "an answer beside tools without text": (asked(ToolChoice.AUTO, output=Output(text=False)), "I look.", LENGTH),
    "a raw call behind an answer": (asked(ToolChoice.AUTO, output=Output(raw_text=True)), f"I look.{CALL}", CLOSED),
    "a raw answer behind a call": (asked(ToolChoice.AUTO, output=Output(raw_text=True)), f"{CALL} So.", LENGTH),
    "a tag": (Spec("a", structured=TAGS), "so<|f|>12;", CLOSED),
    "a tag, cut off": (Spec("a", structured=TAGS), "so<|f|>12", LENGTH),
    "text behind a tag": (Spec("a", structured=TAGS), "so<|f|>12; it", LENGTH),
    "text before tags": (Spec("a", structured=PLAIN_TAGS), "so it is", LENGTH),
    "a tag of letters": (Spec("a", structured=PLAIN_TAGS), "so<f>12;", CLOSED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_closed_where_its_last_part_is_whole(made: Outputs, tokenizer: Tokenizer, name: str) -> None:
    spec, text, expected = CASES[name]
    (sequence,) = ends(made, tokenizer, spec, text).sequences
    assert sequence.finish == Finish(expected)


STOPS: dict[str, tuple[Spec, str, str | None]] = {
    "within a call": (asked(ToolChoice.AUTO, Structured.regex("[a-z ]+")), CALL, None),
    "in reasoning": (asked(None, Structured.regex("[a-z ]+")), "<think>look</think>so", None),
    "behind reasoning": (asked(None, Structured.regex("[a-z ]+")), "<think>look</think>so look", "so "),
    "in an answer that has to go on": (asked(None, Structured.regex("(a look)+")), "a look", None),
    "in a tag": (Spec("a", structured=Structured.structural_tag({
        "structures": [{"begin": "<f>", "schema": {"type": "string"}, "end": ";"}], "triggers": ["<f"],
    })), 'a<f>"look";b', None),
    "between tags": (Spec("a", structured=PLAIN_TAGS), "a<f>1;look", "a<f>1;"),
    "in an answer beside tools": (asked(ToolChoice.AUTO), "I look", "I "),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_string_ends_what_is_whole_before_it(made: Outputs, tokenizer: Tokenizer, name: str) -> None:
    spec, text, before = STOPS[name]
    stream = ends(made, tokenizer, replace(spec, stopping=Stopping(stop=("look",))), text)
    (delta,) = stream.take()
    assert delta.finish is not None
    assert (delta.finish.reason is STOPPED) is (before is not None)
    if before is not None:
        assert (delta.text, delta.finish.stop_string) == (before, "look")


def test_tags_of_special_tokens_are_searched_where_these_are_text(made: Outputs, tokenizer: Tokenizer) -> None:
    """A text without them would look as if no tag had begun."""
    spec = Spec("a", structured=TAGS, stopping=Stopping(stop=("2",)))
    with pytest.raises(InvalidRequest, match=r"needs output\.skip_special_tokens false") as refused:
        made.check(spec, LIMITS)
    assert refused.value.field == "stopping.stop"
    shown = replace(spec, output=Output(skip_special_tokens=False))
    (sequence,) = ends(made, tokenizer, shown, "so<|f|>12;").sequences
    assert sequence.finish == Finish(CLOSED)


def test_the_raw_text_of_a_model_that_reasons_is_not_searched(made: Outputs) -> None:
    """The constraint is on the answer alone, and where that begins is not read."""
    stops, raw = Stopping(stop=("2",)), Output(raw_text=True)
    with pytest.raises(InvalidRequest, match=r"does not go with output\.raw_text") as refused:
        made.check(asked(None, ANSWER, stopping=stops, output=raw), LIMITS)
    assert refused.value.field == "stopping.stop"
    made.check(Spec("a", structured=ANSWER, stopping=stops, output=raw), LIMITS)
    made.check(asked(None, stopping=stops, output=raw), LIMITS)


# The process that knows the constraint


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("structured", "complete", "not_complete"),
    [
        (Structured.json_object(), ['{"a": "é"}', "{}"], ["", "{", '{"a": "é"', "{} ", "[]"]),
        (Structured.regex("a+b?"), ["a", "aab"], ["", "b", "abb", "ac"]),
        (Structured.choice(("yes", "yesterday")), ["yes", "yesterday"], ["ye", "yest", "yes ", ""]),
        (Structured.grammar('start: "(" start ")" | "x"'), ["x", "((x))"], ["", "((x)", "(x))"]),
    ],
)
def test_complete_outputs(
    checker: GrammarChecker, structured: Structured, complete: list[str], not_complete: list[str]
) -> None:
    assert [text for text in complete if not checker.is_complete(structured, text)] == []
    assert [text for text in not_complete if checker.is_complete(structured, text)] == []


def test_a_long_output_is_answered(checker: GrammarChecker) -> None:
    text = json.dumps([{"a": "x" * 20, "b": i} for i in range(2000)])
    schema = Structured.json_schema({"type": "array", "items": {"type": "object"}})
    assert checker.is_complete(schema, text)
    assert not checker.is_complete(schema, text[:-1])


def test_a_long_output_is_asked_about_in_slices(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the process answers others."""
    asked, real = list[dict[str, Any]](), LineProcess.ask

    def ask(process: LineProcess, line: str, *more: Any) -> dict[str, Any] | None:
        asked.append(json.loads(line))
        return real(process, line, *more)

    monkeypatch.setattr(LineProcess, "ask", ask)
    monkeypatch.setattr(grammar_checker, "SLICE", 10)
    pairs, text = Structured.regex("(ab)*"), "ab" * 17
    checker.is_complete(pairs, "")  # starts the process
    asked.clear()
    assert checker.complete_ends(pairs, text, range(35)) == list(range(0, 35, 2))
    assert [len(line["output"]) for line in asked] == [9, 19, 29, 34]
    asked.clear()
    assert checker.complete_ends(pairs, "ab" + "a" * 32, range(35)) == [0, 2]
    assert len(asked) == 1, "no longer text is an output"


def test_many_stop_strings_of_a_prefix_are_one_question(
    made: Outputs, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[int](), GrammarChecker.complete_ends

    def complete_ends(self: GrammarChecker, constraint: Constraint, text: str, ends: Sequence[int]) -> list[int]:
        asked.append(len(ends))
        return real(self, constraint, text, ends)

    monkeypatch.setattr(GrammarChecker, "complete_ends", complete_ends)
    monkeypatch.setattr(GrammarChecker, "is_complete", None)
    spec = with_prefix(tokenizer, ANSWER, "[" + "1," * 200)
    assert not prefix_stream(made, tokenizer, spec).ended
    assert asked == [200]
    words = Structured.regex("[a-z]+(,[a-z]+)*;,.*")
    stream = prefix_stream(made, tokenizer, with_prefix(tokenizer, words, "a,b,c;,d,e"))
    (sequence,) = stream.sequences
    assert (sequence.finish, sequence.token_count) == (Finish(STOPPED, stop_string=","), 9)


def with_prefix(tokenizer: Tokenizer, structured: Structured, prefix: str) -> Spec:
    known = tuple(tokenizer.encode(prefix, False))
    return Spec("a", structured=structured, stopping=Stopping(stop=(",",)), output_prefix=known)


def prefix_stream(made: Outputs, tokenizer: Tokenizer, spec: Spec) -> RequestStream:
    request = resolve(
        spec, [9, 10], LIMITS, ModelDefaults(eos_token_ids=(0,)), 0, grammar=made.grammar(spec, "").grammar
    )
    return RequestStream(spec, request, tokenizer, (), made.completeness(spec, request, tokenizer))


def test_what_the_process_fails_on_is_no_answer(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarUnchecked, match="could not be compared with its constraint"):
        checker.is_complete(Structured.regex("(a"), "a")
    with pytest.raises(GrammarUnchecked, match="could not be compared with its constraint"):
        checker.is_complete(Structured.regex("a"), "\ud800")
    assert checker.is_complete(Structured.regex("a"), "a")


def begins_with_reasoning(made: Outputs, tokenizer: Tokenizer, messages: list[ChatMessage], before: str = "") -> bool:
    """Whether the last message, which is continued behind what a template writes before it, goes on with reasoning."""
    asked = Spec(Chat(tuple(messages), add_generation_prompt=False, continue_final_message=True))
    texts = ["".join(map(str, one.parts)) for one in messages]
    prompt = f"[user]{texts[0]}[assistant]{before}{texts[1]}"
    return made.form.thinks(made.prompt_end(asked, tokenizer.encode(prompt, False), tokenizer), continues=True)


@pytest.mark.parametrize(
    ("before", "text", "reasons"),
    [
        ("", "<think>\n" + "so then " * 200, True),
        ("<think>\n", "so then " * 200, True),
        ("", "<think>no</think>" + "so then " * 200, False),
        ("<think></think>\n", "so then", False),
        ("", "so then", False),
        ("", ("<think>\nLet me ", "see"), True),
        ("", " ", False),
        ("<think>\n", " ", True),
    ],
)
def test_reasoning_that_is_continued_was_begun_in_the_message_itself(
    made: Outputs, tokenizer: Tokenizer, before: str, text: str | tuple[str, ...], reasons: bool
) -> None:
    for question in ("a", "What does <think> do?", "And </think>?"):
        messages = [ChatMessage("user", question), ChatMessage("assistant", text)]
        assert begins_with_reasoning(made, tokenizer, messages, before) is reasons


def test_calls_that_may_not_be_are_no_tags(made: Outputs, tokenizer: Tokenizer) -> None:
    (call,) = made.form.call_tokens
    tag = {"begin": "<tool_call>", "schema": {"type": "boolean"}, "end": "</tool_call>"}
    tags = Structured.structural_tag({"structures": [tag], "triggers": ["<tool_call>"]})
    assert made.banned_calls(asked(ToolChoice.NONE)) == (call,)
    assert made.banned_calls(asked(ToolChoice.NONE, tags)) == ()
    assert made.banned_calls(asked(ToolChoice.AUTO)) == ()
