"""What strangers try on a running server: templates without end, names that are paths, broken forms."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import FAKE, Running, server

CHAT = {"messages": [{"role": "user", "content": "once upon"}], "max_tokens": 4}
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
]
_REPR = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|site-packages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "batches"


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    settings = ("--trust-request-chat-template", "--chat-template-seconds", "1", "--chat-template-bytes", str(1 << 26))
    with server(FAKE, *settings, "--plugin.batches.folder", str(folder), "--disable-access-log") as started:
        yield started


def chat(running: Running, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=60)


def test_template_bombs_get_400_while_streams_go_on(running: Running) -> None:
    assert chat(running, chat_template="{{ messages[0].content }}").status_code == 200
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda bomb=bomb: answers.append(chat(running, chat_template=bomb))) for bomb in BOMBS
    ]
    for thread in threads:
        thread.start()
    longest = 0.0
    while any(thread.is_alive() for thread in threads):
        start = time.monotonic()
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            assert stream.status_code == 200
            assert b"[DONE]" in stream.read()
        longest = max(longest, time.monotonic() - start)
    assert [answer.status_code for answer in answers] == [400, 400]
    for answer in answers:
        assert "the chat template takes more than" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "chat_template"
    assert longest < 10
    assert chat(running, chat_template="{{ messages[0].content }}").status_code == 200


NAMES = [
    "../../escaped",
    "/tmp/escaped",
    "..\\..\\escaped",
    "a\x00b",
    "C:\\escaped",
    "\ud800",
    "é" * 4000,
    "",
    ".",
    "..",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_file_names_are_never_paths(running: Running, folder: Path, name: str) -> None:
    before = {path for path in folder.parent.rglob("*") if folder not in path.parents}
    field = name.encode("utf-8", "surrogatepass").replace(b'"', b"%22")
    body = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: '
    body += b'form-data; name="file"; filename="' + field + b'"\r\n\r\n{}\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(f"{running.url}/v1/files", content=body, headers=headers)
    assert answer.status_code in (200, 400)
    assert not _REPR.search(answer.text)
    assert {path for path in folder.parent.rglob("*") if folder not in path.parents} == before
    kept = {path.name for path in (folder / "files").iterdir()}
    assert all(re.fullmatch(r"file-[0-9a-f]{32}\.jsonl?", path) for path in kept)


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "file-%00", "%5c..%5cx", "x" * 5000, "%ff%fe"])
@pytest.mark.parametrize("route", ["/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/responses/{}"])
def test_names_in_addresses_are_never_paths(running: Running, route: str, path: str) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, running.url + route.format(path))
        assert answer.status_code in (404, 405)
        assert "root:" not in answer.text
        assert not _REPR.search(answer.text)


@pytest.mark.parametrize(
    "content",
    [b"", b"--b", b"--b\r\n\r\n", b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--", b"\x00" * 1000,
     b"--b\r\n" + b"a: b\r\n" * 5000 + b"\r\nx\r\n--b--\r\n",
     b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 200_000 + b"\r\n--b--\r\n",
     b'--b\r\ncontent-disposition: form-data; name="f"\r\n\r\nx\r\n' * 99 + b"--b--\r\n",
     b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n' * 9 + b"--b--\r\n"],
    ids=lambda value: str(len(value)),
)  # fmt: skip
@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=b", "multipart/form-data", "multipart/form-data; boundary="]
)
def test_broken_forms_are_refused(running: Running, content: bytes, kind: str) -> None:
    answer = httpx.post(f"{running.url}/v1/files", content=content, headers={"content-type": kind})
    assert 400 <= answer.status_code < 500, answer.text
    assert "boundary character" not in running.text  # a line of the parser's own in the log for each broken form
    assert not _REPR.search(answer.text)


def test_errors_of_every_route_tell_nothing_of_the_inside(running: Running) -> None:
    paths = httpx.get(f"{running.url}/openapi.json").json()["paths"]
    odd = [
        {},
        [],
        {"model": 5},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": []}]},
        {"input": [{}]},
        {"prompt": [[]]},
        {"messages": "x", "max_tokens": 1},
        {"tools": [{}], "messages": [{"role": "user"}]},
    ]
    for path, ways in paths.items():
        if "post" not in ways:
            continue
        for body in odd:
            answer = httpx.post(running.url + path.replace("{name}", "x"), json=body, timeout=30)
            assert answer.status_code < 500, (path, body, answer.text)
            assert answer.status_code == 200 or not _REPR.search(answer.text), (path, body, answer.text)
    assert "Traceback" not in running.text
