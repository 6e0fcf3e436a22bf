"""Structural tags at a frontend: special tokens of its model, beside tools, and how long they are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.outputs import Outputs
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.parameters import Stopping
from scheduler.prompts import Chat, ChatMessage
from scheduler.settings import RequestLimits
from scheduler.spec import Spec
from scheduler.structured import Structured
from scheduler.tools import NO_TOOLS, Tool, ToolChoice, ToolUse
from tests.support.chats import TOOLED
from tests.support.checkpoints import byte_tokenizer

LIMITS = Limits(320, 256, 4096, 8, RequestLimits(), structured_output=True)
SPECIAL = {5: "<think>", 6: "</think>", 7: "<|call|>", 8: "<|other|>"}
TAG = {"begin": "<|call|>n", "schema": {"type": "boolean"}, "end": "</think>"}


@pytest.fixture(scope="module")
def outputs() -> Iterator[Outputs]:
    made = Outputs(ChatOutput.of(TOOLED, {i: SPECIAL[i] for i in (5, 6)}), special=SPECIAL, ends=(9, 8))
    yield made
    made.close()


def spec(tag: Any, tool_use: ToolUse | None = None) -> Spec:
    structured = Structured.structural_tag({"structures": [tag], "triggers": [tag["begin"]]})
    prompt = "a" if tool_use is None else Chat((ChatMessage("user", "a"),), tool_use=tool_use)
    return Spec(prompt, structured=structured)


@pytest.mark.parametrize("tool_use", [None, NO_TOOLS])
def test_special_tokens_of_tags_are_the_models(outputs: Outputs, tool_use: ToolUse | None) -> None:
    asked = spec(TAG, tool_use)
    assert not outputs.knows_grammar(asked)
    checked = outputs.grammar(asked, "")
    assert all(f"<[{i}]>" in checked.grammar for i in (6, 7))
    assert "<[8]>" not in checked.grammar
    assert outputs.lengths(checked, Tokenizer(byte_tokenizer()))[0] == len("^ntrue^")


def test_letters_in_a_schema_are_no_special_token(outputs: Outputs) -> None:
    schema = {"const": "<|call|>"}
    checked = outputs.grammar(spec({"begin": "<f>", "schema": schema, "end": "</f>"}), "")
    assert "<[7]>" not in checked.grammar


def test_they_do_not_go_with_tools_that_may_be_called(outputs: Outputs) -> None:
    tools = (Tool("weather"),)
    outputs.check(spec(TAG, ToolUse(tools, ToolChoice.NONE)), LIMITS)
    with pytest.raises(InvalidRequest, match="does not go with tools that may be called") as refused:
        outputs.check(spec(TAG, ToolUse(tools)), LIMITS)
    assert refused.value.field == "structured_output.structural_tag"


CHAT = Chat((ChatMessage("user", "a"),))
WORD = Structured.regex("a+")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Spec("a", structured=WORD, stopping=Stopping(stop_token_ids=(7, 44))), "is a token of text"),
        (replace(spec(TAG), stopping=Stopping(stop_token_ids=(8, 7))), r"is '<\|call\|>', which an output"),
        (Spec(CHAT, structured=WORD, stopping=Stopping(stop_token_ids=(7, 6))), "is '</think>', which an output"),
    ],
)
def test_a_stop_token_that_an_output_may_have_in_it_is_refused(outputs: Outputs, asked: Spec, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        outputs.grammar(asked, "")
    assert refused.value.field == "stopping.stop_token_ids[1]"


def test_special_tokens_and_end_tokens_may_be_stop_tokens(outputs: Outputs) -> None:
    for asked in (Spec("a", structured=WORD), Spec(CHAT, structured=WORD)):
        assert outputs.grammar(replace(asked, stopping=Stopping(stop_token_ids=(7, 8, 9))), "").grammar
    assert not outputs.grammar(Spec("a", stopping=Stopping(stop_token_ids=(44,))), "").grammar


SIZE = 320  # more than its tokens
EMPTY = '{"type": "object", "additionalProperties": false}'
ADDED = ["<tool_call>", "</tool_call>", "[CALL]", "<half", "<|odd one|>"]


def with_added(special: bool) -> Tokenizer:
    library = byte_tokenizer()
    library.add_tokens([AddedToken(text, special=special, normalized=False) for text in ADDED])
    return Tokenizer(library)


@pytest.mark.parametrize("special", [False, True])
def test_markers_are_the_tokens_that_llguidance_takes_for_special(special: bool) -> None:
    tokenizer = with_added(special)
    vocabulary = tokenizer.vocabulary(SIZE, (0,))
    added = {i: text for i in range(SIZE) if (text := tokenizer.text_of(i)) in ("<|end|>", *ADDED)}
    assert tokenizer.marker_texts == {i: text for i, text in added.items() if vocabulary.is_special_token(i)}
    assert len(tokenizer.marker_texts) == (6 if special else 4)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("begin", "end"), [("<tool_call>", "</tool_call>"), ("[CALL]", ";"), ("<|odd one|>x", "[CALL]")]
)
def test_a_model_writes_its_own_tokens(begin: str, end: str, special: bool) -> None:
    """Also those that its tokenizer does not call special, as Qwen's <tool_call>."""
    tokenizer = with_added(special)
    made = Outputs(special=tokenizer.marker_texts)
    try:
        checked = made.grammar(spec({"begin": begin, "schema": {"type": "boolean"}, "end": end}), "")
    finally:
        made.close()
    matcher = LLMatcher(tokenizer.vocabulary(SIZE, (0,)), checked.grammar, log_level=0)
    ids = tokenizer.encode(f"so {begin}true{end} it is", False)
    assert {tokenizer.text_of(i) for i in ids} & {*ADDED}
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("special", [False, True])
def test_a_model_calls_tools_in_its_own_tokens(special: bool) -> None:
    """The mask has the token of a mark, and the parser knows it: Qwen's tokenizers do not call it special."""
    tokenizer = with_added(special)
    markers = tokenizer.marker_texts
    made = Outputs(ChatOutput.of("", markers, "hermes", "none"), special=markers)
    call = '{"name": "look", "arguments": {}}'
    use = ToolUse((Tool("look", parameters=EMPTY),), ToolChoice.REQUIRED)
    asked = Spec(Chat((ChatMessage("user", "a"),), tool_use=use))
    try:
        checked = made.grammar(asked, "")
    finally:
        made.close()
    matcher = LLMatcher(tokenizer.vocabulary(SIZE, (0,)), checked.grammar, log_level=0)
    ids = tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", False)
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("key", ["begin", "end"])
def test_an_end_token_is_part_of_no_tag(outputs: Outputs, key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"has the model's end token '<\|other\|>'") as refused:
        outputs.check(spec(TAG | {key: "a<|other|>"}), LIMITS)
    assert refused.value.field == f"structured_output.structural_tag.structures[0].{key}"


def test_a_content_that_cannot_be_kept_is_named(outputs: Outputs) -> None:
    with pytest.raises(InvalidRequest, match="'its content': Unimplemented keys") as refused:
        outputs.grammar(spec({"begin": "<f>", "schema": {"not": {}}, "end": "</f>"}), "")
    assert refused.value.field == "structured_output.structural_tag.structures[0].schema"
