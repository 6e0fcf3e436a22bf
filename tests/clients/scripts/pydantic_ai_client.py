"""python pydantic_ai_client.py URL MODEL"""

import asyncio
import sys

import openai
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from shapes import RESPONDING, SAYING, Person, Trip, Weather

url, model = sys.argv[1:]
provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))
# pydantic-ai has one name for the most tokens of both.
RESPONDING = {name.replace("max_output_tokens", "max_tokens"): value for name, value in RESPONDING.items()}
CHAT = OpenAIChatModel(model, provider=provider, settings=SAYING)
RESPONSES = OpenAIResponsesModel(model, provider=provider, settings=RESPONDING)
BOUNDED = {"usage_limits": UsageLimits(request_limit=6)}


def settings(context):
    """Names the tools of each step: the model would choose at random, and maybe never end."""
    step = [["weather"], ["weather", "invite"], ["answer"]][min(context.run_step, 3) - 1]
    return {"tool_choice": step, "parallel_tool_calls": False}


def agent_of(model_used, output):
    """Returns an agent with two tools, and the list that its tools write their arguments to."""
    agent, called = Agent(model_used, output_type=output, retries=0), []

    @agent.tool_plain
    def weather(place: Weather) -> str:
        called.append(place)
        return "3 mm"

    @agent.tool_plain
    def invite(guest: Person, seats: int) -> dict[str, int]:
        called.append(guest)
        return {"seats": seats}

    return agent, called


async def tools():
    """Two calls, then an answer that is a call too; whole and streamed."""
    for used, output in ((CHAT, Trip), (RESPONSES, Person)):
        agent, called = agent_of(used, ToolOutput(output, name="answer"))
        done = await agent.run("Who goes where?", model_settings=settings, **BOUNDED)
        assert isinstance(done.output, output)
        kinds = [type(one) for one in called]
        assert kinds in ([Weather, Weather], [Weather, Person])
        called.clear()
        async with agent.run_stream("Who goes where?", model_settings=settings, **BOUNDED) as stream:
            parts = [part async for part in stream.stream_output(debounce_by=None)]
        assert parts[-1] == done.output  # of the parts before, as many as are valid and were not sent together
        assert [type(one) for one in called] == kinds
        # The turns with calls and results go on.
        more = await agent.run("And then?", message_history=done.all_messages(), model_settings=settings, **BOUNDED)
        assert isinstance(more.output, output)


async def formats():
    """An answer in a format, without tools."""
    for used, output in ((CHAT, Trip), (RESPONSES, Person)):
        agent = Agent(used, output_type=NativeOutput(output), retries=0)
        assert isinstance((await agent.run("Who goes where?", **BOUNDED)).output, output)
        async with agent.run_stream("Who goes where?", **BOUNDED) as stream:
            assert isinstance(await stream.get_output(), output)


async def main():
    await tools()
    await formats()


asyncio.run(main())
