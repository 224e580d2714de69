"""A tokenizer: turns text and chats into token ids, and token ids into text.

Prompts and outputs go through it in the API processes and in programs that use `LLM`; an engine asks it for nothing but
the vocabulary that grammars need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import InvalidRequest

if TYPE_CHECKING:
    from .grammar import Vocabulary
    from .setup import TokenizerSetup

ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a chat becomes a prompt. `chat_template` is a template, a file, or None for the default one.

    `template_kwargs` are further variables of the template, as a client sends them.
    """

    chat_template: str | None = None
    content_format: ContentFormat = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, str]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Pieces(dict[int, bytes]):
    """Token id → its bytes, which may be a part of a character. `read` gives those of an id that is met first.

    `texts` has the text of each token that was met and whose bytes are whole characters.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read
        self.texts: dict[int, str] = {}

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._read(token_id)
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = piece.decode()
        return piece


@dataclass(frozen=True)
class SpecialFrame:
    """The special tokens around and between texts.

    One text becomes head + ids + tail; two texts become head + ids + middle + ids + tail. `cut_left`: texts that are
    too long lose tokens at their beginning instead of their end.
    """

    head: Sequence[int] = ()
    middle: Sequence[int] = ()
    tail: Sequence[int] = ()
    cut_left: bool = False

    def cut(self, ids: Sequence[int], length: int) -> Sequence[int]:
        """Truncates a text's ids (without special tokens) to `length`."""
        return ids[max(0, len(ids) - length) :] if self.cut_left else ids[:length]

    def single(self, ids: Sequence[int], limit: int) -> list[int]:
        """One text with its special tokens, in at most `limit` ids."""
        return [*self.head, *self.cut(ids, max(limit - len(self.head) - len(self.tail), 0)), *self.tail]

    def parts(self, ids: list[int], limit: int) -> list[list[int]]:
        """A long prompt in parts of at most `limit` ids, each with the special tokens, also where `ids` has none."""
        end = len(ids) - len(self.tail)
        if [*self.head, *ids[len(self.head) : end], *self.tail] == ids:
            ids = ids[len(self.head) : end]
        room = max(limit - len(self.head) - len(self.tail), 1)
        return [[*self.head, *ids[start : start + room], *self.tail] for start in range(0, len(ids), room)]

    def pair(self, first: Sequence[int], second: Sequence[int], limit: int | None = None) -> tuple[list[int], int]:
        """Two texts as one prompt of at most `limit` ids, and where the second begins; the longer one is cut first."""
        if limit is not None:
            room = max(limit - len(self.head) - len(self.middle) - len(self.tail), 0)
            half = room // 2 if len(first) <= len(second) else room - room // 2
            kept = max(room - len(second), min(len(first), half))
            first, second = self.cut(first, kept), self.cut(second, room - kept)
        begin = [*self.head, *first, *self.middle]
        return [*begin, *second, *self.tail], len(begin)


class Tokenizer(ABC):
    """Built as `Class(setup, options)` for the folder `setup.folder`, which must be quick: `load` reads the files.

    After `load` any thread calls any method. Only `vocabulary` may be called without it.
    """

    def __init__(self, setup: TokenizerSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @classmethod
    @abstractmethod
    def supports(cls, folder: Path) -> str | None:
        """None when `folder` has files that it can read, else why not. Judges by the names of files; never raises."""

    def load(self) -> None:
        """Reads the files. What it raises ends the start, or refuses requests with text, naming the folder."""

    @abstractmethod
    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text; special tokens that are written out in it become those tokens.

        `add_special_tokens` puts those around it that the model was trained with. Raises `InvalidRequest` for a text
        that no UTF-8 stands for (lone surrogates).
        """

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of one text."""
        return self.encode_batch([text], add_special_tokens)[0]

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Like `decode` with special tokens, without a clean-up (of spaces) that depends on later tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    @property
    def pieces(self) -> Pieces | None:
        """The bytes of each token, if the text of a sequence is nothing but these joined; else None.

        Outputs are then decoded in constant time a token, else by decoding the newest tokens again and again.
        """
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, special or not."""
        return self.pieces[token_id] if self.pieces is not None else self.decode_raw([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no character read as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids that are not shown as text. Read for every output, so it must be quick."""

    def token_id(self, text: str) -> int | None:
        """The special token that is spelt `text`, or None."""
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in self.special_ids and self.token_text(ids[0]) == text else None

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an output, besides those that the checkpoint names."""
        return None

    @property
    @abstractmethod
    def max_token_chars(self) -> int:
        """Characters of the longest token; longer prompts than this times the model's length are refused unread."""

    @property
    def special_frame(self) -> SpecialFrame:
        """The special tokens around and between texts, for pooling models."""
        return SpecialFrame()

    @property
    def chat_template(self) -> Any:
        """The chat template, or a mapping of several by name; None without one."""
        return None

    def render_chat(
        self, messages: Sequence[Any], options: ChatOptions, check: Callable[[str], None]
    ) -> tuple[str, list[int]]:
        """A conversation as text and as ids; `options.chat_template` replaces `chat_template` where it is not None.

        `messages` are as the client sent them, of any form, and stay unchanged. Raises `InvalidRequest` naming the
        message at fault; any other error is taken as the template's. Calls `check(text)`, which raises for a text that
        is too long, before it tokenises. Special tokens that messages (also roles) and `options` spell out must not
        become such tokens, and a template, which may be a client's, must not reach anything of this process.
        """
        raise InvalidRequest("this tokenizer renders no chats; send a prompt", "messages")

    def vocabulary(self, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """The tokens for grammars of a model that scores `size` ids; the engine calls it without `load`.

        `eos_token_ids` are those that the checkpoint names; where it names none, the tokenizer's own one counts.
        """
        raise ValueError("grammars need a tokenizer with a tokenizer.json, and this one has none")

    def describe(self) -> dict[str, Any]:
        """Its settings as plain JSON, as `tokenizer_config.json` has them, without paths and secrets."""
        return {"tokenizer_class": type(self).__name__, "chat_template": self.chat_template}

    @property
    def native(self) -> Any:
        """The object of the tokenizer's own library, which `LLM.get_tokenizer` returns."""
        return self
