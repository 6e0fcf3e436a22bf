"""python openai_client.py URL MODEL"""

import sys

import openai
from shapes import QUESTION, RESPONDING, SAYING, Person, Trip, Weather

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)


def texts():
    assert [one.id for one in client.models.list()] == [model]
    whole = client.completions.create(model=model, prompt="ROMEO:", max_tokens=8, seed=1)
    assert whole.usage.completion_tokens == 8
    chunks = list(client.completions.create(model=model, prompt="ROMEO:", max_tokens=8, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    messages = [{"role": "user", "content": "Who are you?", "name": "bob"}]
    more = {"model": model, "messages": messages, "max_completion_tokens": 8, "safety_identifier": "a", "store": False}
    chat = client.chat.completions.create(**more, seed=1)
    parts = list(client.chat.completions.create(**more, seed=1, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == chat.choices[0].message.content
    assert parts[-1].usage.completion_tokens == chat.usage.completion_tokens


def parsed_answers():
    asked, closed = {"model": model, "messages": QUESTION, **SAYING}, 0
    for kind in (Person, Trip):
        whole = client.chat.completions.parse(response_format=kind, **asked)
        assert isinstance(whole.choices[0].message.parsed, kind)
        with client.chat.completions.stream(response_format=kind, **asked) as stream:
            events = [event.type for event in stream]
            last = stream.get_final_completion().choices[0].message
        assert last.parsed == whole.choices[0].message.parsed
        assert events.count("content.done") == 1
        took = whole.usage.completion_tokens
        for most in range(took - 6, took):
            shorter = client.chat.completions.parse(response_format=kind, **asked | {"max_tokens": most})
            assert isinstance(shorter.choices[0].message.parsed, kind)
            closed += shorter.usage.completion_tokens == most
    assert closed, "one was closed at its last token"
    # The parsed message goes back as it is.
    turns = [*QUESTION, whole.choices[0].message, *QUESTION]
    again = client.chat.completions.parse(response_format=Person, **{**asked, "messages": turns})
    assert isinstance(again.choices[0].message.parsed, Person)


def tools():
    """Calls are parsed whole and streamed, and their results go back."""
    offered = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Trip, name="book")]
    asked = {"model": model, "tools": offered, **SAYING}
    for choice in ("required", {"type": "function", "function": {"name": "book"}}):
        whole = client.chat.completions.parse(messages=QUESTION, tool_choice=choice, **asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        calls = whole.message.tool_calls
        assert calls
        for call in calls:
            assert isinstance(call.function.parsed_arguments, Trip if call.function.name == "book" else Weather)
        if choice != "required":
            assert {call.function.name for call in calls} == {"book"}
        with client.chat.completions.stream(messages=QUESTION, tool_choice=choice, **asked) as stream:
            events = [event.type for event in stream]
            last = stream.get_final_completion().choices[0]
        assert last.finish_reason == "tool_calls"
        assert [one.function.parsed_arguments for one in last.message.tool_calls] == [
            one.function.parsed_arguments for one in calls
        ]
        assert events.count("tool_calls.function.arguments.done") == len(calls)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3 mm"} for call in calls]
        turns = [*QUESTION, whole.message, *results]
        after = client.chat.completions.parse(messages=turns, tool_choice="none", response_format=Person, **asked)
        assert isinstance(after.choices[0].message.parsed, Person)
        more = client.chat.completions.parse(messages=turns, tool_choice="required", **asked)
        assert not {one.id for one in more.choices[0].message.tool_calls} & {one.id for one in calls}


def chunks_of_calls():
    """The chunks themselves, put together as programs without the helpers do it."""
    offered = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Trip, name="book")]
    made = {}
    for part in client.chat.completions.create(
        model=model, messages=QUESTION, tools=offered, tool_choice="required", stream=True, **SAYING
    ):
        for delta in part.choices[0].delta.tool_calls or () if part.choices else ():
            call = made.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
            call["arguments"] += delta.function.arguments or ""
    assert sorted(made) == list(range(len(made)))
    assert made
    for call in made.values():
        assert call["id"]
        (Trip if call["name"] == "book" else Weather).model_validate_json(call["arguments"])


def reasoning():
    """Reasoning stands apart, is bounded, and goes back; what is behind it keeps its form."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}
    asked = {"model": model, "extra_body": thinking, **SAYING}
    answer = client.chat.completions.parse(messages=QUESTION, response_format=Trip, **asked)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Trip)
    assert message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 5
    again = client.chat.completions.create(messages=[*QUESTION, message, *QUESTION], stream=True, **asked)
    deltas = [part.choices[0].delta for part in again if part.choices]
    assert any(getattr(delta, "reasoning_content", None) for delta in deltas)

    more = {"chat_template_kwargs": thinking["chat_template_kwargs"], "reasoning": {"max_tokens": 5}}
    asked = {"model": model, **RESPONDING, "extra_body": {**RESPONDING["extra_body"], **more}}
    first = client.responses.parse(input="Who goes where?", text_format=Person, **asked)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    turns = [{"role": "user", "content": "Who?"}, *first.output, {"role": "user", "content": "And then?"}]
    assert isinstance(client.responses.parse(input=turns, text_format=Person, **asked).output_parsed, Person)


def responses():
    asked = {"model": model, **RESPONDING}
    question = "Who goes where?"
    text = client.responses.create(input=question, **{**asked, "max_output_tokens": 8})
    with client.responses.stream(input=question, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas).startswith(text.output_text)

    answer = client.responses.parse(input=question, text_format=Weather, **asked)
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(input=question, text_format=Weather, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed

    offered = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Person, name="invite")]
    flat = [{"type": "function", **tool["function"]} for tool in offered]
    named = {"type": "function", "name": "invite"}
    asked["parallel_tool_calls"] = False
    for choice in ("required", named):
        first = client.responses.parse(input=question, tools=flat, tool_choice=choice, **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        assert calls
        for call in calls:
            (Person if call.name == "invite" else Weather).model_validate_json(call.arguments)
        with client.responses.stream(input=question, tools=flat, tool_choice=choice, **asked) as stream:
            for _ in stream:
                pass
            last = stream.get_final_response()
        assert [(one.name, one.arguments) for one in last.output] == [(one.name, one.arguments) for one in first.output]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3 mm"} for call in calls]
        turns = [{"role": "user", "content": question}, *first.output, *results]
        second = client.responses.parse(input=turns, tools=flat, tool_choice="none", text_format=Person, **asked)
        assert isinstance(second.output_parsed, Person)
        turns += [*second.output, {"role": "user", "content": "And then?"}]
        assert client.responses.create(input=turns, **asked).output


texts()
parsed_answers()
tools()
chunks_of_calls()
reasoning()
responses()
