"""Answers of the OpenAI routes: structs that encode to the bytes on the wire, and the frames of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .openai_logprobs import ChatLogprobs, TextLogprobs
from .timing import Timing, timing

DONE = b"data: [DONE]\n\n"
#: Placeholder for the text in a chunk that is encoded once; no name of a model or request has a control character.
_MARK = "\0text\0"


class PromptDetails(Struct):
    """Prompt tokens that were not computed."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Completion tokens that the user does not see as content."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a whole request."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Function(Struct, omit_defaults=True):
    """A call's function, or a piece of one. `arguments` is JSON text."""

    name: str | None = None
    arguments: str | None = None


class ChatCall(Struct):
    """One tool call of a message."""

    id: str
    function: Function
    type: str = "function"


class DeltaCall(Struct, omit_defaults=True):
    """What a chunk adds to a call: its first piece has id, type and name, others have arguments only."""

    index: int
    function: Function
    id: str | None = None
    type: str | None = None


class ChatMessage(Struct):
    """What the model said. `reasoning_content` is the older name of `reasoning`."""

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ChatCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    """One answer; `token_ids` only when asked for."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class DeltaChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(Struct):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Any = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """A whole response of either kind."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[TextChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: Any = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: Any = UNSET
    timing: Timing | UnsetType = UNSET


class Frames:
    """The events of one stream; the fields that all of them share are encoded once.

    `piece(index, text)` is a choice that adds nothing but text.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        created: int,
        model: str,
        fingerprint: str,
        with_usage: bool,
        piece: Callable[[int, str], DeltaChoice | TextChoice],
    ) -> None:
        fields = {"id": name, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._encoder = msgspec.json.Encoder()
        self._piece = piece
        self._around: dict[int, tuple[bytes, bytes]] = {}  # index -> what stands before and after the text of a piece

    def text(self, index: int, text: str) -> bytes:
        """One chunk with a piece of text, without usage: the bytes that `choice` would give."""
        around = self._around.get(index)
        if around is None:
            before, after = self.choice(self._piece(index, _MARK)).split(self._encoder.encode(_MARK))
            around = self._around[index] = before, after
        return around[0] + self._encoder.encode(text) + around[1]

    def choice(self, choice: DeltaChoice | TextChoice, usage: Usage | None = None) -> bytes:
        """One chunk with one choice."""
        tail = self._tail if usage is None else b'],"usage":' + self._encoder.encode(usage) + b"}\n\n"
        return self._head + self._encoder.encode(choice) + tail

    def last(self, usage: Usage | None, timing: Timing | None) -> bytes:
        """The last chunk, which has no choice; empty when nothing is left to say."""
        if usage is None and timing is None:
            return b""
        frame = self._head + b"]"
        if usage is not None:
            frame += b',"usage":' + self._encoder.encode(usage)
        if timing is not None:
            frame += b',"timing":' + self._encoder.encode(timing)
        return frame + b"}\n\n"


class UsageCounter:
    """Adds up the tokens of a request's prompts and outputs."""

    def __init__(self, details: bool) -> None:
        self._details = details
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._metrics: Any = None
        self.completion = 0

    def see(self, prompt: int, output: Any) -> None:
        """Takes one output of prompt number `prompt`."""
        self._metrics = output.metrics
        if prompt not in self._cached:
            if output.prompt_token_ids is not None:
                self._prompts[prompt] = len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids or ())
            if output.num_cached_tokens is not None:
                self._cached[prompt] = output.num_cached_tokens
        for completion in output.outputs:
            self.completion += len(completion.token_ids)

    def timing(self) -> Timing:
        """The times of the request whose output came last."""
        return timing(self._metrics)

    def usage(self, reasoning: int | None = None) -> Usage:
        """The sums so far; `reasoning` of the completion's tokens were reasoning."""
        prompt = sum(self._prompts.values())
        usage = Usage(prompt, prompt + self.completion, self.completion)
        if self._details:
            usage.prompt_tokens_details = PromptDetails(sum(self._cached.values()))
        if reasoning is not None:
            usage.completion_tokens_details = CompletionDetails(min(reasoning, self.completion))
        return usage
