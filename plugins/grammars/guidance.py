"""The grammar backend over llguidance, a Rust library with a derivative lexer and an Earley parser.

The library is imported when a backend is built. Knows no request.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from frame import StructuredOutputsParams
from frame.interfaces import Grammar, GrammarBackend, GrammarMatcher, GrammarSetup

from .notation import Style, Whitespace, in_notation

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MAX_ERROR = 300
#: Bytes of a compiled grammar: as measured for small schemas, and a share that grows with its text.
_GRAMMAR_BYTES = 1 << 17
_BYTES_PER_CHARACTER = 256
#: Bytes that the lexer keeps for each unit of its work: 5 to 30, measured over fourteen kinds of expressions.
_BYTES_PER_FUEL = 20
#: Lexer work that is assumed for a mask where the library does not report it.
_FUEL_PER_FILL = 5_000
_FUEL = re.compile(r'"lexer_cost": (\d+)')


class GuidanceOptions(BaseModel):
    """Bounds of llguidance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_threads: int | None = Field(None, ge=1, description="Threads that fill masks; default: the library's choice.")
    max_lexer_states: int = Field(
        50_000, ge=100, description="Most states of one grammar's lexer, of one to two kilobytes each."
    )
    max_step_items: int = Field(50_000, ge=100, description="Most parser items of one mask: about 20000 a millisecond.")
    max_step_fuel: int = Field(
        200_000, ge=1000, description="Most lexer work of one mask: about 14000 units a millisecond."
    )


class GuidanceMatcher(GrammarMatcher):
    """The state of a grammar after the tokens of one output."""

    def __init__(self, parser: LLMatcher, grammar: GuidanceGrammar) -> None:
        self.parser = parser
        self.grammar = grammar

    def advance(self, token_id: int) -> bool:
        return bool(self.parser.consume_token(token_id))

    @property
    def finished(self) -> bool:
        return self.parser.is_stopped() and not self.parser.is_error()

    @property
    def error(self) -> str | None:
        return first_error(self.parser.get_error()) if self.parser.is_error() else None


class GuidanceGrammar(Grammar):
    """A compiled grammar. Matchers are copies of its parser and share its lexer, whose states grow with use."""

    def __init__(self, parser: LLMatcher, num_bytes: int, end: int) -> None:
        self._parser = parser
        self._num_bytes = num_bytes
        self._end = end
        self._num_fills = 0
        self._next_check = 1
        self._fuel = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes + _BYTES_PER_FUEL * self._fuel

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._parser.deep_copy(), self)

    def note_fill(self, parser: LLMatcher) -> None:
        """Counts a filled mask; from time to time reads how much work the lexer has done for all outputs together."""
        self._num_fills += 1
        if self._num_fills >= self._next_check:
            self._next_check = self._num_fills + 4 + self._num_fills // 4
            self._fuel = max(self._fuel, self._spent(parser))

    def _spent(self, parser: LLMatcher) -> int:
        """Lexer work so far. The library reports it only with an error, so a copy of the parser is made to fail."""
        copy = parser.deep_copy()
        for _ in range(2):  # a first end token may be valid, a second never is
            copy.consume_token(self._end)
        found = _FUEL.search(copy.get_error()) if copy.is_error() else None
        return int(found[1]) if found else self._num_fills * _FUEL_PER_FILL


class GuidanceBackend(GrammarBackend):
    """Compiles grammars and fills masks, both without holding Python's global lock."""

    def __init__(self, setup: GrammarSetup, options: Any = None) -> None:
        super().__init__(setup, options or GuidanceOptions())
        vocabulary = setup.vocabulary
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer

        if not vocabulary.eos_token_ids:
            raise ValueError("grammars need an end-of-sequence token, and this checkpoint names none")
        try:
            self._tokenizer = LLTokenizer(
                vocabulary.definition, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
            )
        except Exception as error:  # the library raises exceptions of its own
            reason = first_error(str(error))
            raise ValueError(f"the tokenizer cannot be used with the grammar backend 'guidance': {reason}") from error
        self._limits = LLParserLimits(
            max_lexer_states=self.options.max_lexer_states,
            step_max_items=self.options.max_step_items,
            step_lexer_fuel=self.options.max_step_fuel,
            verbose_errors=True,  # their text reports the lexer's work
        )
        self._executor = LLExecutor(self.options.num_threads)
        self._threads = threading.local()

    @classmethod
    def supports(cls) -> str | None:
        if find_spec("llguidance") is None:
            return "llguidance is not installed: pip install llguidance"
        return None

    def normalize(self, params: StructuredOutputsParams) -> str:
        settings = self.setup
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
        num_bytes = _GRAMMAR_BYTES + _BYTES_PER_CHARACTER * len(text)
        return GuidanceGrammar(parser, num_bytes, self.vocabulary.eos_token_ids[0])

    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: np.ndarray) -> None:
        known = [matcher for matcher in matchers if isinstance(matcher, GuidanceMatcher)]
        rows = [(matcher.parser, row) for row, matcher in enumerate(known)]
        if words.dtype != np.int32 or not words.flags.c_contiguous or len(words) < len(rows):
            raise ValueError(f"masks must be contiguous int32 of {len(rows)} rows, got {words.dtype} {words.shape}")
        executor = self._executor if len(rows) > 1 else self._thread_executor()
        executor.unsafe_compute_mask_ptr(rows, words.ctypes.data, words.shape[1] * 4, len(words))
        for matcher in known:
            matcher.grammar.note_fill(matcher.parser)

    def _thread_executor(self) -> LLExecutor:
        """The calling thread's own executor, so that one long fill does not delay fills of other threads."""
        from llguidance import LLExecutor

        executor: LLExecutor | None = getattr(self._threads, "executor", None)
        if executor is None:
            executor = self._threads.executor = LLExecutor(1)
        return executor


def _whitespace(none: bool, every: bool) -> Whitespace:
    return Whitespace.NONE if none else Whitespace.ANY if every else Whitespace.ONE_LINE


def first_error(message: str) -> str:
    """The library's message, often many lines with an excerpt of the grammar, as one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "no reason is given"
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    first = lines[0][:_MAX_ERROR].rstrip(": ")
    return f"{first}: {reason.removeprefix('error:').strip()}" if reason else first
