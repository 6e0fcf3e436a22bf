"""python litellm_client.py URL MODEL"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one

import litellm
from shapes import QUESTION, RESPONDING, SAYING, Person, Trip, Weather

url, model = sys.argv[1:]
place = {"model": f"openai/{model}", "api_base": url, "api_key": "unused"}
messages = [{"role": "user", "content": "Who are you?"}]


def texts():
    asked = {**place, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(messages=messages, **asked)
    text = whole.choices[0].message.content
    parts = litellm.completion(messages=messages, stream=True, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    again = [*messages, whole.choices[0].message.model_dump(), messages[0]]
    assert litellm.completion(messages=again, **asked).choices
    for words in (5000, 100_000):  # too many tokens; too large for a message to the server
        try:
            litellm.completion(messages=[{"role": "user", "content": "word " * words}], **asked)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"a prompt of {words} words was answered")


def structured():
    asked = {**place, "messages": QUESTION, **SAYING}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "trip", "schema": Trip.model_json_schema(), "strict": True},
    }
    for form in (Trip, schema):
        whole = litellm.completion(response_format=form, **asked).choices[0]
        assert whole.finish_reason == "stop"
        Trip.model_validate_json(whole.message.content)
        parts = litellm.completion(response_format=form, stream=True, **asked)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content


def tools():
    kinds = {"weather": Weather, "book": Trip}
    offered = [
        {"type": "function", "function": {"name": name, "parameters": kind.model_json_schema(), "strict": True}}
        for name, kind in kinds.items()
    ]
    for choice in ("required", {"type": "function", "function": {"name": "book"}}):
        asked = {**place, "tools": offered, "tool_choice": choice, **SAYING}
        whole = litellm.completion(messages=QUESTION, **asked)
        calls = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls"
        for call in calls:
            kinds[call.function.name].model_validate_json(call.function.arguments)
        parts = list(litellm.completion(messages=QUESTION, stream=True, **asked))
        built = litellm.stream_chunk_builder(parts, messages=QUESTION).choices[0]
        assert built.finish_reason == "tool_calls"
        assert [(one.id, one.function.name, one.function.arguments) for one in built.message.tool_calls] == [
            (one.id, one.function.name, one.function.arguments) for one in calls
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3 mm"} for call in calls]
        for turn in (whole.choices[0].message, built.message.model_dump()):
            assert litellm.completion(messages=[*QUESTION, turn, *results], **asked).choices[0].message.tool_calls


def responses():
    said = litellm.responses(input="Who goes where?", text_format=Person, **place, **RESPONDING)
    (text,) = (part.text for item in said.output if item.type == "message" for part in item.content)
    Person.model_validate_json(text)
    invite = {"type": "function", "name": "invite", "parameters": Person.model_json_schema(), "strict": True}
    asked = {**place, "tools": [invite], "tool_choice": "required", "parallel_tool_calls": False, **RESPONDING}
    (call,) = litellm.responses(input="Who goes where?", **asked).output
    Person.model_validate_json(call.arguments)
    events = list(litellm.responses(input="Who goes where?", stream=True, **asked))
    (last,) = events[-1].response.output
    assert last.arguments == call.arguments


texts()
structured()
tools()
responses()
