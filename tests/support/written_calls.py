"""Two calls as published models write them: the texts of their templates, and of the parsers of vLLM and SGLang."""

from typing import Any

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Paris", "days": 3}),
    ("get_time", {"tz": "UTC"}),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "get_time": {
        "type": "object",
        "properties": {"tz": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["tz"],
    },
}

SINGLE = ("harmony", "llama3")
"""Forms of one call at a time."""

WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {"tz": "UTC"}}\n'
        "</tool_call>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n<parameter=tz>\nUTC\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
    "pythonic": '[get_weather(city="Paris", days=3), get_time(tz="UTC")]',
    "mistral_v3": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "'
        'abcdefghi"}, {"name": "get_time", "arguments": {"tz": "UTC"}, "id": "abcdefghj"}]'
    ),
    "mistral_v11": (
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]g'
        'et_time[CALL_ID]abcdefghj[ARGS]{"tz": "UTC"}'
    ),
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]get_time[ARGS]{"tz": "UTC"}',
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_time{tz:<|"|>UTC<|"|>}<tool_call|>'
    ),
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        "<end_function_call><start_function_call>call:get_time{tz:<escape>UTC<escape>}"
        "<end_function_call>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{"tz": "UTC"}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        '<｜tool▁sep｜>{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time'
        '<｜tool▁sep｜>{"tz": "UTC"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="tz" string="true">UTC</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_time\n<arg_key>tz</arg_key>\n<arg_value>UTC</arg_value>\n"
        "</tool_call>"
    ),
    "glm47": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days"
        "</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time<arg_key>tz</arg_key>"
        "<arg_value>UTC</arg_value></tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        '<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{"tz": "UTC"}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter><parameter name="days">3</parameter></invoke>\n'
        '<invoke name="get_time">\n<parameter name="tz">UTC</parameter></invoke>\n'
        "</minimax:tool_call>"
    ),
    "granite": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name'
        '": "get_time", "arguments": {"tz": "UTC"}}]'
    ),
    "harmony": (
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}'
    ),
    "functools": (
        'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "'
        'get_time", "arguments": {"tz": "UTC"}}]'
    ),
    "olmo3": ("<function_calls>\nget_weather(city='Paris', days=3)\nget_time(tz='UTC')\n</function_calls>"),
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris', days=3), get_time(tz='UTC')]<|tool_call_end|>",
    "hunyuan": (
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name"'
        ': "get_time", "arguments": {"tz": "UTC"}}]</tool_calls>'
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=get_time>\n<parameter=tz>UTC</parameter>\n</function>\n</seed:tool_call>"
    ),
    "nemotron": (
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": '
        '"get_time", "arguments": {"tz": "UTC"}}]</TOOLCALL>'
    ),
    "phi4_mini": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name'
        '": "get_time", "arguments": {"tz": "UTC"}}]<|/tool_call|>'
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="tz" string="true">UTC</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    ),
}
