"""A tool server for tests: the official implementation of the protocol on the port that is given."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
