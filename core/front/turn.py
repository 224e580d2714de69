"""Splits output text into content, reasoning and tool calls with the chosen parsers; one `AssistantTurn` a request.

Knows no wire format and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..config.tree import FrameConfig
from ..interfaces.errors import RequestError
from ..interfaces.parser import (
    AssistantMessage,
    OutputEvent,
    ParserRequest,
    ReasoningParser,
    ToolParser,
)
from ..interfaces.sampling import SamplingParams, StructuredOutputsParams
from ..interfaces.setup import ParserSetup
from ..interfaces.tokenizer import ChatOptions
from ..plugin_host.offers import PluginError
from ..plugin_host.registry import Registry
from .call_formats import only_calls, text_or_calls, text_with_calls
from .parser_choice import parser_of_any_model, suited_parser
from .tools import ToolChoice, read_tools
from .turn_reader import TurnReader

if TYPE_CHECKING:
    from ..interfaces.provider import Provider
    from .front import Front

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputParsers:
    """The parsers of a server.

    `tools` and `reasoning` read the model's own formats. `forced` gives the grammar of demanded calls, and reads those
    calls, where `tools` has no grammar. `auto`: the model may choose to call. Where `tools` is None, the first request
    with tools asks `find_tools` for the parser, which is None when there is none. `exclude_when_none`: the tools are
    hidden from the model when the request's tool choice is "none". `token_id` finds a special token by its text;
    `encode` tokenises a text without special tokens around it.
    """

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    forced: ToolParser | None = None
    auto: bool = False
    exclude_when_none: bool = True
    find_tools: Callable[[], ToolParser | None] = lambda: None
    token_id: Callable[[str], int | None] = lambda text: None
    encode: Callable[[str], list[int]] = lambda text: []
    #: classes of parsers that were asked for strict calls and have no grammar of them
    not_strict: set[str] = field(default_factory=set)

    def cannot_be_strict(self, parser: ToolParser) -> None:
        """Logs once that `strict: true` has no effect on calls that the model decides to make in this format."""
        name = type(parser).__name__
        if name not in self.not_strict:
            self.not_strict.add(name)
            logger.warning(
                "strict tools: %s has no grammar of calls, so arguments may break the schemas of tools with strict: "
                "true; tool_choice 'required' or a named tool holds them to it",
                name,
            )

    def turn(
        self,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel: bool = True,
        include_reasoning: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> AssistantTurn:
        """The turn of one request; raises `RequestError` 400 naming what is wrong with its tools."""
        choice = read_tools(tools, tool_choice)
        callable_tools = bool(choice.tools) and not choice.none
        found = replace(self, tools=self.find_tools()) if callable_tools and self.tools is None else self
        if callable_tools and not choice.must_call and (found.tools is None or not self.auto):
            why = "the server was started with --no-enable-auto-tool-choice"
            if self.auto:
                why = (
                    "the model's chat template writes no tool calls that could be found; "
                    "name their format (--tool-call-parser)"
                )
            raise RequestError(400, f"tool_choice 'auto' is not served: {why}", param="tool_choice")
        request = ParserRequest(
            tools=() if choice.none else choice.tools,
            must_call=choice.must_call,
            parallel=parallel,
            template_kwargs=template_kwargs or {},
        )
        return AssistantTurn(found, request, choice, include_reasoning)


def build_parsers(config: FrameConfig, registry: Registry, front: Front) -> OutputParsers:
    """The parsers that the configuration names or the model needs, over the tokenizer of `front`.

    Raises `PluginError`.
    """
    server, tokenizer = config.server, front.source.get_or_none()

    def render(messages: Sequence[Any], **options: Any) -> str:
        return front.render_chat(messages, ChatOptions(**options)).text or ""

    def make(kind: str, name: str | Provider | None) -> Any:
        setup = ParserSetup(render if tokenizer else None)
        return None if name is None else registry.make(kind, name, setup, config)

    def suited() -> Any:
        provider = suited_parser(registry, front)
        if provider is not None:
            logger.info("tool parser: %s, by the model type %s", provider.name, front.checkpoint.model_type)
        return make("tool-parser", provider)

    @cache
    def find_tools() -> Any:
        if server.tool_call_parser != "auto":
            return None
        try:
            return make("tool-parser", parser_of_any_model(registry))
        except (PluginError, ValueError) as error:
            logger.warning("no tool parser for this model: %s", error)
            return None

    by_tokenizer: dict[str, Any] = {}
    if tokenizer is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        by_tokenizer = {"token_id": tokenizer.token_id, "encode": encode}
    named = None if server.tool_call_parser == "none" else server.tool_call_parser
    return OutputParsers(
        tools=suited() if named == "auto" else make("tool-parser", named),
        find_tools=find_tools,
        reasoning=make("reasoning-parser", server.reasoning_parser),
        forced=make("tool-parser", server.forced_call_parser),
        auto=server.enable_auto_tool_choice,
        exclude_when_none=server.exclude_tools_when_tool_choice_none,
        **by_tokenizer,
    )


class AssistantTurn:
    """Implements `frame.interfaces.Turn`."""

    def __init__(
        self, parsers: OutputParsers, request: ParserRequest, choice: ToolChoice, include_reasoning: bool
    ) -> None:
        hidden = choice.none and parsers.exclude_when_none
        self.tools = choice.definitions if choice.definitions and not hidden else None
        self._parsers = parsers
        self._request = request
        self._include_reasoning = include_reasoning
        self._tool_parser = parsers.tools if request.tools else None
        if parsers.tools is not None and parsers.tools.reads_reasoning and parsers.reasoning is None:
            self._tool_parser = parsers.tools
        self._readers: dict[int, TurnReader] = {}

    def constrain(self, params: SamplingParams, prompt: str | None) -> SamplingParams:
        """The parameters with what the parsers need and the tool choice demands."""
        self._request = replace(self._request, prompt=prompt or "")
        changes: dict[str, Any] = {}
        constraint = params.structured_outputs
        if self._request.must_call:
            constraint = self._demanded()
        elif self._request.tools:
            constraint = self._allowed(constraint)
        if constraint is not None:
            changes["structured_outputs"] = self._after_reasoning(constraint)
        kept = self._kept_tokens()
        if kept and params.skip_special_tokens:
            changes["kept_special_token_ids"] = kept
        return msgspec.structs.replace(params, **changes) if changes else params

    def read(self, completion: Any) -> list[OutputEvent]:
        """The events that a new completion output adds."""
        reader = self._readers.get(completion.index)
        if reader is None:
            reader = self._readers[completion.index] = self._reader()
        return reader.read(completion.text, completion.token_ids, completion.finish_reason is not None)

    def message(self, index: int = 0) -> AssistantMessage:
        """The whole message so far of the output with this index."""
        reader = self._readers.get(index)
        return reader.message if reader is not None else AssistantMessage()

    def finish_reason(self, completion: Any) -> str | None:
        """Why the output ended."""
        reason: str | None = completion.finish_reason
        reader = self._readers.get(completion.index)
        return "tool_calls" if reason == "stop" and reader is not None and reader.message.calls else reason

    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all outputs."""
        return sum(reader.num_reasoning_tokens(self._parsers.encode) for reader in self._readers.values())

    def _demanded(self) -> StructuredOutputsParams:
        """The grammar of a demanded call, and the parser that reads it; the text's format does not apply."""
        strict = replace(self._request, tools=[replace(tool, strict=True) for tool in self._request.tools])
        for parser in (self._parsers.tools, self._parsers.forced):
            if parser is None:
                continue
            calls = parser.call_tags(strict) if parser is self._parsers.tools else None
            constraint = only_calls(calls, strict.parallel) if calls is not None else None
            constraint = constraint or parser.constraint(strict)
            if constraint is not None:
                self._tool_parser = parser
                return constraint
        raise RequestError(400, "no tool parser here has a grammar to demand a call with", param="tool_choice")

    def _allowed(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The grammar of an answer that may call tools, needed where the text has a format or a tool is strict."""
        own, request = self._tool_parser, self._request
        if constraint is None:
            if own is None or not any(tool.strict for tool in request.tools):
                return None
            calls = own.call_tags(request)
            if calls is None:
                self._parsers.cannot_be_strict(own)
                return None
            return text_with_calls(calls, request.parallel)
        if own is not None and own.end(request) is not None:
            return constraint  # the constraint applies to the text only; the parser's format writes the calls
        for parser in (own, self._parsers.forced):
            calls = parser.call_tags(request) if parser is not None else None
            if calls is not None:
                self._tool_parser = parser
                return text_or_calls(constraint, calls, request.parallel)
        return constraint

    def _after_reasoning(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """The constraint, applied only after the end of the reasoning where the output has any."""
        end = self._reasoning_end()
        if end is None or constraint.start_after:
            return constraint
        return msgspec.structs.replace(constraint, start_after=self._parsers.encode(end))

    def _reasoning_end(self) -> str | None:
        """The text that ends the reasoning, as the parser that reads the reasoning gives it."""
        own = self._parsers.tools
        parser = self._parsers.reasoning or (own if own is not None and own.reads_reasoning else None)
        return parser.end(self._request) if parser is not None else None

    def _kept_tokens(self) -> list[int]:
        """Ids of the special tokens that the readers must see."""
        texts = [text for parser in self._reading_parsers() for text in parser.tokens()]
        found = (self._parsers.token_id(text) for text in texts)
        return sorted({token for token in found if token is not None})

    def _reading_parsers(self) -> list[ToolParser | ReasoningParser]:
        tools = self._tool_parser
        reads_all = tools is not None and tools.reads_reasoning
        reasoning: ToolParser | ReasoningParser | None = None if reads_all else self._parsers.reasoning
        own = self._parsers.tools
        if not reads_all and reasoning is None and own is not None and own.reads_reasoning:
            reasoning = own  # the forced parser reads the demanded call
        return [parser for parser in (reasoning, tools) if parser is not None]

    def _reader(self) -> TurnReader:
        readers = [parser.start(self._request) for parser in self._reading_parsers()]
        end = self._reasoning_end()
        end_ids = self._parsers.encode(end) if end is not None else []
        new_id = self._tool_parser.new_id if self._tool_parser is not None else str
        return TurnReader(
            readers,
            self._request.parallel,
            self._include_reasoning,
            new_id,
            end_token=end_ids[0] if len(end_ids) == 1 else None,
        )
