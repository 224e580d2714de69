"""The text of each token id, for grammars; read from the tokenizer's file when a grammar first needs it.

Imports transformers only for folders without a tokenizer.json; the tokenizers library reads the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..config.checkpoint import Checkpoint
from ..config.tree import FrameConfig
from .front import tokenizer_source
from .token_bytes import Pieces, read_pieces
from .tokenizer import TokenizerError


class TokenizerVocabulary:
    """Implements `frame.interfaces.Vocabulary` over a `tokenizers.Tokenizer`, which it owns."""

    def __init__(self, backend: Any, size: int, eos_token_ids: Sequence[int]) -> None:
        self.size = size
        self.eos_token_ids = [token for token in eos_token_ids if 0 <= token < size]
        self.special_tokens = {
            added.content: token_id
            for token_id, added in backend.get_added_tokens_decoder().items()
            if added.special and token_id < size
        }
        self._backend = backend

    @cached_property
    def definition(self) -> str:
        self._backend.no_padding()
        self._backend.no_truncation()
        return str(self._backend.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    @cached_property
    def _pieces(self) -> Pieces:
        pieces = read_pieces(self._backend)
        if pieces is None:
            raise TokenizerError("the tokenizer's tokens have no bytes of their own: its decoder looks at neighbours")
        return pieces


def read_vocabulary(config: FrameConfig, checkpoint: Checkpoint) -> TokenizerVocabulary:
    """The vocabulary of the configured tokenizer; raises `TokenizerError` when there is none with a quick form."""
    source = tokenizer_source(config, checkpoint)
    if source.folder is not None and (source.folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            backend: Any = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerError(f"the tokenizer in {str(source.folder)!r} cannot be read: {error}") from error
    else:
        tokenizer = source.get()
        if tokenizer.backend is None:
            raise TokenizerError("grammars need a tokenizer with a tokenizer.json form, and this one has none")
        backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    eos = checkpoint.eos_token_ids
    if not eos and (named := source.get().eos_token_id) is not None:
        eos = [named]
    return TokenizerVocabulary(backend, checkpoint.vocab_size, eos)
