"""The families' formats, and which one a chat template goes with.

From the models' templates and from the parsers of vLLM, SGLang and llama.cpp.
"""

from typing import TypeVar

from model.errors import CheckpointError
from model.inputs.chat_output.formats import Arguments, ParameterTags, ReasoningFormat, ToolFormat

T = TypeVar("T", ToolFormat, ReasoningFormat)

NAME_AND_ARGUMENTS = ("name", "arguments")
FUNCTION_TAGS = ParameterTags("<parameter=", ">\n", "\n</parameter>\n", indented=True)
DSML_TAGS = ParameterTags('<｜DSML｜parameter name="', '" string="', "</｜DSML｜parameter>\n", typed='">')


def json_list(
    name: str, trigger: str, opening: str, closing: str, id_length: int = 0, aliases: tuple[str, ...] = ()
) -> ToolFormat:
    """Returns a form of calls in one JSON list."""
    return ToolFormat(
        name=name,
        trigger=trigger,
        opening=opening,
        begin="",
        end="",
        between=", ",
        closing=closing,
        keys=NAME_AND_ARGUMENTS,
        id_length=id_length,
        aliases=aliases,
    )


LFM2 = ToolFormat(
    name="lfm2",
    trigger="<|tool_call_start|>",
    opening="<|tool_call_start|>[",
    begin="",
    named="(",
    end=")",
    between=", ",
    closing="]<|tool_call_end|>",
    arguments=Arguments.PYTHON,
)

