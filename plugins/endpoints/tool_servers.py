"""Tool servers that the operator has named: the Model Context Protocol over streamable HTTP, by its official client.

Only servers that were named on the command line are contacted. Knows no API's format.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from frame.quoting import quoted

logger = logging.getLogger("frame.server")

_SECONDS = 60.0
_MAX_TEXT = 1 << 20
_MAX_TOOLS = 512


class ToolError(Exception):
    """A tool cannot be used; the message is one sentence for the model."""


@dataclass(frozen=True)
class ServerTool:
    """A function of a tool server. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def read_addresses(values: Sequence[str]) -> dict[str, str]:
    """Label -> URL, from `LABEL=URL` or `HOST:PORT` (which is its own label); raises `ValueError`."""
    addresses: dict[str, str] = {}
    for value in values:
        label, equals, url = value.partition("=")
        if not equals:
            url = value if "://" in value else f"http://{value}/mcp"
        parts = urlsplit(url)
        plain = url.isascii() and url.isprintable() and not set(" \\") & set(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or not plain:
            raise ValueError(f"tool_server {quoted(value)} must be LABEL=http://HOST:PORT/PATH or HOST:PORT")
        if label in addresses:
            raise ValueError(f"tool_server names {quoted(label)} twice")
        addresses[label] = url
    if addresses and importlib.util.find_spec("mcp") is None:
        raise ValueError("tool_server needs the MCP client: pip install 'frame-llm[mcp]'")
    return addresses


class ToolServers:
    """The named servers. Each use opens a new session, so that a server may restart between uses."""

    def __init__(self, values: Sequence[str]) -> None:
        self.addresses = read_addresses(values)

    async def tools(self, label: str) -> list[ServerTool]:
        """What a server offers; raises `ToolError`."""
        found: list[ServerTool] = []
        async with self._session(label) as session:
            cursor = None
            while len(found) < _MAX_TOOLS:
                page = await session.list_tools(cursor=cursor)
                found += [ServerTool(each.name, each.description or "", each.input_schema) for each in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
        return found[:_MAX_TOOLS]

    async def call(self, label: str, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call's result; raises `ToolError`, also when the tool itself reports an error."""
        async with self._session(label) as session:
            result = await session.call_tool(name, dict(arguments))
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if len(text) > _MAX_TEXT:
            raise ToolError(f"the result of {name} exceeds {_MAX_TEXT} characters")
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    @asynccontextmanager
    async def _session(self, label: str) -> AsyncIterator[Any]:
        """A session of the protocol. Redirects and the environment's proxies are not followed."""
        await asyncio.to_thread(importlib.import_module, "mcp")  # in a thread: the import takes a second
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        http = httpx2.AsyncClient(timeout=_SECONDS, trust_env=False, follow_redirects=False)
        try:
            async with asyncio.timeout(_SECONDS), http:
                transport = streamable_http_client(self.addresses[label], http_client=http)
                async with Client(transport, read_timeout_seconds=_SECONDS) as session:
                    yield session
        except Exception as error:  # the library wraps the cause in exception groups
            if isinstance(error, ToolError):
                raise
            logger.warning("tool server %s failed: %s", label, _cause(error))
            raise ToolError(f"tool server {quoted(label)} does not answer: {_cause(error)}") from None


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__
