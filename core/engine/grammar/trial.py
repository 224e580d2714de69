"""Trying grammars in a process of their own: one that hangs, crashes or eats memory there costs one request an error.

The engine sends a constraint; the child compiles it, and answers with its normal form or a refusal. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...config.tree import FrameConfig
from ...interfaces.grammar import GrammarBackend
from ...interfaces.sampling import StructuredOutputsParams
from ...plugin_host.registry import Choice
from ...processes.bounded_process import BoundedProcess, OutOfBoundsError, Ready, Refused, one_line, serve_questions

#: Half of the least that a thread of the engine may have: a grammar that recurses too deeply must fail here, not there.
_STACK_BYTES = 1 << 20


class GrammarTrial:
    """A child process that tries one grammar at a time. It starts with the first, and again after it was killed."""

    def __init__(self, config: FrameConfig, choices: Sequence[Choice]) -> None:
        self._settings = config.structured_outputs
        start = {
            "config": config.model_dump(mode="json"),
            "plugins": [list(choice) for choice in choices if choice.kind in ("grammar", "tokenizer")],
        }
        self._process = BoundedProcess("grammar", start, Ready | str | Refused)

    def check(self, params: StructuredOutputsParams) -> str:
        """The normal form of a constraint that compiles within its bounds; raises `ValueError` for any other."""
        name = f"structured_outputs.{params.constraint}"
        try:
            answer: str | Refused = self._process.ask(params, self._settings.grammar_compile_seconds)
        except OutOfBoundsError as error:
            raise ValueError(f"{name} {self._excess(error.late)}") from None
        if isinstance(answer, Refused):
            raise ValueError(answer.error if answer.error.startswith(f"{name} ") else f"{name}: {answer.error}")
        return answer

    def _excess(self, late: bool) -> str:
        if late:
            seconds = self._settings.grammar_compile_seconds
            return f"takes more than {seconds:g} seconds to compile (grammar_compile_seconds)"
        return (
            f"nests too deeply, or takes more than {self._settings.grammar_compile_bytes} bytes of memory "
            "to compile (grammar_compile_bytes)"
        )

    def close(self) -> None:
        """Ends the process; from any thread, also while another one waits for an answer."""
        self._process.close()


def serve_trials(descriptor: int, build: Callable[[FrameConfig, list[Any]], GrammarBackend]) -> int:
    """The child process: reads its configuration from standard input, then tries grammars until its socket closes."""

    def prepare(start: dict[str, Any]) -> tuple[Callable[[Any], Any], int]:
        config = FrameConfig.model_validate(start["config"])
        backend = build(config, start["plugins"])
        return lambda params: _try(backend, params), config.structured_outputs.grammar_compile_bytes

    return serve_questions(descriptor, StructuredOutputsParams, prepare, _STACK_BYTES)


def _try(backend: GrammarBackend, params: StructuredOutputsParams) -> str | Refused:
    """Compiles, and fills the first mask, which shows a grammar that allows nothing at all."""
    try:
        text = backend.normalize(params)
        matcher = backend.compile(text).matcher()
        backend.fill_masks([matcher], np.zeros((1, -(-backend.vocabulary.size // 32)), np.int32))
    except (ValueError, RecursionError) as error:
        return Refused(one_line(error))
    except MemoryError:
        return Refused("it takes more memory to compile than grammar_compile_bytes")
    if matcher.error is not None:
        return Refused(f"no output can satisfy it, or the first token is too hard to find: {matcher.error}")
    return text
