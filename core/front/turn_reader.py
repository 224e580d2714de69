"""Reads one output of a turn with a chain of readers: reasoning first, then calls in the content that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..interfaces.parser import (
    AssistantMessage,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    OutputReader,
    Reasoning,
    joined,
)


class TurnReader:
    """Reads one output: each reader of the chain gets the text that the one before it has passed on as content.

    `end_token` is the token that ends the reasoning, None where no single token does.
    """

    def __init__(
        self,
        readers: Sequence[OutputReader],
        parallel: bool,
        include_reasoning: bool,
        new_id: Callable[[], str],
        *,
        end_token: int | None = None,
    ) -> None:
        self._new_id = new_id
        self.message = AssistantMessage()
        self.reasoning: list[str] = []
        self.end_token = end_token
        self._num_tokens = 0
        self._num_until_end: int | None = None
        self._readers = list(readers)
        self._parallel = parallel
        self._include_reasoning = include_reasoning

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> list[OutputEvent]:
        """The events of new text, and at the end of the output those of the text that was held back."""
        if not self._readers:
            if not text:
                return []
            content: list[OutputEvent] = [Content(text)]
            self.message.add(content)
            return content
        self._count(token_ids)
        events: list[OutputEvent] = [Content(text)] if text else []
        for reader in self._readers:
            events = self._through(reader, events, token_ids, finished)
        events = joined([event for event in map(self._shown, events) if event is not None])
        self.message.add(events)
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._num_until_end is None and self.end_token is not None and self.end_token in token_ids:
            self._num_until_end = self._num_tokens + list(token_ids).index(self.end_token)
        self._num_tokens += len(token_ids)

    def num_reasoning_tokens(self, encode: Callable[[str], list[int]]) -> int:
        """Tokens before the one that ends the reasoning; where no single token ends it, the tokens of its text."""
        if not self.reasoning:
            return 0
        if self.end_token is None or (self._num_until_end is None and (self.message.calls or self.message.content)):
            return len(encode("".join(self.reasoning)))
        return self._num_tokens if self._num_until_end is None else self._num_until_end

    @staticmethod
    def _through(
        reader: OutputReader, events: list[OutputEvent], token_ids: Sequence[int], finished: bool
    ) -> list[OutputEvent]:
        found: list[OutputEvent] = []
        for event in events:
            if isinstance(event, Content):
                found += reader.feed(event.text, token_ids)
            else:
                found.append(event)
        if finished:
            found += reader.finish()
        return found

    def _shown(self, event: OutputEvent) -> OutputEvent | None:
        if isinstance(event, Reasoning):
            self.reasoning.append(event.text)
            return event if self._include_reasoning else None
        if isinstance(event, (CallBegin, CallArguments, CallEnd)) and event.index and not self._parallel:
            return None
        if isinstance(event, CallBegin):
            return event if event.id else CallBegin(event.index, event.name, self._new_id())
        return event
