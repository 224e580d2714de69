"""The text of each token id, for grammars, from a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from frame.interfaces import Pieces

from .token_bytes import read_pieces


class HfVocabulary:
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
            raise ValueError("the tokenizer's tokens have no bytes of their own: its decoder looks at neighbours")
        return pieces
