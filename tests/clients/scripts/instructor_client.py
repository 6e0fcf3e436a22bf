"""python instructor_client.py URL MODEL"""

import json
import sys
from typing import Any

import instructor
import openai
from instructor import Mode
from pydantic import Field
from shapes import QUESTION, RESPONDING, SAYING, Anything, Closed, Person, Trip

url, model = sys.argv[1:]
plain = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
asked: dict[str, Any] = {"model": model, "messages": QUESTION, "max_retries": 0, **SAYING}

for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    made, whole = client.create_with_completion(response_model=Trip, **asked)
    assert isinstance(made, Trip)
    message = whole.choices[0].message
    written = message.content if mode is Mode.JSON_SCHEMA else message.tool_calls[0].function.arguments
    assert Trip.model_validate_json(written) == Trip.model_validate(made.model_dump())

    # Strict, which is the default, instructor takes no enum and no date of a part, whatever a server sends.
    parts = list(client.create_partial(response_model=Trip, strict=False, **asked))
    assert len(parts) > 3, "it comes in parts"
    Trip.model_validate(parts[-1].model_dump())  # the prompt names another type, so the answer is another one

# Only the prompt has the schema here. The model writes some object until max_tokens, where it is closed.
client = instructor.from_openai(plain, mode=Mode.JSON)
_, whole = client.create_with_completion(response_model=Anything, **asked)
assert isinstance(json.loads(whole.choices[0].message.content), dict)

# instructor's schema of an iterable requires nothing and allows all, so the model would write something else.


class Crowd(Closed):
    tasks: list[Person] = Field(min_length=2, max_length=3)


client = instructor.from_openai(plain, mode=Mode.MD_JSON)
people = client.create_iterable(
    response_model=Person, extra_body={"structured_outputs": {"json": Crowd.model_json_schema()}}, **asked
)
assert 2 <= len(list(people)) <= 3

client = instructor.from_openai(plain, mode=Mode.RESPONSES_TOOLS)
made = client.create(response_model=Person, model=model, messages=QUESTION, max_retries=0, **RESPONDING)
assert isinstance(made, Person)
