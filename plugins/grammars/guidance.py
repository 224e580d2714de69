"""Grammars by llguidance: a lexer of derivatives and an Earley parser in Rust, walked along a trie of the vocabulary.

The library is imported when a backend is built. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from frame import StructuredOutputsParams
from frame.interfaces import Grammar, GrammarBackend, GrammarMatcher, Vocabulary

from .notation import Style, Whitespace, in_notation

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_ERROR = 300
#: What a grammar costs before it is used: measured for small schemas, and a share that grows with its text.
_GRAMMAR_BYTES = 1 << 17
_BYTES_PER_CHARACTER = 256


class GuidanceOptions(BaseModel):
    """Bounds of llguidance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_threads: int | None = Field(None, ge=1, description="Threads that fill masks; default: the library's choice.")
    max_lexer_states: int = Field(
        50_000, ge=100, description="Most states of one output's lexer, of one to two kilobytes each."
    )
    max_step_items: int = Field(50_000, ge=100, description="Most parser items of one mask: about 20000 a millisecond.")


class GuidanceMatcher(GrammarMatcher):
    """A parser of llguidance at one place of an output."""

    def __init__(self, parser: LLMatcher) -> None:
        self.parser = parser

    def advance(self, token_id: int) -> bool:
        return bool(self.parser.consume_token(token_id))

    @property
    def finished(self) -> bool:
        return self.parser.is_stopped() and not self.parser.is_error()

    @property
    def error(self) -> str | None:
        return first_error(self.parser.get_error()) if self.parser.is_error() else None


class GuidanceGrammar(Grammar):
    """A parser that stays at the beginning, to be copied."""

    def __init__(self, parser: LLMatcher, num_bytes: int) -> None:
        self._parser = parser
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._parser.deep_copy())


class GuidanceBackend(GrammarBackend):
    """Compiles and fills masks without holding Python's lock."""

    def __init__(self, *, config: Any, options: Any = None, vocabulary: Vocabulary) -> None:
        super().__init__(config=config, options=options or GuidanceOptions(), vocabulary=vocabulary)
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer

        if not vocabulary.eos_token_ids:
            raise ValueError("grammars need a token that ends the output, and this checkpoint names none")
        try:
            self._tokenizer = LLTokenizer(
                vocabulary.definition, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
            )
        except Exception as error:  # the library raises its own kinds
            reason = first_error(str(error))
            raise ValueError(f"the tokenizer cannot be used with the grammar backend 'guidance': {reason}") from error
        self._limits = LLParserLimits(
            max_lexer_states=self.options.max_lexer_states,
            step_max_items=self.options.max_step_items,
            verbose_errors=False,
        )
        self._executor = LLExecutor(self.options.num_threads)

    @classmethod
    def supports(cls) -> str | None:
        if find_spec("llguidance") is None:
            return "llguidance is not installed: pip install llguidance"
        return None

    def normalize(self, params: StructuredOutputsParams) -> str:
        settings = self.config.structured_outputs
        style = Style(
            whitespace=_whitespace(
                params.disable_any_whitespace or settings.disable_any_whitespace, settings.any_whitespace
            ),
            whitespace_pattern=params.whitespace_pattern,
            additional_properties=not (params.disable_additional_properties or settings.disable_additional_properties),
            special_tokens=self.vocabulary.special_tokens,
        )
        try:
            return in_notation(params, style)
        except RecursionError:
            raise ValueError(f"structured_outputs.{params.constraint} nests too deeply") from None

    def compile(self, text: str) -> GuidanceGrammar:
        from llguidance import LLMatcher

        parser = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if parser.is_error():
            raise ValueError(f"the grammar does not compile: {first_error(parser.get_error())}")
        return GuidanceGrammar(parser, _GRAMMAR_BYTES + _BYTES_PER_CHARACTER * len(text))

    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: np.ndarray) -> None:
        rows = [(matcher.parser, row) for row, matcher in enumerate(matchers) if isinstance(matcher, GuidanceMatcher)]
        if words.dtype != np.int32 or not words.flags.c_contiguous or len(words) < len(rows):
            raise ValueError(f"masks must be contiguous int32 of {len(rows)} rows, got {words.dtype} {words.shape}")
        self._executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))


def _whitespace(none: bool, every: bool) -> Whitespace:
    return Whitespace.NONE if none else Whitespace.ANY if every else Whitespace.ONE_LINE


def first_error(message: str) -> str:
    """One line of what the library says, which may be many with an excerpt of the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "no reason is given"
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    first = lines[0][:_MAX_ERROR].rstrip(": ")
    return f"{first}: {reason.removeprefix('error:').strip()}" if reason else first
