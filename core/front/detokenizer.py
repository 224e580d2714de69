"""Token ids to text as they arrive, never showing half a character. Knows no stop string and no request."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..interfaces.engine import NO_TOKEN
from ..interfaces.tokenizer import Pieces, Tokenizer

#: Prompt tokens that new text is decoded after: a character has at most four bytes, each at most one token.
NUM_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"
#: Tokens whose text ends in U+FFFD are held back. From this number of held tokens on, the characters before the end are
#: shown: the text may never end with a whole character, because every token ends inside one or the text is not UTF-8.
_NUM_HELD_IN_PARTS = 4
#: From this number of held tokens on, all of their text is shown, because it is not UTF-8.
_NUM_HELD_NOT_UTF8 = 32
#: Most bytes of an incomplete UTF-8 character; each may decode to one U+FFFD.
_MAX_OPEN_BYTES = 3


class PieceDetokenizer:
    """For tokenizers that only join tokens: decodes their bytes as UTF-8 incrementally, in constant time a token."""

    def __init__(self, pieces: Pieces, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False  # whether the decoder holds the beginning of a character
        self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new ids; returns the whole characters that they completed."""
        pieces, skipped = self._pieces, self._skipped
        if not self._open and len(token_ids) == 1 and (token := token_ids[0]) not in skipped:
            text = pieces.texts.get(token)
            if text is not None:
                return text  # fast path for nearly all tokens: one look-up
        text = self._decoder.decode(b"".join([pieces[token] for token in token_ids if token not in skipped]))
        self._open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Ends the output: returns the rest of an incomplete character as U+FFFD, or an empty text."""
        self._open = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: decodes the newest tokens together with those before them and shows the difference."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int],
        skipped: frozenset[int],
        unspaced: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._unspaced = unspaced
        self._window = [token for token in context if token not in skipped]
        self._prefix = decode(self._window) if self._window else ""
        self._num_read = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new ids; returns the whole characters that they completed."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """Ends the output: returns the text that was held back."""
        return self._advance(self._decode(self._window)) if len(self._window) > self._num_read else ""

    def _push(self, token: int) -> str:
        follows_special = token in self._unspaced and bool(self._window) and self._window[-1] in self._unspaced
        self._window.append(token)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_read
        if text.endswith(_REPLACEMENT) and num_held < _NUM_HELD_NOT_UTF8:
            return "" if num_held < _NUM_HELD_IN_PARTS else self._show_whole_characters(text)
        new = self._advance(text)
        return new.lstrip(" ") if follows_special else new

    def _show_whole_characters(self, text: str) -> str:
        """Shows all but an incomplete character at the end of `text`, inside which the window must not end."""
        num_open = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_OPEN_BYTES)
        whole = text[: len(text) - num_open]
        if not whole.startswith(self._prefix):
            return ""
        new, self._prefix = whole[len(self._prefix) :], whole
        return new

    def _advance(self, text: str) -> str:
        """Returns the part of `text` that was not shown yet, and drops the oldest shown tokens from the window."""
        if text.startswith(self._prefix):
            new = text[len(self._prefix) :]
        elif self._prefix.endswith(_REPLACEMENT):
            new = text[len(self._prefix.rstrip(_REPLACEMENT)) :]
        else:
            new = self._decode(self._window[self._num_read :])
        recent = self._window[self._num_read :]
        prefix = self._decode(recent)
        if prefix:
            self._window, self._prefix = recent, prefix
        else:
            self._prefix = text
        self._num_read = len(self._window)
        return new


Detokenizer: TypeAlias = PieceDetokenizer | WindowDetokenizer


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
    kept: Sequence[int] = (),
) -> Detokenizer:
    """The detokeniser of one output, whose text continues the prompt's.

    `kept` are special tokens that stay in the text where the others are skipped.
    """
    skipped: frozenset[int] = tokenizer.special_ids - frozenset(kept) if skip_special_tokens else frozenset()
    context = [token for token in prompt_ids[-NUM_CONTEXT_TOKENS:] if token != NO_TOKEN]
    if tokenizer.pieces is not None:
        return PieceDetokenizer(tokenizer.pieces, context, skipped)
    unspaced = frozenset() if spaces_between_special_tokens else tokenizer.special_ids
    return WindowDetokenizer(tokenizer.decode_raw, context, skipped, unspaced)
