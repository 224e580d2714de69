"""Files and batches through the OpenAI client, over a folder that outlives the server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion

from tests.server.running import FAKE, Running, server, until

KEY, OTHER = "sesame", "poppy"
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def serving(folder: Path, delay: float, *more: str) -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.delay", str(delay), "--plugin.fake.vocab_size", "2048", "--disable-access-log",
        "--api-key", KEY, OTHER, "--plugin.batches.folder", str(folder), "--plugin.batches.max_bytes", "400000",
        "--max-upload-bytes", "50000", *more,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving(folder, 0.001) as running:
        yield running


def client_of(running: Running, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running) as client:
        yield client


def lines(count: int, **fields: Any) -> io.BytesIO:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **fields}
    rows = [{"custom_id": f"n{n}", "method": "POST", "url": CHAT, "body": body} for n in range(count)]
    return io.BytesIO("\n".join(map(json.dumps, rows)).encode())


def send(client: openai.OpenAI, data: io.BytesIO, name: str = "in.jsonl") -> FileObject:
    return client.files.create(file=(name, data), purpose="batch")


def make(client: openai.OpenAI, data: io.BytesIO) -> Batch:
    return client.batches.create(input_file_id=send(client, data).id, endpoint=CHAT, completion_window="24h")


def wait(client: openai.OpenAI, batch: Batch, status: str = "completed") -> Batch:
    until(lambda: client.batches.retrieve(batch.id).status == status, 60)
    return Batch.model_validate(client.batches.retrieve(batch.id).to_dict())


def rows_of(client: openai.OpenAI, name: str | None) -> dict[str, Any]:
    assert name is not None
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(name).text.splitlines())}


def test_files(client: openai.OpenAI, folder: Path) -> None:
    data = lines(3)
    file = send(client, data, "../../etc/passwd")
    assert FileObject.model_validate(file.to_dict()) == file
    assert (file.bytes, file.filename, file.purpose) == (len(data.getvalue()), "../../etc/passwd", "batch")
    assert client.files.content(file.id).read() == data.getvalue()
    assert file.id in [each.id for each in client.files.list().data]
    assert {path.name for path in folder.iterdir()} == {"files", "batches"}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.retrieve(file.id)


def test_a_batch(client: openai.OpenAI) -> None:
    bad_line = json.dumps({"custom_id": "bad", "method": "POST", "url": CHAT, "body": {"messages": []}})
    data = io.BytesIO(lines(4).getvalue() + f"\n\n{bad_line}\n".encode())
    batch = make(client, data)
    assert batch.status in ("validating", "in_progress")
    done = wait(client, batch)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 4, 1)
    good, bad = rows_of(client, done.output_file_id), rows_of(client, done.error_file_id)
    assert set(good) == {"n0", "n1", "n2", "n3"}
    for row in good.values():
        ChatCompletion.model_validate(row["response"]["body"])
    assert bad["bad"]["response"]["status_code"] == 400
    assert batch.id in [each.id for each in client.batches.list().data]


def test_lines_use_the_tokens_of_their_key_and_wait_for_them(tmp_path: Path) -> None:
    with (
        serving(tmp_path, 0.001, "--max-tokens-per-minute", "30") as running,
        client_of(running) as client,
        client_of(running, OTHER) as other,
    ):
        batches = [make(client, lines(1, max_tokens=40, ignore_eos=True)) for _ in range(2)]
        until(lambda: "completed" in [client.batches.retrieve(batch.id).status for batch in batches])
        until(lambda: "in_progress" in [client.batches.retrieve(batch.id).status for batch in batches])
        with pytest.raises(openai.RateLimitError, match="30 tokens in a minute"):
            client.completions.create(model="demo", prompt="x", max_tokens=1)
        other.completions.create(model="demo", prompt="x", max_tokens=1)
        states = [client.batches.retrieve(batch.id) for batch in batches]
        assert sorted(state.status for state in states) == ["completed", "in_progress"]
        assert sum(state.request_counts.completed for state in states if state.request_counts is not None) == 1


def test_wrong_lines_fail_the_batch_before_any_is_run(client: openai.OpenAI) -> None:
    good = lines(1).getvalue()
    wrong = b'not json\n{"custom_id": "other", "url": "/tokenize", "body": {}}\n'
    done = wait(client, make(client, io.BytesIO(good + b"\n" + good + b"\n" + wrong)), "failed")
    assert done.errors is not None
    assert done.errors.data is not None
    found = [(error.code, error.line) for error in done.errors.data]
    assert found == [("duplicate_custom_id", 2), ("invalid_line", 3), ("invalid_line", 4)]
    assert "no route '/tokenize' in this batch; there are: /v1/chat" in (done.errors.data[2].message or "")
    assert done.output_file_id is None
    assert done.error_file_id is None


async def test_the_asynchronous_client(running: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
        file = await client.files.create(file=("a.jsonl", lines(1)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert (await client.batches.retrieve(batch.id)).id == batch.id


def test_cancelling(client: openai.OpenAI) -> None:
    batch = make(client, lines(150, max_tokens=200, ignore_eos=True))
    until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 30)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait(client, batch, "cancelled")
    assert done.request_counts is not None
    assert done.request_counts.completed < 150


def test_a_key_sees_only_its_own(client: openai.OpenAI, running: Running) -> None:
    file = send(client, lines(1))
    batch = make(client, lines(1))
    with client_of(running, OTHER) as other:
        assert file.id not in [each.id for each in other.files.list().data]
        assert batch.id not in [each.id for each in other.batches.list().data]
        for steal in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                steal()


def test_what_is_wrong_gets_one_clear_error(client: openai.OpenAI, running: Running) -> None:
    url, headers = f"{running.url}/v1", {"x-api-key": KEY}
    assert make_status(client, wait_for="failed", data=io.BytesIO(b"\n\n")) == "failed"
    form: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    for purpose in ("user_data", "fine-tune"):
        with pytest.raises(openai.BadRequestError, match=f"purpose must be batch, got '{purpose}'"):
            client.files.create(file=("in.jsonl", lines(1)), purpose=purpose)  # type: ignore[arg-type]
    for seconds in ("\u00b2", "9" * 5000, "0", "1.5"):
        data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
        late = httpx.post(f"{url}/files", headers=headers, data=data, files={"file": ("a", b"x")})
        assert (late.status_code, late.json()["error"]["param"]) == (400, "expires_after")
    broken = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    for content in (b"nothing of a form", broken[:30], broken.replace(b'name="file"; ', b"")):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        assert httpx.post(f"{url}/files", headers={**headers, **kind}, content=content).status_code == 400
    for response, status, words in (
        (httpx.post(f"{url}/files", headers=headers, data={"purpose": "batch"}, files={"b": b""}), 400, "file is"),
        (httpx.post(f"{url}/files", headers=headers, files={"file": ("a", b"x")}), 400, "purpose must be"),
        (httpx.post(f"{url}/files", headers=headers, json={"file": "x"}), 400, "multipart"),
        (httpx.post(f"{url}/files", headers=headers, files={"file": ("a", b"x" * 60_000)}), 413, "max-upload-bytes"),
        (httpx.post(f"{url}/files", **form), 401, "key"),
        (httpx.post(f"{url}/files", headers={**headers, "origin": "http://evil"}, **form), 403, "origin"),
        (httpx.post(f"{url}/chat/completions", headers=headers, **form), 415, "JSON"),
        (httpx.get(f"{url}/files/..%2f..%2fetc%2fpasswd", headers=headers), 404, "no"),
        (httpx.get(f"{url}/files/file-{'0' * 32}/content", headers=headers), 404, "no file"),
        (httpx.post(f"{url}/batches", headers=headers, json={"endpoint": CHAT}), 400, "input_file_id"),
        (httpx.get(f"{url}/files?limit=0", headers=headers), 400, "limit"),
    ):
        assert response.status_code == status, response.text
        assert words in response.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="no route '/v1/batches'"):
        client.batches.create(input_file_id="x", endpoint="/v1/batches", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError, match="there is room for"):
        fill(client)


def fill(client: openai.OpenAI) -> None:
    for _ in range(10):
        send(client, io.BytesIO(b"x" * 49_000))


def make_status(client: openai.OpenAI, wait_for: str, data: io.BytesIO) -> str:
    batch = wait(client, make(client, data), wait_for)
    assert batch.errors is not None
    return batch.status


@pytest.mark.slow
def test_a_batch_outlives_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, 0.01) as running, client_of(running) as client:
        batch = make(client, lines(100, max_tokens=8, ignore_eos=True))
        output = tmp_path / "batches" / f"{batch.id}.output.jsonl"
        until(lambda: output.exists() and output.read_bytes().count(b"\n") > 3, 60)
        for pid in (*running.children().values(), running.process.pid):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
    before = output.read_bytes()
    with serving(tmp_path, 0.0) as running, client_of(running) as client:
        done = wait(client, batch)
        assert client.files.content(done.output_file_id or "").content.startswith(before[: before.rindex(b"\n") + 1])
        assert set(rows_of(client, done.output_file_id)) == {f"n{n}" for n in range(100)}
