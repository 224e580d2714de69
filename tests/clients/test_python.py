"""Python libraries over the OpenAI API against a server without flags: structured answers, tools, both at once.

The demo model is small: its answers have their form by the grammar, and where it may call it may do so for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow

CLIENTS = {
    "instructor_client.py": ("instructor",),
    "pydantic_ai_client.py": ("pydantic-ai-slim[openai]",),
    "openai_agents_client.py": ("openai-agents",),
    "langgraph_client.py": ("langgraph", "langchain-openai"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", CLIENTS)
def test_a_client_library(python_client: Callable[..., str], script: str) -> None:
    assert python_client(script, *CLIENTS[script]).rstrip().endswith("done")
