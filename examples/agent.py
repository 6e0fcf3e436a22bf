"""An agent: the model calls two tools, gets their results, and answers.

    quire serve --model DIR         # in another terminal; a model that calls tools
    quire gateway                   # in a third one
    python examples/agent.py [URL] [QUESTION]

The first two turns must call a tool, so that the loop shows something with any model. The tools are strict: arguments
are always valid by their schemas.
"""

import json
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
QUESTION = sys.argv[2] if len(sys.argv) > 2 else "How warm is it in Oslo, in Fahrenheit?"
CITIES = {"Oslo": 4, "Rome": 17, "Nairobi": 24}
TOOLS: dict[str, Any] = {
    "temperature": lambda city: f"{CITIES[city]} degrees Celsius",
    "fahrenheit": lambda celsius: f"{celsius * 9 / 5 + 32:g} degrees Fahrenheit",
}
PARAMETERS: dict[str, Any] = {
    "temperature": {"city": {"enum": list(CITIES)}},
    "fahrenheit": {"celsius": {"type": "integer", "minimum": -90, "maximum": 60}},
}
OFFERED: list[Any] = []
for name, properties in PARAMETERS.items():
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    OFFERED.append({"type": "function", "function": {"name": name, "parameters": schema, "strict": True}})

client = OpenAI(base_url=URL, api_key="unused", timeout=120)
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": QUESTION}]
for turn in range(4):
    options: Any = {"tool_choice": "required" if turn < 2 else "auto", "parallel_tool_calls": False}
    answer = client.chat.completions.create(model=model, messages=messages, tools=OFFERED, max_tokens=200, **options)
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
        result = TOOLS[call.function.name](**arguments)  # type: ignore[union-attr]
        print(f"{call.function.name}({arguments}) -> {result}")  # type: ignore[union-attr]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        sys.exit(print(f"answer: {message.content}"))
