from __future__ import annotations

import pytest

from frame.interfaces import Tokenizer
from frame.testing import tokenizers as tiny
from tests.front.engines import source_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.save(tiny.byte_level(), tmp_path_factory.mktemp("front") / "bytes")


@pytest.fixture(scope="session")
def source(folder):
    return source_of(folder)


@pytest.fixture(scope="session")
def tokenizer(source) -> Tokenizer:
    return source.get()


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory) -> Tokenizer:
    return tiny.load(tiny.save(tiny.byte_fallback(), tmp_path_factory.mktemp("front") / "fallback"))


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory) -> Tokenizer:
    return tiny.load(tiny.save(tiny.word_pieces(), tmp_path_factory.mktemp("front") / "words"))
