"""A grammar backend: compiles constraints, follows outputs through them, and says which tokens may come next.

It works on token ids in the engine process. The engine decides when to compile, tries each grammar first in a process
of its own, keeps compiled ones, and decides when masks are computed. Knows no request and no tensor.
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
    """The tokens of a model: how many there are, and the text of each."""

    @property
    def size(self) -> int:
        """The number of ids that the model scores; some may stand for no token."""

    @property
    def definition(self) -> str:
        """The text of tokenizer.json."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an output."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are not text: their names and ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character; b"" where there is none."""


class GrammarMatcher(ABC):
    """The state of one output in its grammar. One thread at a time calls it."""

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Takes the next token; False when the grammar does not allow it, after which the matcher is useless."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output is complete and no token but an end can follow."""

    @property
    def error(self) -> str | None:
        """One sentence when the matcher is useless: a limit was reached, or no token can follow. Else None."""
        return None


class Grammar(ABC):
    """A compiled grammar. Shared by all requests that ask for the same."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """About how many bytes it takes now, which may grow with its matchers; the engine bounds the sum of all."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """Returns a new matcher, at the beginning of an output. Must be quick: the engine's loop waits."""


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
        """None when it can be used here, else why not, for example because a library is not installed."""
        return None

    @abstractmethod
    def normalize(self, params: StructuredOutputsParams) -> str:
        """Returns the constraint in the backend's own notation. Raises `ValueError`, one sentence for the client."""

    @abstractmethod
    def compile(self, text: str) -> Grammar:
        """Compiles what `normalize` returned. Raises `ValueError`, one sentence for the client."""

    @abstractmethod
    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: np.ndarray) -> None:
        """Sets bit v % 32 of `words[i, v // 32]` where token v may follow `matchers[i]`, and clears all others.

        `words` is int32 [len(matchers), ceil(vocabulary.size / 32)]. End tokens may follow where the grammar is
        complete. The engine ignores row i if `matchers[i].error` is set afterwards.
        """

    def close(self) -> None:
        """Ends its threads. Called once, when no other call runs or follows."""
