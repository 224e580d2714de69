"""The contract of grammar backends: allowed prefixes can be completed, others are refused, matchers share no state."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import numpy as np
import pytest

from frame.core.interfaces.grammar import Grammar, GrammarBackend, GrammarMatcher
from frame.core.interfaces.sampling import StructuredOutputsParams

from . import tokenizers
from .plugin_suite import PluginSuite

_VOCAB = 413  # no multiple of 32, and more than the tokenizer has
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def _bits(words: np.ndarray) -> np.ndarray:
    allowed: np.ndarray = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    return allowed


class GrammarBackendSuite(PluginSuite):
    """The contract of `frame.interfaces.GrammarBackend`.

        class TestMine(GrammarBackendSuite):
            plugin = "mine"            # or target = "package.module:Class"

    Walks random outputs through small grammars. `wrong` are constraints that it must refuse; a backend that does not
    serve a kind of constraint leaves it out of `kinds`.
    """

    kind = "grammar"
    kinds: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "json_object")
    wrong: ClassVar[tuple[dict[str, Any], ...]] = ({"regex": "(("}, {"json": "{"}, {"json": {"type": "nothing"}})

    def backend(self) -> GrammarBackend:
        """A new backend over a small byte-level vocabulary of 400 tokens in a model of 413."""
        kind = self.found()
        reason = kind.supports()
        assert reason is None or (isinstance(reason, str) and reason), (
            f"supports must give None or a reason: {reason!r}"
        )
        if reason is not None:
            pytest.skip(reason)
        made = self.make(vocabulary=tokenizers.vocabulary(_VOCAB))
        assert isinstance(made, GrammarBackend), f"{type(made).__name__} does not derive from GrammarBackend"
        return made

    def compiled(self, backend: GrammarBackend, **constraint: Any) -> Grammar:
        """A grammar, by way of both steps."""
        text = backend.normalize(StructuredOutputsParams(**constraint))
        assert isinstance(text, str), f"normalize must give text, gave {type(text).__name__}"
        return backend.compile(text)

    def masks(self, backend: GrammarBackend, matchers: list[GrammarMatcher]) -> np.ndarray:
        """bool [len(matchers), 416]: what may come next."""
        words = np.full((len(matchers), -(-_VOCAB // 32)), -1, np.int32)
        backend.fill_masks(matchers, words)
        allowed = _bits(words)
        assert not allowed[:, _VOCAB:].any(), "a mask allows ids beyond the vocabulary"
        return allowed

    def at_end(self, matcher: GrammarMatcher) -> bool:
        """Whether the matcher says that nothing can follow."""
        return matcher.finished

    def walk(self, backend: GrammarBackend, matcher: GrammarMatcher, seed: int) -> str:
        """A random output up to its end, as text."""
        draw = random.Random(seed)
        written = b""
        for _ in range(400):
            (allowed,) = self.masks(backend, [matcher])
            ids = np.flatnonzero(allowed).tolist()
            assert ids, f"nothing may follow {written!r}, which is not finished"
            token = draw.choice(ids)
            if token == 2:
                return written.decode()
            assert matcher.advance(token), f"token {token} was allowed after {written!r} and is refused"
            written += backend.vocabulary.token_bytes(token)
            if matcher.finished:
                return written.decode()
        pytest.fail(f"no end after 400 tokens: {written[:80]!r}")

    def test_random_outputs_obey(self) -> None:
        backend = self.backend()
        cases: dict[str, Any] = {
            "json": _SCHEMA,
            "regex": r"[a-c]{2,6}-\d{3}",
            "choice": ["yes", "no", "maybe so"],
        }
        for kind in self.kinds:
            if kind not in cases:
                continue
            grammar = self.compiled(backend, **{kind: cases[kind]}, disable_any_whitespace=True)
            assert grammar.num_bytes > 0
            for seed in range(5):
                text = self.walk(backend, grammar.matcher(), seed)
                if kind == "json":
                    value = json.loads(text)
                    assert set(value) == {"name", "n"}, text
                    assert 0 <= value["n"] <= 99, text
                    assert len(value["name"]) <= 8, text
                elif kind == "choice":
                    assert text in cases["choice"]
                else:
                    assert len(text.split("-")[1]) == 3, text

    def test_what_the_mask_forbids_is_refused(self) -> None:
        backend = self.backend()
        grammar = self.compiled(backend, choice=["yes", "no"])
        (allowed,) = self.masks(backend, [grammar.matcher()])
        assert not allowed[2], "an end is allowed before the output is complete"
        forbidden = np.flatnonzero(~allowed[:_VOCAB]).tolist()
        for token in random.Random(0).sample(forbidden, 10):
            assert not grammar.matcher().advance(token), f"token {token} is not in the mask and was taken"

    def test_matchers_of_a_grammar_are_apart(self) -> None:
        backend = self.backend()
        grammar = self.compiled(backend, choice=["ab", "cd"])
        first, second = grammar.matcher(), grammar.matcher()
        before = self.masks(backend, [second])
        token = int(np.flatnonzero(before[0])[0])
        assert first.advance(token)
        both = self.masks(backend, [first, second])
        assert (both[1] == before[0]).all(), "a matcher moved with another one"
        assert (self.masks(backend, [second, first]) == both[::-1]).all(), "masks depend on the order of matchers"

    def test_the_end(self) -> None:
        backend = self.backend()
        matcher = self.compiled(backend, regex="a|ab").matcher()
        assert not self.at_end(matcher)
        letter = {backend.vocabulary.token_bytes(token): token for token in range(5, 262)}
        assert matcher.advance(letter[b"a"])
        assert not self.at_end(matcher)
        assert self.masks(backend, [matcher])[0, 2], "the output is complete, and no end is allowed"
        assert matcher.advance(letter[b"b"])
        assert self.at_end(matcher), "nothing can follow, and the matcher is not finished"
        assert matcher.error is None

    def test_wrong_constraints_are_refused_in_one_sentence(self) -> None:
        backend = self.backend()
        for constraint in self.wrong:
            with pytest.raises(ValueError, match=r".") as caught:
                self.compiled(backend, **constraint)
            assert "\n" not in str(caught.value), f"{constraint}: an error must be one line"
        backend.close()
