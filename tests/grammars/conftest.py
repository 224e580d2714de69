from __future__ import annotations

import pytest

from frame import LLM
from frame.testing import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of bytes: whatever it writes sensibly, a grammar made it write."""
    path = tmp_path_factory.mktemp("grammars") / "model"
    return make_checkpoint(path, "llama", tokenizer=True, max_position_embeddings=2048, vocab_size=270)


@pytest.fixture(scope="module")
def llm(folder):
    llm = LLM(str(folder), num_threads=1, max_num_seqs=200, grammar_compile_seconds=2.0, kv_cache_memory_bytes=1 << 28)
    yield llm
    llm.close()
