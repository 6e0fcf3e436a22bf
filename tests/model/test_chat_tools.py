"""How a template reads calls: as mappings or as JSON, with empty content or none, in the manner of published ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.inputs.chat import ChatTemplate
from model.inputs.chat_renderer import ChatRenderer
from model.inputs.chat_tools import MAPPINGS, CallsRead, calls_read, template_fields, template_tools
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
        ("{{ raise_exception('no') }}", MAPPINGS),
        (DEEPSEEK, CallsRead(text=True, none=True)),
        (DEEPSEEK_NEWER, CallsRead(text=True)),
    ],
)
def test_a_template_says_what_it_reads(source: str, form: CallsRead) -> None:
    with renderer(source) as made:
        assert calls_read(made) == form
        call = ToolCall("1", "get", '{"a": "b"}')
        turn = {"role": "assistant", "content": ""} | template_fields(ChatMessage("assistant", "", (call,)), form, "m")
        if "raise" not in source and source != NO_CALLS:
            assert '"a": "b"' in made.render([turn], {}, 1000)


def test_fields() -> None:
    assert template_fields(ChatMessage("user", "a"), MAPPINGS, "m") == {}
    made = template_fields(ChatMessage("assistant", "a", reasoning="so"), MAPPINGS, "m")
    assert made == {"reasoning_content": "so", "reasoning": "so", "thinking": "so"}
    assert template_fields(ChatMessage("tool", "a", tool_call_id="i", name="n"), MAPPINGS, "m") == {
        "tool_call_id": "i",
        "name": "n",
    }
    with pytest.raises(InvalidRequest) as refused:
        template_fields(ChatMessage("assistant", "", (ToolCall("i", "n", "[]"),)), CallsRead(text=True), "m")
    assert refused.value.field == "m.tool_calls[0].arguments"
    assert template_tools([]) is None
    (tool,) = template_tools([Tool("n")]) or ()
    assert tool == {"type": "function", "function": {"name": "n", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(InvalidRequest) as named:
        template_tools([Tool("n"), Tool("m", parameters="{")])
    assert named.value.field == "chat.tools[1].parameters"
