"""A tool server for tests: the official implementation of the protocol on a free port, which it prints as a URL."""

from __future__ import annotations

import socket

import uvicorn
from mcp.server.mcpserver import MCPServer

tools = MCPServer("tools")


@tools.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@tools.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
        uvicorn.Server(uvicorn.Config(tools.streamable_http_app(), access_log=False)).run(sockets=[listener])
