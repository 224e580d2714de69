"""The files of the page: what they are served with, and that they need and reveal nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from frame.plugins.endpoints import page
from frame.testing import make_setup
from tests.server.running import FAKE, Running, server

FOLDER = Path(page.__file__).with_name("static")
PATHS = ["/", *(f"/page/{file.name}" for file in sorted(FOLDER.iterdir()) if file.name != "index.html")]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(FAKE, "--api-key", "secret") as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_files_need_no_key_and_may_load_nothing_from_elsewhere(running: Running, path: str) -> None:
    answer = httpx.get(running.url + path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(running.url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_the_page_asks_for_needs_the_key(running: Running) -> None:
    for path in ("/stats", "/load", "/v1/models", "/metrics", "/page/nothing.js", "/page/", "/index.html", "//"):
        assert httpx.get(running.url + path).status_code == 401, path
    for method in ("POST", "PUT", "DELETE"):
        assert httpx.request(method, f"{running.url}/").status_code == 401
    stats = httpx.get(f"{running.url}/stats", headers={"Authorization": "Bearer secret"}).json()
    assert stats["models"] == ["demo"]
    assert stats["engine"]["num_blocks"] == 100
    assert set(stats) == {"time", "problem", "version", "models", "load", "engine", "tiers"}
    assert stats["tiers"] == []
    assert httpx.get(f"{running.url}/load", headers={"x-api-key": "secret"}).json() == {"server_load": 0}


def test_the_page_holds_no_inline_code_and_no_foreign_address() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script(?![^>]*\ssrc=)|<style", html)
    for file in FOLDER.iterdir():
        addresses = set(
            re.findall(r"(?:https?:)?//[a-z][^\s\"'`)]*", re.sub(r"^\s*//.*", "", file.read_text(), flags=re.M))
        )
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", file.read_text())


def test_every_part_of_the_page_has_a_name() -> None:
    html = (FOLDER / "index.html").read_text()
    fields = re.findall(r"<(?:input|select|textarea)[^>]*\sid=\"([\w-]+)\"", html)
    labelled = set(re.findall(r"<label[^>]*\sfor=\"([\w-]+)\"", html))
    assert set(fields) - labelled == {"logprobs"}  # its label is around it
    ids = re.findall(r"\sid=\"([\w-]+)\"", html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"aria-(?:controls|labelledby|describedby)=\"([\w-]+)\"", html)) <= set(ids)


def test_a_server_without_the_page() -> None:
    from frame.core.config.flat import from_flat

    endpoint = page.PageEndpoint(make_setup("endpoint", config=from_flat({"page": False}), serving=None))
    assert endpoint.public_paths == ()
    assert endpoint.router().routes == []
