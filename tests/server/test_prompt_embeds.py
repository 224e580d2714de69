"""Embeddings of prompts over HTTP: the demo model, the OpenAI client and its `extra_body`."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save

import frame.plugins.models.demo
from tests.server.running import FAKE, REAL, Running, server

DEMO = Path(frame.plugins.models.demo.__file__).parent
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(REAL, "--disable-access-log", "--num-threads", "1", "--enable-prompt-embeds") as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    table: torch.Tensor = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    return table


def tokens(running: Running, text: str, special: bool = True) -> list[int]:
    response = httpx.post(f"{running.url}/tokenize", json={"prompt": text, "add_special_tokens": special})
    ids: list[int] = response.json()["tokens"]
    return ids


def encoded(*tensors: torch.Tensor) -> str:
    return base64.b64encode(save({f"t{number}": one.clone() for number, one in enumerate(tensors)})).decode()


def complete(client: openai.OpenAI, prompt: Any, embeds: Any = None, **fields: Any) -> list[str]:
    extra = {} if embeds is None else {"prompt_embeds": embeds}
    answer = client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=12, extra_body=extra, **fields
    )
    assert answer.usage is not None
    return [choice.text for choice in answer.choices]


def test_completions_of_embeddings_are_those_of_their_ids(
    running: Running, client: openai.OpenAI, table: torch.Tensor
) -> None:
    ids = tokens(running, TEXT)
    expected = complete(client, TEXT)
    assert complete(client, "", encoded(table[ids])) == expected
    other = complete(client, "The small cat")
    assert complete(client, "The small cat", [encoded(table[ids]), encoded(table[ids])]) == [*expected * 2, *other]
    whole = "".join(
        piece.choices[0].text
        for piece in client.completions.create(
            model="demo", prompt="", temperature=0, max_tokens=12, stream=True,
            extra_body={"prompt_embeds": encoded(table[ids])},
        )
        if piece.choices
    )  # fmt: skip
    assert whole == expected[0]
    answer = httpx.post(
        f"{running.url}/v1/completions", json={"prompt_embeds": encoded(table[ids]), "max_tokens": 3}
    ).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_part_of_a_chat(running: Running, client: openai.OpenAI, table: torch.Tensor) -> None:
    def say(content: Any) -> str | None:
        messages: Any = [{"role": "user", "content": content}]
        return (
            client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=12)
            .choices[0]
            .message.content
        )

    words = " a small cat"
    part = {"type": "prompt_embeds", "data": encoded(table[tokens(running, words, False)])}
    begin = {"type": "text", "text": "There was"}
    expected = say([begin, {"type": "text", "text": words}])
    assert say([begin, part]) == expected
    assert expected != say([begin])
    with pytest.raises(openai.BadRequestError, match="prompt_embeds part needs 'data'"):
        say([{"type": "prompt_embeds"}])


def header(tensors: dict[str, Any]) -> str:
    """A safetensors file that has no more than a header."""
    text = json.dumps(tensors).encode()
    return base64.b64encode(len(text).to_bytes(8, "little") + text).decode()


def pickled(rows: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def test_what_is_wrong_is_named(running: Running, client: openai.OpenAI, table: torch.Tensor) -> None:
    size = table.shape[1]
    rows = table[:4].float()
    cases = {
        "must be base64": "!!",
        "what torch.save writes, which is not read; send the bytes of safetensors": pickled(rows),
        "are no safetensors file": base64.b64encode(b"12345678 nothing").decode(),
        "must hold one tensor, got 2": encoded(rows, rows),
        "must be of type F32, F16, BF16, got F64": encoded(rows.double()),
        r"must have the shape \[n, ": encoded(rows[:, :3]),
        "must be finite; row 2": encoded(rows.index_fill(0, torch.tensor([2]), float("inf"))),
        "tokens, but the model takes": encoded(torch.zeros(3000, size, dtype=torch.float16)),
        "which are no F32 of shape": base64.b64encode(save({"t": rows})[:-4]).decode(),
        r"must have the shape \[n, hidden size\], got \[4\]": encoded(rows[:, 0]),
        r"must have the shape \[n, hidden size\], got \[0, ": encoded(rows[:0]),
        "no safetensors file": header({"t": {"dtype": "F32", "shape": [float("inf"), 4], "data_offsets": [0, 0]}}),
    }
    for message, embeds in cases.items():
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            complete(client, "", embeds)
        assert caught.value.status_code == 400
        assert str(caught.value.body["message"]).count(". ") == 0  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="echo is not for prompt_embeds"):
        complete(client, "", encoded(rows), echo=True)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not for prompts with prompt_embeds"):
        client.completions.create(
            model="demo", prompt="", extra_body={"prompt_embeds": encoded(rows), "prompt_logprobs": 1}
        )
    answer = httpx.post(f"{running.url}/v1/completions", json={"max_tokens": 3})
    assert answer.status_code == 400
    assert "prompt must be text, token ids, or a non-empty list of either" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(running: Running) -> None:
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt_embeds": "A" * (9 << 20)})
    assert answer.status_code == 413


def test_they_are_off_unless_asked_for() -> None:
    with server(FAKE, "--disable-access-log") as running:
        body = {"prompt_embeds": encoded(torch.zeros(4, 64)), "max_tokens": 3}
        answer = httpx.post(f"{running.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert "start the engine with --enable-prompt-embeds" in answer.json()["error"]["message"]
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt_embeds": "which nobody reads"})
        assert "start the engine with --enable-prompt-embeds" in answer.json()["error"]["message"]
