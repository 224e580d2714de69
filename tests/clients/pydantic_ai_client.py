"""pydantic-ai: an output type by a demanded tool and by a schema, with a tool beside it that the model may call."""

import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


class Answer(BaseModel):
    mood: Literal["good", "bad"]
    number: int = Field(ge=0, le=9)


model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
settings = {"temperature": 0.0, "max_tokens": 150}
for output in (ToolOutput(Answer), NativeOutput(Answer)):
    agent = Agent(model, output_type=output, model_settings=settings, retries=0)
    print(agent.run_sync("How do you feel?").output)

calls = []
agent = Agent(model, output_type=NativeOutput(Answer), model_settings=settings, retries=3)


@agent.tool_plain
def get_time(zone: str = "UTC") -> str:
    """The time now."""
    calls.append(zone)
    return "It is noon."


try:  # with automatic tools and a format at once
    answer = agent.run_sync("How do you feel?", usage_limits=UsageLimits(request_limit=2)).output
    assert isinstance(answer, Answer)
    print(answer)
except UsageLimitExceeded:
    assert calls
print(calls)
print("done")
