"""openai-agents: strict tools, a typed output, chat completions and responses."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Mood(BaseModel):
    mood: Literal["good", "bad"]


calls = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    calls.append((city, days))
    return "It rains."


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="demo", openai_client=client)
        demanded = ModelSettings(temperature=0, max_tokens=100, tool_choice="required")
        agent = Agent(name="weather", model=model, tools=[get_weather], model_settings=demanded)
        result = await Runner.run(agent, "How is the weather in Rome?", max_turns=4)
        assert calls, kind
        assert all(city in ("Paris", "Rome") and days in (1, 2) for city, days in calls), calls
        print(kind.__name__, calls, result.final_output)
        calls.clear()
        settings = ModelSettings(temperature=0, max_tokens=100)
        agent = Agent(name="mood", model=model, tools=[get_weather], output_type=Mood, model_settings=settings)
        try:
            result = await Runner.run(agent, "How do you feel?", max_turns=2)
            assert isinstance(result.final_output, Mood), kind
            print(kind.__name__, result.final_output)
        except MaxTurnsExceeded:
            assert calls
        assert all(city in ("Paris", "Rome") and days in (1, 2) for city, days in calls), calls
        calls.clear()


asyncio.run(main())
print("done")
