"""python langchain_client.py URL MODEL"""

import sys

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shapes import RESPONDING, SAYING, Person, Trip

url, model = sys.argv[1:]
place = {"model": model, "base_url": url, "api_key": "unused", "max_retries": 0}
QUESTION = "Who goes where?"


@tool
def weather(city: str, days: int) -> str:
    """Tells the weather of a city."""
    return f"{city}: {days} mm"


@tool(args_schema=Person)
def invite(name: str, age: int, mood: str) -> str:
    """Invites a person."""
    return f"{name}, {age}, is {mood}"


TOOLS = {"weather": weather, "invite": invite}


def texts():
    chat = ChatOpenAI(temperature=0, max_tokens=8, **place)
    whole = chat.invoke("Who are you?")
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.content for chunk in chat.stream("Who are you?")) == whole.content
    assert [one.content for one in chat.batch(["Who are you?"] * 2)] == [whole.content] * 2
    for words in (5000, 100_000):  # too many tokens; too large for a message to the server
        try:
            chat.invoke("word " * words)
            found = "an answer"
        except openai.BadRequestError as error:
            found = type(error).__name__
        assert found == "OpenAIContextOverflowError", f"{words} words: {found}"


def structured(chat, kind, *methods):
    for method in methods:
        asked = chat.with_structured_output(kind, method=method)
        made = asked.invoke(QUESTION)
        assert isinstance(made, kind), f"{method}: {made}"
        assert list(asked.stream(QUESTION))[-1] == made
        told = chat.with_structured_output(kind.model_json_schema(), method=method, include_raw=True).invoke(QUESTION)
        assert told["parsing_error"] is None
        kind.model_validate(told["parsed"])


def calls(chat):
    """Calls whole and in chunks; what they returned goes back."""
    for choice, strict in (("any", None), ("required", True), ("weather", None), ("invite", True)):
        bound = chat.bind_tools([weather, invite], tool_choice=choice, strict=strict, parallel_tool_calls=False)
        whole = bound.invoke(QUESTION)
        (call,) = whole.tool_calls
        assert whole.invalid_tool_calls == []
        assert call["name"] == choice or choice in ("any", "required")
        summed = None
        for chunk in bound.stream(QUESTION):
            summed = chunk if summed is None else summed + chunk
        assert [(one["name"], one["args"]) for one in summed.tool_calls] == [(call["name"], call["args"])]
        assert len(summed.tool_call_chunks) == 1
        turns = [HumanMessage(QUESTION), whole, TOOLS[call["name"]].invoke(call)]
        assert isinstance(turns[-1], ToolMessage)
        (other,) = bound.invoke(turns).tool_calls
        assert other["id"] != call["id"]
        assert chat.with_structured_output(Person, method="json_schema").invoke(turns).age >= 0


texts()
chats = ChatOpenAI(**place, **SAYING)
structured(chats, Trip, "json_schema", "function_calling")
calls(chats)
more = {"max_tokens": RESPONDING["max_output_tokens"], "temperature": 1.0, "extra_body": RESPONDING["extra_body"]}
responses = ChatOpenAI(use_responses_api=True, **place, **more)
structured(responses, Person, "json_schema", "function_calling")
calls(responses)
