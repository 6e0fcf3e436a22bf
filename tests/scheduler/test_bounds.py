"""Bounds of what is tokenized, detokenized and rendered."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.bounds import check_chat, check_text, check_token_ids, most_bytes
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.prompts import MOST_MESSAGES, Chat, ChatMessage

LIMITS = Limits(vocabulary=100, context=64, pool_tokens=256, sequences=8)
MOST = most_bytes(LIMITS.longest)


def chat(content: str = "Hi", **arguments: str) -> Chat:
    return Chat((ChatMessage("user", content),), tuple(arguments.items()))


def test_most_bytes_grow_with_the_context() -> None:
    assert MOST == 2**16
    assert most_bytes(2**20) == 16 * 2**20


def test_arguments_become_values() -> None:
    given = chat(a="false", _b1='{"c": [1, null]}', d='"é"', e="1e3")
    assert check_chat(given, LIMITS) == {"a": False, "_b1": {"c": [1, None]}, "d": "é", "e": 1000.0}


@pytest.mark.parametrize(
    ("conversation", "field", "reason"),
    [
        (chat("x" * MOST), "chat", f"at most {MOST} bytes"),
        (chat("é" * (MOST // 2)), "chat", f"at most {MOST} bytes"),
        (chat(a='"' + "x" * MOST + '"'), "chat", f"at most {MOST} bytes"),
        (Chat((ChatMessage("x" * MOST, "y"),)), "chat", f"at most {MOST} bytes"),
        (chat("\ud800"), "chat.messages[0].parts", "is no Unicode text"),
        (Chat((ChatMessage("\ud800", ""),)), "chat.messages[0].role", "is no Unicode text"),
        (chat(a="\ud800"), "chat.template_arguments[a]", "is no Unicode text"),
        (chat(a=""), "chat.template_arguments[a]", "must be a JSON value"),
        (chat(a="true false"), "chat.template_arguments[a]", "must be a JSON value"),
        (chat(a="[" * 60_000), "chat.template_arguments[a]", "must be a JSON value"),
        (chat(a="[NaN]"), "chat.template_arguments[a]", "must be a JSON value: NaN is none"),
        (chat(a="1" * 5000), "chat.template_arguments[a]", "must be a JSON value"),
        (chat(**{"": "1"}), "chat.template_arguments[]", "its name must be"),
        (chat(**{"1a": "1"}), "chat.template_arguments[1a]", "its name must be"),
        (chat(**{"a" * 65: "1"}), f"chat.template_arguments[{'a' * 64}]", "its name must be"),
        (chat(tools="[]"), "chat.template_arguments[tools]", "is what every template is given"),
        (chat(add_generation_prompt="false"), "chat.template_arguments[add_generation_prompt]", "every template"),
    ],
)
def test_a_conversation_that_is_refused_names_the_field(conversation: Chat, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_chat(conversation, LIMITS)
    assert refused.value.field == field
    assert reason in refused.value.reason


def test_a_conversation_has_messages_and_each_a_role() -> None:
    for messages, field in (
        ((), "chat.messages"),
        ((ChatMessage("user", ""),) * (MOST_MESSAGES + 1), "chat.messages"),
        ((ChatMessage("user", ""), ChatMessage("", "x")), "chat.messages[1].role"),
        ((ChatMessage(None, "x"),), "chat.messages[0].role"),
        ((ChatMessage("user", None),), "chat.messages[0].content"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            Chat(messages)
        assert refused.value.field == field
    assert check_chat(Chat((ChatMessage("user", ""),) * MOST_MESSAGES), LIMITS) == {}


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), st.text(max_size=20))
def test_nothing_but_invalid_request_is_raised(arguments: dict[str, str], content: str) -> None:
    with suppress(InvalidRequest):
        assert check_chat(chat(content, **arguments), LIMITS).keys() == arguments.keys()


def test_ids_and_text() -> None:
    check_token_ids([0, 99] * 32, LIMITS)
    for ids, field in (([1] * 65, "token_ids"), ([1, 100], "token_ids[1]"), ([-1], "token_ids[0]")):
        with pytest.raises(InvalidRequest) as refused:
            check_token_ids(ids, LIMITS)
        assert refused.value.field == field
    with pytest.raises(InvalidRequest, match="chat is '65537 bytes'"):
        check_text("x" * (MOST + 1), LIMITS, "chat")
