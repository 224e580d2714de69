"""The tokenizer of a checkpoint: text to ids and back. Loads its library on first use; knows no model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config.json_file import check_files
from .prompts import InvalidRequest
from .special_frame import SpecialFrame, read_frame
from .token_bytes import Pieces, read_pieces

#: tokenizer_config.json's classes that are nothing but tokenizer.json; loading them directly imports no torch.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
#: Names of settings that say where a tokenizer was loaded from, or hold a secret.
_LOCAL_SETTING = re.compile(r"file|^(name_or_path|is_local|cache_dir|backend|token|use_auth_token)$")
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class TokenizerError(InvalidRequest):
    """The tokenizer exists but cannot be loaded."""


class NoTokenizerError(TokenizerError):
    """There is no tokenizer, and text was given or asked for."""


def _load(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _FILES):
        raise NoTokenizerError(
            f"folder {str(folder)!r} has no tokenizer ({', '.join(_FILES)}): "
            "pass token ids, or name one with 'tokenizer'"
        )
    check_files(folder)
    try:
        kind = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        kind = None
    try:
        if kind in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers raise
        message = str(error).strip().splitlines()
        raise TokenizerError(
            f"the tokenizer in {str(folder)!r} cannot be loaded: {message[0] if message else type(error).__name__}; "
            "mend it, name another with 'tokenizer', or serve token ids alone with 'skip_tokenizer_init'"
        ) from error


class Tokenizer:
    """Wraps a transformers tokenizer (`hf`) and caches what the front asks often."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        #: the `tokenizers.Tokenizer` inside, or None
        self.backend = getattr(hf, "backend_tokenizer", None)

    @cached_property
    def pieces(self) -> Pieces | None:
        return read_pieces(self.backend)

    def describe(self, chat_template: str | None) -> dict[str, Any]:
        """The settings of its `tokenizer_config.json` as plain JSON, without those that tell about this machine.

        `chat_template` is the template that chats get; None means the tokenizer's own.
        """
        settings = {name: value for name, value in self.hf.init_kwargs.items() if not _LOCAL_SETTING.search(name)}
        settings["tokenizer_class"] = type(self.hf).__name__
        settings["chat_template"] = chat_template if chat_template is not None else self.hf.chat_template
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=_added_token, skipkeys=True))
        return plain

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that the tokenizer marks as special, which are not shown as text."""
        ids = set(self.hf.all_special_ids)
        if self.backend is not None:
            ids.update(i for i, added in self.backend.get_added_tokens_decoder().items() if added.special)
        return frozenset(ids)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.hf.get_vocab()), default=1)

    @cached_property
    def special_text(self) -> re.Pattern[str]:
        """Matches the text of any added token."""
        texts = sorted(self.hf.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @cached_property
    def frame(self) -> SpecialFrame:
        """The special tokens around and between texts."""
        return read_frame(self.hf, getattr(self.hf, "truncation_side", "right") == "left")

    @cached_property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in it become those tokens."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            encoded = self.hf(
                texts,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except (UnicodeEncodeError, TypeError) as error:
            if all(_is_encodable(text) for text in texts):
                raise
            raise InvalidRequest("text holds a lone surrogate, which is no character", "prompt") from error
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence, as the library gives it."""
        return self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Like `decode` with special tokens, without the clean-up that depends on neighbouring tokens."""
        if self.backend is not None:
            return self.backend.decode(list(token_ids), skip_special_tokens=False)  # type: ignore[no-any-return]
        return self.hf.decode(  # type: ignore[no-any-return]
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token_id(self, text: str) -> int | None:
        """The special token that is spelt `text`."""
        token = self.hf.convert_tokens_to_ids(text)
        return token if token in self.special_ids and self.hf.convert_ids_to_tokens(token) == text else None

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no character read as U+FFFD."""
        if self.pieces is not None:
            return self.pieces[token_id].decode(errors="replace")
        return self.decode_raw([token_id])


def _added_token(value: Any) -> dict[str, Any] | None:
    """An added token as `tokenizer_config.json` writes it; None for other objects that JSON does not have."""
    return {name: getattr(value, name) for name in _TOKEN_FIELDS} if hasattr(value, "single_word") else None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TokenizerSource:
    """The tokenizer of a folder, loaded once on first use; any thread may ask. `folder` None: there is no tokenizer."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._error: TokenizerError | None = None

    def get(self) -> Tokenizer:
        """The tokenizer; raises `NoTokenizerError` when there is none, `TokenizerError` when it is broken."""
        if self._tokenizer is not None:
            return self._tokenizer
        with self._lock:
            if self.folder is None:
                raise NoTokenizerError("no tokenizer is loaded (skip_tokenizer_init): pass token ids")
            if self._error is not None:
                raise type(self._error)(str(self._error))
            if self._tokenizer is None:
                try:
                    self._tokenizer = Tokenizer(_load(self.folder))
                except TokenizerError as error:
                    self._error = error
                    raise
            return self._tokenizer

    def preload(self) -> None:
        """Starts loading it on a thread; errors are raised where it is asked for."""

        def load() -> None:
            with suppress(TokenizerError):
                self.get()

        threading.Thread(target=load, name="frame-tokenizer", daemon=True).start()

    def get_or_none(self) -> Tokenizer | None:
        """The tokenizer, or None when there is none (then outputs have no text); raises for one that is broken."""
        if self.folder is None:
            return None
        try:
            return self.get()
        except NoTokenizerError:
            return None
