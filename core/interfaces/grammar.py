"""A grammar backend: compiles constraints, follows outputs through them, and says which tokens may come next.

It works on token ids in the engine process. When to compile, where a hostile grammar is tried first, what is kept and
when masks are computed is the engine's. Knows no request and no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from .sampling import StructuredOutputsParams
    from .setup import GrammarSetup


class Vocabulary(Protocol):
    """What token ids stand for."""

    @property
    def size(self) -> int:
        """Ids of the model, some of which may be no token."""

    @property
    def definition(self) -> str:
        """The tokenizer as tokenizer.json holds it."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an output."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are not text: their names and ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character; b"" where there is none."""


class GrammarMatcher(ABC):
    """Where one output stands in its grammar. One thread at a time uses it."""

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Takes the next token; False when the grammar does not allow it, and then the matcher is of no more use."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output is complete and no token but an end can follow."""

    @property
    def error(self) -> str | None:
        """Why the matcher is of no more use: a limit was hit, or no token can follow. One sentence, or None."""
        return None


class Grammar(ABC):
    """A compiled grammar. Shared by all requests that ask for the same."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """About how much memory it takes now, which may grow as outputs follow it; the engine bounds the sum."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """A new matcher at the beginning; quick."""


class GrammarBackend(ABC):
    """Built as `Class(setup, options)` when the first request needs it.

    `normalize` and `compile` are called by any thread, several at once. Both run first in a process that is killed when
    they take too long or too much memory, so they must be pure functions of their arguments.
    """

    def __init__(self, setup: GrammarSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.vocabulary: Vocabulary = setup.vocabulary

    @classmethod
    def supports(cls) -> str | None:
        """None when it can be used here, else why not: for example, a library is not installed."""
        return None

    @abstractmethod
    def normalize(self, params: StructuredOutputsParams) -> str:
        """The constraint in the backend's own notation. Raises `ValueError` with one sentence for the caller."""

    @abstractmethod
    def compile(self, text: str) -> Grammar:
        """Compiles what `normalize` gave. Raises `ValueError` with one sentence for the caller."""

    @abstractmethod
    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: np.ndarray) -> None:
        """Writes what may come next: bit v % 32 of `words[i, v // 32]` for token v after `matchers[i]`.

        `words` is int32 [len(matchers), ceil(vocabulary.size / 32)]. An end of output is allowed where the grammar is
        complete. Row i means nothing where `matchers[i].error` is set afterwards.
        """

    def close(self) -> None:
        """Ends threads. Called once, when nothing else runs."""
