"""The tokenizer of a configuration, which a plugin reads. Knows no library of tokenizers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.checkpoint import Checkpoint, find_folder
from ..config.json_file import check_files
from ..config.tree import FrameConfig
from ..interfaces.errors import InvalidRequest
from ..interfaces.grammar import Vocabulary
from ..interfaces.setup import TokenizerSetup
from ..interfaces.tokenizer import Tokenizer
from ..plugin_host.offers import NoPluginError, PluginError
from ..plugin_host.registry import Registry


class TokenizerError(InvalidRequest):
    """The tokenizer exists but cannot be loaded."""


class NoTokenizerError(TokenizerError):
    """There is no tokenizer, and text was given or asked for."""


class TokenizerSource:
    """The tokenizer of `config`, else of the checkpoint, loaded once on first use; any thread may ask.

    `folder` is None where no tokenizer is to be loaded.
    """

    def __init__(self, config: FrameConfig, checkpoint: Checkpoint, registry: Registry) -> None:
        model = config.model
        self.folder: Path | None = None
        if not (model.skip_tokenizer_init or config.server.tokens_only):
            self.folder = find_folder(model.tokenizer) if model.tokenizer else checkpoint.folder
        self.registry = registry
        self._config = config
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._error: TokenizerError | None = None

    def get(self) -> Tokenizer:
        """The tokenizer; raises `NoTokenizerError` when there is none, `TokenizerError` when it is broken."""
        if self._tokenizer is not None:
            return self._tokenizer
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error))
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._read(_loaded)
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
        with suppress(NoTokenizerError):
            return self.get()
        return None

    def vocabulary(self) -> Vocabulary:
        """The tokens for grammars, read without what text needs; raises `TokenizerError`."""
        size, ends = self._checkpoint.vocab_size, self._checkpoint.eos_token_ids
        vocabulary: Vocabulary = self._read(lambda tokenizer: tokenizer.vocabulary(size, ends))
        return vocabulary

    def _read(self, read: Callable[[Tokenizer], Any]) -> Any:
        """What `read` makes of a new tokenizer; its errors name the folder."""
        folder, mode = self.folder, self._config.model.tokenizer_mode
        if folder is None:
            raise NoTokenizerError("no tokenizer is loaded (skip_tokenizer_init): pass token ids")
        try:
            provider = self.registry.select("tokenizer", mode, lambda kind: kind.supports(folder))
        except PluginError as error:
            raised = NoTokenizerError if isinstance(error, NoPluginError) else TokenizerError
            raise raised(f"{error}: pass token ids, or name another tokenizer with 'tokenizer'") from error
        check_files(folder)
        try:
            return read(self.registry.make("tokenizer", provider, TokenizerSetup(folder), self._config))
        except Exception as error:  # libraries raise whatever their parsers raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TokenizerError(
                f"the tokenizer in {str(folder)!r} cannot be loaded: {cause}; "
                "mend it, name another with 'tokenizer', or serve token ids alone with 'skip_tokenizer_init'"
            ) from error


def _loaded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.load()
    return tokenizer
