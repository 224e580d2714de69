"""The assistant's turn that a chat request asks for: which tools it may call, and how its output is read.

Every route that lets a model answer a chat uses it, whatever its wire format. Knows no route.
"""

from __future__ import annotations

from typing import Any, Protocol

from .parser import AssistantMessage, OutputEvent
from .sampling import SamplingParams


class Turn(Protocol):
    """From `Serving.turn`, for one request. The order of use:

        turn = serving.turn(tools=body.tools, tool_choice=body.tool_choice)
        chat = await serving.chat_prompt(messages, tools=turn.tools, …)
        params = turn.constrain(serving.params(body, …), chat.text)
        async for output in serving.generate(…, params, …):
            for completion in output.outputs:
                events = turn.read(completion)

    `tools` are the definitions for the template, None when there are none.
    """

    tools: list[dict[str, Any]] | None

    def constrain(self, params: SamplingParams, prompt: str | None) -> SamplingParams:
        """The parameters with what the parsers need and the tool choice demands; `prompt` is the rendered chat.

        Raises `RequestError` 400 when the request asks for another constraint too.
        """

    def read(self, completion: Any) -> list[OutputEvent]:
        """What a `CompletionOutput` adds, neighbouring texts joined and every call with an id.

        For outputs of kind DELTA, each as it comes, and FINAL_ONLY. One with a finish reason is its index's last.
        """

    def message(self, index: int = 0) -> AssistantMessage:
        """Everything read so far of the output with this index."""

    def finish_reason(self, completion: Any) -> str | None:
        """Why the output ended, "tool_calls" when it did so by calling; asked after it was read."""

    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all outputs so far; asked for at the end, as it may tokenise the reasoning."""
