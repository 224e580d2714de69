"""What a response needs before it runs: the object for clients, its tools, and a conversation that fits the model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from frame.interfaces import RequestError, Serving
from frame.quoting import quoted

from .replies import Conversation, Reply
from .responses_bodies import InputBody, ResponsesBody
from .responses_run import Tooling
from .responses_tools import BUILT_IN, choice_of, function_of, shown_tool
from .tool_servers import ServerTool, ToolError, ToolServers

Object = dict[str, Any]


def new_response(name: str, model: str, body: ResponsesBody) -> Object:
    """The response object before anything is generated."""
    reasoning = body.reasoning
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": body.text.format.shown(), "verbosity": body.text.verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": [shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


async def resolve_tools(body: InputBody, servers: ToolServers) -> tuple[list[Object], Any, Tooling]:
    """The functions of the chat, the tool choice, and the functions that this server runs. Raises `RequestError`."""
    functions: list[Object] = []
    labels: dict[str, str] = {}
    listed: list[Object] = []
    for number, tool in enumerate(body.tools or ()):
        where = f"tools.{number}"
        kind = tool.get("type")
        if kind == "function":
            functions.append(function_of(tool, where))
        elif kind in BUILT_IN:
            label = _label(tool, where, servers)
            offered = await _offered(tool, label, servers)
            labels |= {each.name: label for each in offered}
            functions += [_function(each) for each in offered]
            listed.append(_listed(label, offered))
        else:
            known = ", ".join(("function", *BUILT_IN))
            raise RequestError(400, f"{where} has type {quoted(kind)}; there are: {known}", param="tools")
    names = [function["function"]["name"] for function in functions]
    if len(set(names)) != len(names):
        raise RequestError(400, "tools must have different names", param="tools")
    by_label: dict[str, list[str]] = {}
    for name, label in labels.items():
        by_label.setdefault(label, []).append(name)
    choice, allowed = choice_of(body.tool_choice, names, by_label)
    kept = [function for function in functions if function["function"]["name"] in allowed]
    return kept, choice if kept else None, Tooling(labels, tuple(listed))


def _label(tool: Mapping[str, Any], where: str, servers: ToolServers) -> str:
    """The tool server of a tool: one named with --tool-server; the address in a request is never used."""
    if tool.get("require_approval", "never") != "never":
        raise RequestError(
            400, f"{where}.require_approval must be 'never': this server asks nobody to approve calls", param="tools"
        )
    kind = str(tool.get("type"))
    wanted = (str(tool.get("server_label")),) if kind == "mcp" else BUILT_IN[kind]
    label = next((each for each in wanted if each in servers.addresses), None)
    if label is None or (tool.get("server_url") not in (None, servers.addresses[label])):
        there = ", ".join(sorted(servers.addresses)) or "none"
        raise RequestError(
            400, f"{where}: no tool server {quoted(wanted[0])} was named with --tool-server; there are: {there}",
            param="tools",
        )  # fmt: skip
    return label


async def _offered(tool: Mapping[str, Any], label: str, servers: ToolServers) -> list[ServerTool]:
    try:
        offered = await servers.tools(label)
    except ToolError as error:
        raise RequestError(502, str(error), param="tools") from None
    allowed = tool.get("allowed_tools")
    if isinstance(allowed, dict):
        allowed = allowed.get("tool_names")
    return offered if not isinstance(allowed, list) else [each for each in offered if each.name in allowed]


def _function(tool: ServerTool) -> Object:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _listed(label: str, tools: list[ServerTool]) -> Object:
    shown = [
        {"name": each.name, "description": each.description, "input_schema": dict(each.parameters), "annotations": None}
        for each in tools
    ]
    return {"id": f"mcpl_{uuid.uuid4().hex}", "type": "mcp_list_tools", "server_label": label, "tools": shown}


async def fitting(serving: Serving, conversation: Conversation, body: InputBody) -> Conversation:
    """The conversation, shortened by its oldest messages until it fits max_model_len; instructions stay."""
    limit: int = serving.models.limits.max_model_len - 1
    fixed = [each for each in conversation.messages[:1] if each["role"] == "system"]
    others = list(conversation.messages[len(fixed) :])

    def without(count: int) -> Conversation:
        rest = others[count:]
        while len(rest) > 1 and rest[0]["role"] == "tool":  # a result whose call was dropped
            rest = rest[1:]
        return replace(conversation, messages=[*fixed, *rest])

    async def fits(count: int) -> bool:
        return len((await Reply(serving, without(count), body).prompt()).token_ids) <= limit

    low, high = 0, max(0, len(others) - 1)
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return without(low)
