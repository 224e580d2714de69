"""langgraph over langchain-openai: a graph of model and tools, and structured answers."""

import sys
from typing import Annotated, Literal, TypedDict

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel


class Mood(BaseModel):
    """How somebody feels."""

    mood: Literal["good", "bad"]


class State(TypedDict):
    messages: Annotated[list, add_messages]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


model = ChatOpenAI(
    model="demo", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=100
)
for method in ("json_schema", "function_calling"):
    answer = model.with_structured_output(Mood, method=method).invoke("How do you feel?")
    assert isinstance(answer, Mood), method
calling = model.bind_tools([get_weather], tool_choice="required")
asked = lambda state: {"messages": [calling.invoke(state["messages"])]}  # noqa: E731
said = lambda state: {"messages": [model.bind_tools([get_weather], strict=True).invoke(state["messages"])]}  # noqa: E731
graph = StateGraph(State)
graph.add_node("ask", asked)
graph.add_node("tools", ToolNode([get_weather]))
graph.add_node("say", said)
for edge in ((START, "ask"), ("ask", "tools"), ("tools", "say"), ("say", END)):
    graph.add_edge(*edge)
messages = graph.compile().invoke({"messages": [("user", "How is the weather in Rome?")]})["messages"]
assert any(isinstance(message, ToolMessage) and message.content.startswith("It rains in") for message in messages)
print([type(message).__name__ for message in messages])
print("done")
