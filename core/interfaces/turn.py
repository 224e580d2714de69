"""The assistant's turn in a chat: which tools it may call, and how its output is read."""

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
        """Returns the parameters with what parsers need and the tool choice demands; `prompt` is the rendered chat.

        Raises `RequestError` 400 when the request has another constraint that contradicts it.
        """

    def read(self, completion: Any) -> list[OutputEvent]:
        """Returns the events that a `CompletionOutput` adds, with neighbouring texts joined and an id for every call.

        Takes outputs of kind DELTA, each as it comes, or FINAL_ONLY. One with a finish reason is its index's last.
        """

    def message(self, index: int = 0) -> AssistantMessage:
        """Returns the message that was read so far of the output with this index."""

    def finish_reason(self, completion: Any) -> str | None:
        """Returns why the output ended, "tool_calls" if by a call; valid once it was read."""

    def num_reasoning_tokens(self) -> int:
        """Returns the reasoning tokens of all outputs; may tokenise the reasoning, so ask once, at the end."""
