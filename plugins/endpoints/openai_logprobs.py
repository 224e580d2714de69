"""Log-probabilities in answers of the OpenAI routes: structs that encode to the bytes on the wire."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

#: JSON has no infinity; this is what a probability of zero reads as.
_FLOOR = -9999.0


class TopLogprob(Struct):
    """One candidate at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The token drawn at one position, and the best candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class TextLogprobs(Struct):
    """Log-probabilities of a completion; None at position 0 of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextPlace:
    """The character of a choice's text at which the next token begins; it never moves backwards."""

    def __init__(self) -> None:
        self.offset = 0
        self._prompt: str | None = None
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def enter_prompt(self, text: str) -> None:
        """The next tokens are those of the echoed `text`, which lacks some of them, such as a start token."""
        self._prompt = text

    def leave_prompt(self) -> None:
        """The next token is the first one after the echoed text."""
        if self._prompt is not None:
            self.offset, self._prompt = len(self._prompt), None
            self._decoder.reset()

    def advance(self, data: bytes) -> None:
        """Passes a token with these UTF-8 bytes, which may be a part of a character."""
        text = self._decoder.decode(data)
        if self._prompt is not None:
            shown = (one for one in (text, text.lstrip()) if self._prompt.startswith(one, self.offset))
            text = next(shown, "")
        self.offset += len(text)


class TokenTexts:
    """How tokens are shown in log-probabilities: their text, or "token_id:N"."""

    def __init__(self, token_bytes: Callable[[int], bytes], as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        data = self._token_bytes(token_id)
        return (f"token_id:{token_id}" if self._as_ids else data.decode(errors="replace")), data

    def chat(self, token_ids: Iterable[int], positions: Iterable[Any], top: int) -> ChatLogprobs:
        """Log-probabilities of a piece of a chat answer, with the `top` best candidates (-1: all)."""
        content = []
        for token_id, entries in zip(token_ids, positions, strict=False):
            text, data = self(token_id)
            best = [
                TopLogprob(*self._candidate(candidate, entry)) for candidate, entry in _best(entries, top) if top != 0
            ]
            content.append(TokenLogprob(text, max(entries[token_id].logprob, _FLOOR), list(data), best))
        return ChatLogprobs(content)

    def _candidate(self, token_id: int, entry: Any) -> tuple[str, float, list[int]]:
        text, data = self(token_id)
        return text, max(entry.logprob, _FLOOR), list(data)

    def text(self, token_ids: Iterable[int], positions: Iterable[Any], top: int, place: TextPlace) -> TextLogprobs:
        """Log-probabilities of a piece of a completion that begins at `place`, which moves to its end."""
        answer = TextLogprobs([], [], [], [])
        for token_id, entries in zip(token_ids, positions, strict=False):
            text, data = self(token_id)
            answer.text_offset.append(place.offset)
            answer.tokens.append(text)
            place.advance(data)
            if entries is None:
                answer.token_logprobs.append(None)
                answer.top_logprobs.append(None)
                continue
            answer.token_logprobs.append(max(entries[token_id].logprob, _FLOOR))
            answer.top_logprobs.append(
                {self(candidate)[0]: max(entry.logprob, _FLOOR) for candidate, entry in _best(entries, top)}
            )
        return answer


def _best(entries: Mapping[int, Any], top: int) -> list[tuple[int, Any]]:
    """The `top` most likely candidates of one position, best first."""
    ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return ordered if top < 0 else ordered[:top]


def prompt_logprobs(positions: Any) -> Any:
    """Prompt log-probabilities as a list of null or token id -> entry."""
    if positions is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": max(entry.logprob, _FLOOR),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in positions
    ]
