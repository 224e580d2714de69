"""`frame run-batch` over the pooling routes: rerankers and embeddings, URLs and files, after a kill."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai.types import CreateEmbeddingResponse

from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.batches.test_run_batch import rows_of, store
from tests.pooling.conftest import near

__all__ = ["store"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUERY, DOCUMENTS = "who?", ["a cat", "a dog that barks", "nobody at all"]


def lines(*asked: tuple[str, dict[str, Any]]) -> bytes:
    rows = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n, (url, body) in enumerate(asked)]
    return "\n".join(map(json.dumps, rows)).encode()


def run(folder: Path, source: object, target: object, *flags: str) -> str:
    # an unsent result is kept in the working folder, so that one is the test's own
    command = [sys.executable, "-m", "frame", "run-batch", str(folder), "-i", str(source), "-o", str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--no-progress", *flags], stderr=subprocess.PIPE, text=True, timeout=400,
                          env=environment, cwd=folder, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def bodies(data: bytes) -> list[dict[str, Any]]:
    """The answers in the order of the lines, all of them served."""
    rows = rows_of(data)
    return [rows[str(number)]["response"]["body"] for number in range(len(rows))]


def test_a_reranker_by_url(store: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_pooling_checkpoint(tmp_path, "bert-reranker", tokenizer=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    url, files = store
    ranked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    files["/in.jsonl"] = lines(
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/rerank", ranked),
        ("/v2/rerank", ranked),
        ("/classify", {"input": DOCUMENTS}),
        ("/v1/embeddings", {"input": "x"}),
        ("/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS}),
    )
    text = run(folder, f"{url}/in.jsonl", f"{url}/out.jsonl", "--allow-private-addresses", "--dtype", "float32")
    assert "6 lines: 4 succeeded, 2 failed" in text
    score, jina, cohere, classes, embedding, pairs = bodies(files["/out.jsonl"])
    pairs_of = [tokenizer(QUERY, one, return_tensors="pt", return_token_type_ids=True) for one in DOCUMENTS]
    with torch.inference_mode():
        wanted = [float(model(**pair).logits.sigmoid()[0, 0]) for pair in pairs_of]
    assert near([item["score"] for item in score["data"]], wanted)
    best = sorted(range(3), key=lambda place: -wanted[place])[:2]
    for answer in (jina, cohere):
        assert [item["index"] for item in answer["results"]] == best
        assert near([item["relevance_score"] for item in answer["results"]], [wanted[place] for place in best])
    assert [item["document"]["text"] for item in jina["results"]] == [DOCUMENTS[place] for place in best]
    assert "document" not in cohere["results"][0]
    assert [item["num_classes"] for item in classes["data"]] == [1, 1, 1]
    assert "it can: classify, score" in embedding["error"]["message"]
    assert "text_1" in pairs["error"]["message"]


def test_embeddings_from_file_to_file_in_two_runs(tmp_path: Path) -> None:
    folder = make_pooling_checkpoint(tmp_path / "model", "bert", tokenizer=True)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(
        ("/v1/embeddings", {"input": DOCUMENTS}),
        ("/v1/embeddings", {"input": DOCUMENTS, "encoding_format": "base64"}),
        ("/pooling", {"input": QUERY, "task": "token_embed"}),
        ("/score", {"text_1": DOCUMENTS[0], "text_2": DOCUMENTS}),
        ("/rerank", {"query": DOCUMENTS[0], "documents": DOCUMENTS}),
    ))  # fmt: skip
    assert "5 lines: 5 succeeded, 0 failed" in run(folder, source, target)
    whole = target.read_bytes()
    floats, packed, rows, scores, ranking = bodies(whole)
    vectors = np.array([item.embedding for item in CreateEmbeddingResponse.model_validate(floats).data])
    assert near([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]], vectors)
    assert np.array(rows["data"][0]["data"]).shape[1] == vectors.shape[1]
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert near([item["score"] for item in scores["data"]], units @ units[0])
    assert ranking["results"][0]["index"] == 0
    ended = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(ended[:2]) + ended[2][:40])  # as a kill in the middle of a row leaves it
    assert "5 lines: 3 succeeded, 0 failed, 2 answered by an earlier run" in run(folder, source, target)
    assert target.read_bytes().startswith(b"".join(ended[:2]))
    assert len(bodies(target.read_bytes())) == 5
