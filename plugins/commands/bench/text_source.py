"""Makes prompts of a wanted length: with a tokenizer to the token, without one from common words.

The tokenizer is the `tokenizers` library's own, read from tokenizer.json: nothing of transformers or torch is imported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from frame.quoting import quoted
from frame.settings import ConfigError

#: Short common words: nearly every tokenizer has each of them, with its space, as one token.
_WORDS = tuple(
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "  # noqa: SIM905
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years where much your way down".split()
)
_TRIES = 8


class TextSource(Protocol):
    """Random texts and the lengths of given ones, in tokens."""

    name: str

    def ids(self, length: int, draw: random.Random) -> list[int]:
        """`length` random pieces, for `text` of the same source."""

    def text(self, ids: Sequence[int]) -> tuple[str | Sequence[int], int]:
        """The prompt that the pieces make, and its length in tokens (0: not known)."""

    def count(self, text: str) -> int:
        """The length of a text in tokens, estimated where there is no tokenizer."""


class WordSource:
    """Words in place of tokens; the server's own count of the prompt is what is reported."""

    name = ""

    def ids(self, length: int, draw: random.Random) -> list[int]:
        return draw.choices(range(len(_WORDS)), k=length)

    def text(self, ids: Sequence[int]) -> tuple[str, int]:
        return " ".join(_WORDS[index] for index in ids), 0

    def count(self, text: str) -> int:
        return -(-len(text) // 4)


class TokenizerSource:
    """The vocabulary of a checkpoint without its special tokens."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"--tokenizer {quoted(str(folder))} cannot be read: {error}") from None
        self.name = str(folder)
        special = {index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._ids = [index for index in sorted(self._tokenizer.get_vocab().values()) if index not in special]

    def ids(self, length: int, draw: random.Random) -> list[int]:
        return draw.choices(self._ids, k=length)

    def text(self, ids: Sequence[int]) -> tuple[str, int]:
        """A text of `len(ids)` tokens: decoded ids rarely encode to as many, so the text is cut or filled up."""
        wanted, now = len(ids), list(ids)
        draw = random.Random(f"{wanted} {ids[:8]}")
        text = self._decode(now)
        for _ in range(_TRIES):
            now = self._encode(text)
            if len(now) == wanted:
                break
            now = now[:wanted] + self.ids(max(0, wanted - len(now)), draw)
            text = self._decode(now)
        return text, len(self._encode(text))

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def text_source(tokenizer: str | None, model: str | None) -> TextSource:
    """The tokenizer that was named, else that of a local model folder, else words."""
    if tokenizer is not None:
        from frame.settings import fetch_model, find_folder, from_flat

        path = Path(tokenizer).expanduser()
        if path.is_file():
            return TokenizerSource(path)
        named = fetch_model(from_flat({"model": tokenizer, "load_format": "dummy"}), command=True).model
        return TokenizerSource(find_folder(named.model, named.revision))
    folder = Path(model).expanduser() if model else None
    if folder is not None and (folder / "tokenizer.json").is_file():
        return TokenizerSource(folder)
    return WordSource()
