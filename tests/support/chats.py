"""Chat templates in the manner of well-known models', and conversations for them."""

import json
from pathlib import Path
from typing import Any

from tests.support.checkpoints import byte_tokenizer

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

TOOLED = """{% if tools %}Write {"name": ..., "arguments": ...} within <tool_call></tool_call>:
{% for tool in tools %}{{ tool.function.name }} {{ tool.function.parameters | tojson }}
{% endfor %}{% endif %}
{% for message in messages %}
{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call> ({{ call.id }}){% endfor %}{% if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}

{% endfor %}
<think>
{% if not enable_thinking %}

</think>

{% endif %}"""
"""Hermes' form of calls. Reasoning is off unless the argument enable_thinking is given."""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}{{- message.tool_calls }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

ODDITIES = """{{ bos_token }}{{ unk_token }}|{{ pad_token is defined }}|{{ sep_token }}|{{ image_token }}
{{ tools is none }}
{% for message in messages %}
    {% if message.role == 'skipped' %}{% continue %}{% endif %}
    {% generation %}
{{ {'text': message.content, 'z': 1, 'a': [none, true, 1.5]} | tojson(indent=2, sort_keys=true) }}
    {% endgeneration %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% set d = dict(a=1, b=2) %}{{ d.items() | list }}{{ documents }}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}
{{ messages | map(attribute='role') | join(',') }} {{ messages[-1].content | upper | e }} {{ '%s%%' | format(5) }}

"""

TEMPLATES = {
    "chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR,
    "oddities": ODDITIES,
}  # fmt: skip


def conversation(*turns: str) -> list[dict[str, str]]:
    """turns: "role: content"."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


CONVERSATIONS = {
    "one": conversation("user: Hello, who are you?"),
    "system": conversation("system: Be brief.\nBe kind.", "user: Hi"),
    "turns": conversation("user: 1", "assistant: 2", "user: 3", "assistant: 4", "user: 5"),
    "unicode": conversation("system: Ünï — 日本語", "user: 👩‍👩‍👧 a\x00b\u2028c\r\n\ttab", "assistant: ☃", "user: é"),
    "empty": conversation("user: ", "assistant: ", "user: "),
    "markup": conversation("user: <b>&amp; {{ 1 }} {% if %} \"quoted\" 'single' \\n <|im_end|></s>"),
    "thought": conversation("user: why", "assistant: <think>\nhm\n</think>\n\nso", "user:  spaces ", "assistant: x"),
    "odd": conversation("tool: a result", "skipped: b", "user: c"),
}

TOKENS = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>"},
    "pad_token": None,
    "unk_token": "<unk>",
}


def write_tokenizer(directory: Path, **config: Any) -> Path:
    """tokenizer.json and a tokenizer_config.json of this content."""
    directory.mkdir(exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
