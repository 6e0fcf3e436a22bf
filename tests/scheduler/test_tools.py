"""Tools of a conversation: what is refused, and by which name."""

from collections.abc import Callable

import pytest

from scheduler.bounds import check_chat
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.parameters import Stopping
from scheduler.prompts import Chat, ChatMessage
from scheduler.resolve import check_tool_use
from scheduler.settings import RequestLimits
from scheduler.spec import Spec
from scheduler.structured import Structured
from scheduler.tools import MOST_CALLS, MOST_TOOLS, Tool, ToolCall, ToolChoice, ToolUse, object_of

ONE = Tool("one")
LIMITS = Limits(320, 256, 4096, 8, RequestLimits(structured_output_bytes=100), structured_output=True)


def asked(tool_use: ToolUse, **more: object) -> Spec:
    return Spec(Chat((ChatMessage("user", "a"),), tool_use=tool_use), **more)  # type: ignore[arg-type]


def message(**fields: object) -> Chat:
    return Chat((ChatMessage("user", "a"), ChatMessage("assistant", "", **fields)))  # type: ignore[arg-type]


REQUIRED = ToolUse((ONE,), ToolChoice.REQUIRED)
CALL = ToolCall("i", "one", "{}")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ToolUse((ONE, Tool("two words"))), "chat.tools[1].name"),
        (lambda: ToolUse((Tool(""),)), "chat.tools[0].name"),
        (lambda: ToolUse((Tool("a" * 65),)), "chat.tools[0].name"),
        (lambda: ToolUse((Tool('a": <|x|>'),)), "chat.tools[0].name"),
        (lambda: ToolUse((ONE, ONE)), "chat.tools[1].name"),
        (lambda: ToolUse((ONE,) * (MOST_TOOLS + 1)), "chat.tools"),
        (lambda: ToolUse((), ToolChoice.REQUIRED), "chat.tool_choice"),
        (lambda: ToolUse((ONE,), ToolChoice.AUTO, "one"), "chat.tool_choice"),
        (lambda: ToolUse((ONE,), ToolChoice.REQUIRED, "other"), "chat.tool_name"),
        (lambda: Chat((ChatMessage("user", "a", (CALL,)),)), "chat.messages[0].tool_calls"),
        (lambda: Chat((ChatMessage("user", "a", reasoning="b"),)), "chat.messages[0].reasoning"),
        (lambda: message(tool_calls=(CALL,) * (MOST_CALLS + 1)), "chat.messages[1].tool_calls"),
        (lambda: check_chat(message(tool_calls=(ToolCall("i", "one", "\ud800"),)), LIMITS),
         "chat.messages[1].tool_calls[0].arguments"),
        (lambda: check_chat(message(reasoning="\ud800"), LIMITS), "chat.messages[1].reasoning"),
        (lambda: check_chat(message(reasoning="a" * 10**6), LIMITS), "chat"),
        (lambda: check_chat(asked(ToolUse((Tool("a", "\ud800"),))).prompt, LIMITS), "chat.tools[0].description"),  # type: ignore[arg-type]
        (lambda: object_of("[1]", "x"), "x"),
        (lambda: object_of("{", "x"), "x"),
        (lambda: object_of('{"a": NaN}', "x"), "x"),
        (lambda: object_of("[" * 10**5, "x"), "x"),
        (lambda: check_tool_use(asked(REQUIRED, stopping=Stopping(ignore_eos=True)), REQUIRED, LIMITS),
         "stopping.ignore_eos"),
        (lambda: check_tool_use(asked(REQUIRED), ToolUse((Tool("a", parameters="a" * 101),)), LIMITS), "chat.tools"),
        (lambda: check_tool_use(asked(REQUIRED), REQUIRED, Limits(320, 256, 4096, 8)), "chat.tool_choice"),
        (lambda: asked(ToolUse(), reasoning_tokens=-1), "reasoning.max_tokens"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.field == field


def test_what_is_offered_and_what_is_enforced() -> None:
    strict = Tool("two", strict=True)
    assert ToolUse((ONE, strict)).offered == (ONE, strict)
    assert ToolUse((ONE, strict), ToolChoice.NONE).offered == ()
    assert ToolUse((ONE, strict), ToolChoice.REQUIRED, "two").offered == (strict,)
    assert not ToolUse((ONE,)).constrains
    assert not ToolUse((ONE, strict), ToolChoice.NONE).constrains
    assert ToolUse((ONE, strict)).constrains
    assert ToolUse((ONE,), ToolChoice.REQUIRED).constrains
    assert object_of("", "x") == {}
    assert Structured.json_object() is not None
    check_tool_use(asked(REQUIRED, stopping=Stopping(stop=("a",))), REQUIRED, LIMITS)
