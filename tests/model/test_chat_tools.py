"""How a template reads calls: as mappings or as JSON, with empty content or none, in the manner of published ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.inputs.chat import ChatTemplate
from model.inputs.chat_contents import Contents, template_messages
from model.inputs.chat_renderer import ChatRenderer
from model.inputs.chat_tools import MAPPINGS, TurnForm, template_fields, template_tools, turn_form
from scheduler.invalid import InvalidRequest
from scheduler.prompts import ChatMessage
from scheduler.tools import Tool, ToolCall

QWEN = """{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{% endfor %}{% endfor %}"""
DEEPSEEK = """{% for m in messages %}
{% if m['content'] is none %}{% for call in m['tool_calls'] %}
{{ call['function']['name'] + '```json' + call['function']['arguments'] + '```' }}
{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"""
DEEPSEEK_NEWER = DEEPSEEK.replace("m['content'] is none", "m['tool_calls']")
EITHER = QWEN.replace(
    "{{ call.function.arguments | tojson }}",
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
)
# Gemma 4's, which takes a text too, and writes it within braces of its own.
GEMMA = """{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}
<|tool_call>call:{{ call.function.name }}{
{%- if call.function.arguments is mapping %}
{%- for key, value in call.function.arguments | dictsort %}{{ key }}:<|"|>{{ value }}<|"|>{% endfor %}
{%- else %}{{ call.function.arguments }}{% endif -%}
}<tool_call|>{% endfor %}{% endfor %}"""
HARMONY = """{% for m in messages %}{% if m.tool_calls %}
{% if m.content and m.thinking %}{{ raise_exception("not both") }}{% endif %}
<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
to=functions.{{ m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}
{% else %}{{ m.content }}{% endif %}{% endfor %}"""
KNOWN = """{% for m in messages if m.role in ("system", "user", "assistant") %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
STRICT = """{% for m in messages %}{% if m.role == "developer" %}{{ raise_exception("unknown role") }}{% endif %}
{{ m.role }}: {{ m.content }}{% endfor %}"""
NO_CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@contextmanager
def renderer(source: str) -> Iterator[ChatRenderer]:
    made = ChatRenderer(ChatTemplate(source, Path("chat_template.jinja"), {}))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN, MAPPINGS),
        (EITHER, MAPPINGS),
        (NO_CALLS, MAPPINGS),
        ("{{ raise_exception('no') }}", TurnForm(developer=False)),
        (DEEPSEEK, TurnForm(text=True, none=True)),
        (DEEPSEEK_NEWER, TurnForm(text=True)),
        (GEMMA, MAPPINGS),
        (HARMONY, TurnForm(either=True)),
    ],
)
def test_a_template_says_what_it_reads(source: str, form: TurnForm) -> None:
    with renderer(source) as made:
        assert turn_form(made, Contents.EITHER, True) == form
        call = ToolCall("1", "get", '{"a": "b"}')
        turn = {"role": "assistant", "content": ""} | template_fields(ChatMessage("assistant", "", (call,)), form, "m")
        if not source.startswith("{{") and source != NO_CALLS:
            assert ('a:<|"|>b<|"|>}' if source == GEMMA else '"a": "b"') in made.render([turn], {}, 1000)


def rendered(source: str, *messages: ChatMessage) -> str:
    with renderer(source) as made:
        form = turn_form(made, Contents.EITHER, True)
        written = template_messages(messages, Contents.EITHER)
        turns = [turn | template_fields(one, form, "m") for turn, one in zip(written, messages, strict=True)]
        return made.render(turns, {}, 1000)


def test_a_call_has_its_reasoning_where_a_template_refuses_both() -> None:
    """gpt-oss writes a preamble beside its reasoning, and its template refuses it in the next request."""
    call = ToolCall("1", "get", '{"a": "b"}')
    both = rendered(HARMONY, ChatMessage("assistant", "I look.", (call,), reasoning="a look"))
    assert "analysis<|message|>a look<|end|>" in both
    assert "analysis<|message|>I look.<|end|>" in rendered(HARMONY, ChatMessage("assistant", "I look.", (call,)))
    assert "so" in rendered(HARMONY, ChatMessage("assistant", "so", reasoning="a look")), "a turn without calls"


@pytest.mark.parametrize("source", [KNOWN, STRICT])
def test_a_developer_is_the_system_where_a_template_knows_no_developers(source: str) -> None:
    messages = ChatMessage("developer", "Be brief."), ChatMessage("user", "hi")
    assert "system: Be brief." in rendered(source, *messages)
    assert "developer: Be brief." in rendered(KNOWN.replace('"system"', '"system", "developer"'), *messages)


def test_fields() -> None:
    assert template_fields(ChatMessage("user", "a"), MAPPINGS, "m") == {}
    made = template_fields(ChatMessage("assistant", "a", reasoning="so"), MAPPINGS, "m")
    assert made == {"reasoning_content": "so", "reasoning": "so", "thinking": "so"}
    assert template_fields(ChatMessage("tool", "a", tool_call_id="i", name="n"), MAPPINGS, "m") == {
        "tool_call_id": "i",
        "name": "n",
    }
    with pytest.raises(InvalidRequest) as refused:
        template_fields(ChatMessage("assistant", "", (ToolCall("i", "n", "[]"),)), TurnForm(text=True), "m")
    assert refused.value.field == "m.tool_calls[0].arguments"
    assert template_tools([]) is None
    (tool,) = template_tools([Tool("n")]) or ()
    assert tool == {"type": "function", "function": {"name": "n", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(InvalidRequest) as named:
        template_tools([Tool("n"), Tool("m", parameters="{")])
    assert named.value.field == "chat.tools[1].parameters"
