"""python openai_agents_client.py URL MODEL"""

import asyncio
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from shapes import RESPONDING, SAYING, Person, Weather

url, model = sys.argv[1:]
client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
set_tracing_disabled(True)
called = []


@function_tool
def weather(place: Weather) -> str:
    """Tells the weather of a city."""
    called.append(place)
    return "3 mm"


@function_tool
def invite(guest: Person) -> str:
    """Invites a person."""
    called.append(guest)
    return "yes"


async def ask(agent, turns):
    """Returns the output of an agent, whole; streamed it is the same."""
    whole = await Runner.run(agent, turns, max_turns=3)
    streamed = Runner.run_streamed(agent, turns, max_turns=3)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert "response.completed" in kinds
    assert streamed.final_output == whole.final_output
    return whole


async def main():
    more = {name: SAYING[name] for name in ("max_tokens", "temperature", "frequency_penalty")}
    chat = ModelSettings(**more, extra_body={"seed": SAYING["seed"]}, parallel_tool_calls=False)
    responding = ModelSettings(
        max_tokens=RESPONDING["max_output_tokens"], temperature=1.0, extra_body=RESPONDING["extra_body"],
        parallel_tool_calls=False,
    )  # fmt: skip
    models = ((OpenAIChatCompletionsModel, chat), (OpenAIResponsesModel, responding))
    for kind, settings in models:
        served, turns = kind(model, client), "Who goes where?"
        for name, returned in (("weather", "3 mm"), ("invite", "yes")):
            # The tool's result ends the run: the model would choose its next tool at random.
            caller = Agent(
                name="caller", model=served, tools=[weather, invite], tool_use_behavior="stop_on_first_tool",
                model_settings=settings.resolve(ModelSettings(tool_choice=name)),
            )  # fmt: skip
            done = await ask(caller, turns)
            assert done.final_output == returned
            turns = [*done.to_input_list(), {"role": "user", "content": "And then?"}]
        assert [type(one) for one in called] == [Weather, Weather, Person, Person]
        called.clear()
        plain = settings.resolve(ModelSettings())
        plain.parallel_tool_calls = None
        teller = Agent(name="teller", model=served, output_type=Person, instructions="Be brief.", model_settings=plain)
        assert isinstance((await ask(teller, turns)).final_output, Person)


asyncio.run(main())
