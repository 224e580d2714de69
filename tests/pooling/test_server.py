"""The OpenAI client and plain HTTP against a server of a tiny embedding model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from torch.nn import functional

from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import near
from tests.server.running import REAL, Running, server

TEXTS = ["the sea", "a book about the sea and its fish", "x"]
LONG = "word " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_pooling_checkpoint(tmp_path_factory.mktemp("served"), "bert", tokenizer=True)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in
               (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.fixture(scope="module")
def running(folder: Any) -> Iterator[Running]:
    arguments = ("--hf-overrides.is_matryoshka", "true", "--served-model-name", "tiny", "--max-inputs", "8")
    with server(REAL, str(folder), *arguments, "--enable-chunked-processing", "--disable-access-log") as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(folder: Any) -> Any:
    """Mean-pooled states of transformers, not normalised, by token ids."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def pooled(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).last_hidden_state[0].mean(0)

    return pooled


def ids_of(running: Running, text: str) -> list[int]:
    ids: list[int] = httpx.post(f"{running.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(running.url + path, json=body, timeout=30)


def test_embeddings_as_floats_and_base64(running: Running, client: openai.OpenAI, wanted: Any) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    ids = [ids_of(running, text) for text in TEXTS]
    reference = [functional.normalize(wanted(one), dim=0) for one in ids]
    assert near([item.embedding for item in answer.data], torch.stack(reference))
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    default = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64 and decodes it
    assert near([item.embedding for item in default.data], torch.stack(reference))
    raw = post(running, "/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()["data"][0]["embedding"]
    assert near(np.frombuffer(base64.b64decode(raw), "<f4"), reference[0])


async def test_the_asynchronous_client_and_the_strict_ones(running: Running) -> None:
    settings: dict[str, Any] = {
        "base_url": f"{running.url}/v1", "api_key": "none", "max_retries": 0, "_strict_response_validation": True,
    }  # fmt: skip
    async with openai.AsyncOpenAI(**settings) as client:
        answer = await client.embeddings.create(model="tiny", input=TEXTS, dimensions=16, encoding_format="float")
        assert [model.id async for model in client.models.list()] == ["tiny"]
    with openai.OpenAI(**settings) as strict:
        again = strict.embeddings.create(model="tiny", input=TEXTS, dimensions=16, encoding_format="float")
    assert near([item.embedding for item in again.data], [item.embedding for item in answer.data])
    async with openai.AsyncOpenAI(**{**settings, "_strict_response_validation": False}) as lenient:  # decodes base64
        packed = await lenient.embeddings.create(model="tiny", input=TEXTS, dimensions=16)
    assert near([item.embedding for item in packed.data], [item.embedding for item in answer.data])


def test_token_ids_and_dimensions(running: Running, client: openai.OpenAI, wanted: Any) -> None:
    ids = ids_of(running, TEXTS[1])
    (item,) = client.embeddings.create(model="tiny", input=ids, dimensions=16).data
    assert near(item.embedding, functional.normalize(wanted(ids)[:16], dim=0))
    assert len(client.embeddings.create(model="tiny", input=[ids, ids[:3]]).data) == 2
    with pytest.raises(openai.BadRequestError, match="dimensions must be one of 1 to 64, got 65"):
        client.embeddings.create(model="tiny", input=ids, dimensions=65)
    whole = post(running, "/v1/embeddings", input=ids, normalize=False).json()["data"][0]["embedding"]
    assert near(whole, wanted(ids), 1e-4)


def test_long_texts_are_cut_or_embedded_in_parts(running: Running, client: openai.OpenAI, wanted: Any) -> None:
    ids = ids_of(running, LONG)
    cut = client.embeddings.create(model="tiny", input=LONG, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 128
    assert near(cut.data[0].embedding, functional.normalize(wanted([*ids[:127], ids[-1]]), dim=0))
    inner = ids[1:-1]
    parts = [[ids[0], *inner[start : start + 126], ids[-1]] for start in range(0, len(inner), 126)]
    weights = torch.tensor([len(part) for part in parts], dtype=torch.float32)
    mean = (torch.stack([wanted(part) for part in parts]) * weights[:, None]).sum(0) / weights.sum()
    joined = client.embeddings.create(model="tiny", input=LONG)
    assert len(parts) > 2
    assert near(joined.data[0].embedding, functional.normalize(mean, dim=0))


def test_scores_and_ranks_are_cosines(running: Running, wanted: Any) -> None:
    units = [functional.normalize(wanted(ids_of(running, text)), dim=0) for text in TEXTS]
    cosines = [float(units[0] @ unit) for unit in units]
    answer = post(running, "/score", text_1=TEXTS[0], text_2=TEXTS).json()
    assert near([item["score"] for item in answer["data"]], cosines)
    jina = post(running, "/v1/rerank", query=TEXTS[0], documents=[{"text": text} for text in TEXTS], top_n=2).json()
    order = sorted(range(3), key=lambda place: -cosines[place])[:2]
    assert [item["index"] for item in jina["results"]] == order
    assert jina["results"][0]["document"] == {"text": TEXTS[order[0]]}
    cohere = post(running, "/v2/rerank", query=TEXTS[0], documents=TEXTS).json()
    assert near([item["relevance_score"] for item in cohere["results"]], sorted(cosines, reverse=True))
    assert "document" not in cohere["results"][0]
    assert post(running, "/score", text_1=TEXTS[:2], text_2=TEXTS).status_code == 400


def test_rows_of_tokens(running: Running) -> None:
    (item,) = post(running, "/pooling", input=TEXTS[0], task="token_embed").json()["data"]
    assert np.array(item["data"]).shape == (len(ids_of(running, TEXTS[0])), 64)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "x"}),
        ("/classify", {"input": "x"}),
    ],
)
def test_what_the_model_cannot_do_is_one_clear_400(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = post(running, path, **body)
    assert answer.status_code == 400, answer.text
    assert "it can: embed" in answer.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "must be text, token ids"),
        ({"input": [700]}, "ids go from 0 to 511"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "at least 1"),
        ({"input": "x", "truncate_prompt_tokens": 900}, "at most the model's 128"),
        ({"input": ["x"] * 9}, "at most 8 inputs"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
    ],
)
def test_bad_input_is_a_400_and_others_go_on(running: Running, body: dict[str, Any], message: str) -> None:
    answer = post(running, "/v1/embeddings", **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert post(running, "/v1/embeddings", input="fine").status_code == 200