TOOL_FORMATS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    # Each with texts of which a template of the family has all. The first that fits counts.
    (
        ToolFormat(
            name="harmony",
            trigger="<|channel|>commentary to=functions.",
            begin="<|channel|>commentary to=functions.",
            named=" <|constrain|>json<|message|>",
            end="",
            skips_to="<|message|>",
            other_triggers=(" to=functions.", "<|channel|>analysis to=functions."),
            one=True,  # a call ends the turn
        ),
        ("<|channel|>analysis<|message|>",),
    ),
    (
        ToolFormat(
            name="deepseek_v4",
            trigger="<｜DSML｜tool_calls>",
            opening="<｜DSML｜tool_calls>\n",
            begin='<｜DSML｜invoke name="',
            named='">\n',
            end="</｜DSML｜invoke>\n",
            closing="</｜DSML｜tool_calls>",
            arguments=Arguments.TAGGED,
            tags=DSML_TAGS,
        ),
        ("｜DSML｜", "tool_calls>"),
    ),
    (
        ToolFormat(
            name="deepseek_v32",
            trigger="<｜DSML｜function_calls>",
            opening="<｜DSML｜function_calls>\n",
            begin='<｜DSML｜invoke name="',
            named='">\n',
            end="</｜DSML｜invoke>\n",
            closing="</｜DSML｜function_calls>",
            arguments=Arguments.TAGGED,
            tags=DSML_TAGS,
        ),
        ("｜DSML｜", "function_calls>"),
    ),
    (
        ToolFormat(
            name="deepseek_v3",
            trigger="<｜tool▁calls▁begin｜>",
            opening="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            named="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
            between="\n",
            closing="<｜tool▁calls▁end｜>",
        ),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    (
        ToolFormat(
            name="deepseek_v31",
            trigger="<｜tool▁calls▁begin｜>",
            opening="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>",
            named="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
        ("<｜tool▁calls▁begin｜>",),
    ),
    (
        ToolFormat(
            name="kimi_k2",
            trigger="<|tool_calls_section_begin|>",
            opening="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>functions.",
            id_begin=":",
            id_pattern="[0-9]{1,4}",
            call_id="functions.{name}:{id}",
            named="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
        ),
        ("<|tool_calls_section_begin|>",),
    ),
    (
        ToolFormat(
            name="minimax_m2",
            trigger="<minimax:tool_call>",
            opening="<minimax:tool_call>\n",
            begin='<invoke name="',
            named='">\n',
            end="</invoke>\n",
            closing="</minimax:tool_call>",
            arguments=Arguments.TAGGED,
            tags=ParameterTags('<parameter name="', '">', "</parameter>\n"),
        ),
        ("<minimax:tool_call>",),
    ),
    (
        ToolFormat(
            name="seed_oss",
            trigger="<seed:tool_call>",
            begin="<seed:tool_call>\n<function=",
            named=">\n",
            end="</function>\n</seed:tool_call>",
            between="\n",
            arguments=Arguments.TAGGED,
            tags=ParameterTags("<parameter=", ">", "</parameter>\n"),
        ),
        ("<seed:tool_call>",),
    ),
    (
        ToolFormat(
            name="gemma4",
            trigger="<|tool_call>",
            begin="<|tool_call>call:",
            named="",
            end="<tool_call|>",
            arguments=Arguments.GEMMA,
            quote='<|"|>',
        ),
        ("<|tool_call>call:",),
    ),
    (
        ToolFormat(
            name="functiongemma",
            trigger="<start_function_call>",
            begin="<start_function_call>call:",
            named="",
            end="<end_function_call>",
            arguments=Arguments.GEMMA,
            quote="<escape>",
        ),
        ("<start_function_call>",),
    ),
    (
        ToolFormat(
            name="mistral_v11",
            trigger="[TOOL_CALLS]",
            begin="[TOOL_CALLS]",
            id_begin="[CALL_ID]",
            id_pattern="[a-zA-Z0-9]{9}",
            call_id="{id}",
            named="[ARGS]",
            end="",
            id_length=9,
        ),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    (
        ToolFormat(
            name="mistral",
            trigger="[TOOL_CALLS]",
            begin="[TOOL_CALLS]",
            named="[ARGS]",
            end="",
            id_length=9,
        ),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    (
        json_list("mistral_v3", "[TOOL_CALLS]", "[TOOL_CALLS] [", "]", id_length=9),
        ("[TOOL_CALLS]",),
    ),
    (
        ToolFormat(
            name="qwen3_coder",
            trigger="<tool_call>",
            begin="<tool_call>\n<function=",
            named=">\n",
            end="</function>\n</tool_call>",
            between="\n",
            arguments=Arguments.TAGGED,
            tags=FUNCTION_TAGS,
            bare=("<function=", "</function>"),
        ),
        ("<tool_call>", "<function=example_function_name>"),
    ),
    (
        ToolFormat(
            name="glm45",
            trigger="<tool_call>",
            begin="<tool_call>",
            named="\n",
            end="</tool_call>",
            between="\n",
            arguments=Arguments.TAGGED,
            tags=ParameterTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ("<arg_key>", "{function-name}\n<arg_key>"),
    ),
    (
        ToolFormat(
            name="glm47",
            trigger="<tool_call>",
            begin="<tool_call>",
            named="",
            end="</tool_call>",
            arguments=Arguments.TAGGED,
            tags=ParameterTags("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
        ("<tool_call>", "<arg_key>"),
    ),
    (
        ToolFormat(
            name="hermes",  # also Qwen 2.5 and 3, Granite 4, SmolLM3, Ernie 4.5
            trigger="<tool_call>",
            begin="<tool_call>\n",
            end="\n</tool_call>",
            between="\n",
            keys=NAME_AND_ARGUMENTS,
        ),
        ("<tool_call>",),
    ),
    (
        json_list("hunyuan", "<tool_calls>", "<tool_calls>[", "]</tool_calls>"),
        ("<tool_calls>",),
    ),
    (
        json_list("nemotron", "<TOOLCALL>", "<TOOLCALL>[", "]</TOOLCALL>"),
        ("<TOOLCALL>",),
    ),
    (
        LFM2,
        ("<|tool_call_start|>",),
    ),
    (
        LFM2,
        ("<|tool_list_start|>",),
    ),
    (
        json_list("phi4_mini", "<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"),
        ("<|tool|>", "<|/tool|>"),
    ),
    (
        json_list("granite", "<|tool_call|>", "<|tool_call|>[", "]", aliases=("<tool_call>",)),
        ("<|tool_call|>",),
    ),
    (
        json_list("functools", "functools[", "functools[", "]"),
        ("functools[",),
    ),
    (
        ToolFormat(
            name="olmo3",
            trigger="<function_calls>",
            opening="<function_calls>\n",
            begin="",
            named="(",
            end=")",
            between="\n",
            closing="\n</function_calls>",
            arguments=Arguments.PYTHON,
        ),
        ("<function_calls>",),
    ),
    (
        ToolFormat(
            name="pythonic",  # Llama 4, and Gemma 3 by a template that asks for it
            trigger="[",
            opening="[",
            begin="",
            named="(",
            end=")",
            between=", ",
            closing="]",
            arguments=Arguments.PYTHON,
            at_start=True,
        ),
        ("<|header_start|>",),
    ),
    (
        ToolFormat(
            name="llama3",
            trigger="{",
            other_triggers=("<|python_tag|>",),
            begin="",
            end="",
            between="; ",
            keys=("name", "parameters"),
            at_start=True,
            one=True,
        ),
        ("<|start_header_id|>", '"parameters": '),
    ),
)

REASONING_FORMATS: tuple[tuple[ReasoningFormat, tuple[str, ...]], ...] = (
    (
        ReasoningFormat(
            name="harmony",
            begin="<|channel|>analysis<|message|>",
            end="<|end|>",
            anywhere=True,
            behind="<|start|>assistant",
            content="<|channel|>final<|message|>",
            dropped=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>final <|constrain|>json<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
            ),
        ),
        ("<|channel|>analysis<|message|>",),
    ),
    (
        ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
        ("[THINK]",),
    ),
    (
        ReasoningFormat(name="gemma4", begin="<|channel>thought\n", end="<channel|>"),
        ("<|channel>",),
    ),
    (
        ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
        ("<seed:think>",),
    ),
    (
        ReasoningFormat(name="hunyuan", begin="<think>", end="</think>", answer=("<answer>", "</answer>")),
        ("</think>", "<answer>"),
    ),
    (
        ReasoningFormat(name="ernie", begin="<think>", end="</think>", answer=("<response>", "</response>")),
        ("</think>", "<response>"),
    ),
    (
        ReasoningFormat(name="think", begin="<think>", end="</think>"),
        ("</think>",),
    ),
)

AUTO, NONE = "auto", "none"
TOOL_FORMAT_NAMES = tuple(dict.fromkeys(one.name for one, _ in TOOL_FORMATS))
REASONING_FORMAT_NAMES = tuple(one.name for one, _ in REASONING_FORMATS)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Returns the form of tool calls.

    Args:
        name: A name of `TOOL_FORMAT_NAMES`; AUTO for the template's; NONE.
        template: Source of the model's chat template.

    Raises:
        CheckpointError: There is no format of this name.
    """
    if name == AUTO and "tools" not in template:
        return None
    return _chosen(name, template, TOOL_FORMATS, "--tool-format")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the form of reasoning. See `tool_format`."""
    return _chosen(name, template, REASONING_FORMATS, "--reasoning-format")


def _chosen(name: str, template: str, formats: tuple[tuple[T, tuple[str, ...]], ...], flag: str) -> T | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((one for one, texts in formats if all(text in template for text in texts)), None)
    for one, _ in formats:
        if one.name == name:
            return one
    known = ", ".join([AUTO, NONE, *(one.name for one, _ in formats)])
    raise CheckpointError(f"{flag} is {name!r}, must be one of {known}")
