"""Formats are chosen by what published templates have in them."""

import pytest

from model.errors import CheckpointError
from model.inputs.chat_output.chat_output import ChatOutput, call_ids
from model.inputs.chat_output.families import (
    REASONING_FORMATS,
    TOOL_FORMAT_NAMES,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)

TEMPLATES = {
    "harmony": "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>",
    "gemma4": "{{ tools }}<|tool_call>call:<|channel>thought",
    "deepseek_v4": "{{ tools }}<｜DSML｜tool_calls></think>",
    "deepseek_v32": "{{ tools }}<｜DSML｜function_calls></think>",
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜>```json",
    "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜><think></think>",
    "kimi_k2": "{{ tools }}<|tool_calls_section_begin|>",
    "minimax_m2": "{{ tools }}<minimax:tool_call><think></think>",
    "mistral_v11": "{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]",
    "mistral": "{{ tools }}[TOOL_CALLS][ARGS][THINK]",
    "mistral_v3": "{{ tools }}[TOOL_CALLS] [",
    "qwen3_coder": "{{ tools }}<tool_call>\\n<function=example_function_name>\\n<parameter=",
    "glm45": "{{ tools }}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "glm47": "{{ tools }}<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>",
    "hermes": "{{ tools }}within <tool_call></tool_call> XML tags<think></think>",
    "hunyuan": '{{ tools }}<tool_calls>[{"name": "func_name1"',
    "nemotron": "{{ tools }}<TOOLCALL>[",
    "lfm2": "{{ tools }}<|tool_list_start|>",
    "phi4_mini": "{{ tools }}<|tool|>...<|/tool|>",
    "functools": "{{ tools }}functools[",
    "granite": "{{ tools }}<|start_of_role|>followed by <|tool_call|>",
    "olmo3": "{{ tools }}<function_calls>",
    "pythonic": "{{ tools }}<|header_start|>[func_name1(",
    "llama3": '{{ tools }}<|start_header_id|>{"name": function name, "parameters": dictionary}',
    "seed_oss": "{{ tools }}<seed:tool_call><seed:think>",
    "functiongemma": "{{ tools }}<start_function_call>call:",
}


def test_every_format_has_a_template() -> None:
    assert set(TEMPLATES) == set(TOOL_FORMAT_NAMES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_the_format(name: str) -> None:
    found = tool_format("auto", TEMPLATES[name])
    assert found is not None
    assert found.name == name
    assert (found.opening + found.begin).startswith(found.trigger) or found.at_start
    assert tool_format("none", TEMPLATES[name]) is None
    assert tool_format("auto", TEMPLATES[name].replace("tools", "")) is None or "tools" in TEMPLATES[name][7:]
    named = tool_format(name, "")
    assert named == found


def test_reasoning() -> None:
    wanted = {"harmony": "harmony", "gemma4": "gemma4", "mistral": "mistral", "seed_oss": "seed_oss", "hermes": "think"}
    for name, template in TEMPLATES.items():
        found = reasoning_format("auto", template)
        if name in wanted:
            assert found is not None
            assert found.name == wanted[name]
    assert reasoning_format("auto", "plain") is None
    assert reasoning_format("auto", "<answer></think>") == reasoning_format("hunyuan", "")
    assert reasoning_format("auto", "<response></think>") == reasoning_format("ernie", "")
    assert len(REASONING_FORMATS) == 7
    assert len(TOOL_FORMATS) > 25


def test_unknown_names_are_refused() -> None:
    with pytest.raises(CheckpointError, match="--tool-format"):
        tool_format("other", "")
    with pytest.raises(CheckpointError, match="--reasoning-format"):
        ChatOutput.of("", {}, "none", "other")


def test_tokens_that_begin_calls() -> None:
    special = {7: "<tool_call>", 8: "</tool_call>", 9: "<|channel|>", 10: "[TOOL_CALLS]"}
    for name, tokens in (("hermes", (7,)), ("mistral", (10,)), ("harmony", ()), ("granite", (7,)), ("llama3", ())):
        assert ChatOutput.of("", special, name).call_tokens == tokens
    assert ChatOutput.of("", {}, "hermes").call_tokens == ()
    assert ChatOutput.of("", special, "none").call_tokens == ()


def test_ids_of_calls() -> None:
    plain, mistral = tool_format("hermes", ""), tool_format("mistral", "")
    made = [call_ids(form, key, index)(number)
            for form in (plain, mistral) for key in (b"a", b"b") for index in (0, 1) for number in (0, 1)]  # fmt: skip
    assert len(set(made)) == len(made)
    assert all(len(one) == 9 and one.isalnum() for one in made[8:])
    assert call_ids(plain, b"a", 0)(0) == made[0]
