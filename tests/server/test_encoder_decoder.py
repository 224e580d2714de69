"""A model with an encoder and a decoder over HTTP: the prompt of a completion is what the encoder reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from frame.testing.encoder_decoders import continued, make_encoder_decoder
from tests.server.running import REAL, Running, server

pytestmark = pytest.mark.matrix  # it starts a server of its own
TEXT, COUNT = "a text to read", 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_decoder(tmp_path_factory.mktemp("bart"), "bart", tokenizer=True)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    arguments = ["--served-model-name", "it", "--max-model-len", "64", "--num-threads", "1", "--dtype", "float32"]
    with server(REAL, str(folder), *arguments) as running:
        yield running


def test_completions_of_text_and_ids(running: Running, folder: Path) -> None:
    url, fields = f"{running.url}/v1/completions", {"model": "it", "temperature": 0, "max_tokens": COUNT}
    fields |= {"ignore_eos": True, "return_token_ids": True}
    ids = httpx.post(f"{running.url}/tokenize", json={"prompt": TEXT}).json()["tokens"]
    expected = continued(folder, ids, [2], COUNT)
    for prompt in (TEXT, ids):
        answer = httpx.post(url, json={**fields, "prompt": prompt}).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(ids) + 1  # the decoder's start token
    counted = re.findall(r"^frame_prompt_tokens_total\S* (\d+)", httpx.get(f"{running.url}/metrics").text, re.MULTILINE)
    assert counted == [str(2 * (len(ids) + 1))]
    other = httpx.post(url, json={**fields, "prompt": [TEXT, "another"]}).json()["choices"]
    assert [one["token_ids"] == expected for one in other] == [True, False]


def test_what_is_refused(running: Running) -> None:
    chat = {"model": "it", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "chats are not for a model with an encoder and a decoder" in answer.json()["error"]["message"]
    answer = httpx.post(f"{running.url}/v1/completions", json={"model": "it", "prompt": [5] * 65})
    assert answer.status_code == 400
    assert "the encoder prompt has 65 tokens; the model's encoder reads 1 to 64" in answer.json()["error"]["message"]
    answer = httpx.post(f"{running.url}/v1/embeddings", json={"model": "it", "input": "x"})
    assert answer.status_code in (400, 404)
