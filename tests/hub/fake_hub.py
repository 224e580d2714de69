"""A hub on loopback: one model with two revisions, and the faults that tests ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME = "org/tiny"
MAIN, OLD = "a" * 40, "b" * 40
TOKEN = "hf_test"


@dataclass
class FakeHub:
    """`files` are those of every revision. `private` wants `TOKEN`; `gated` refuses everybody's.

    `broken` maps a file to the bytes after which a transfer of it ends, once; `wrong` names files that are sent with
    one byte changed; `stalled` is as `broken`, but the rest never comes. `asked` collects (method, path, range).
    """

    files: dict[str, bytes]
    url: str = ""
    private: bool = False
    gated: bool = False
    broken: dict[str, int] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    stalled: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def sent(self) -> list[str]:
        """The files of which bytes were sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path, self.headers.get("range")))
        shown = self.headers.get("authorization")
        if self.hub.private and shown is None:  # as for a model that is not there
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if self.hub.private and shown != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if path.startswith(f"/api/models/{NAME}"):
            return self._describe(path.removeprefix(f"/api/models/{NAME}").strip("/").split("/"))
        if path.startswith(f"/{NAME}/resolve/"):
            _, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            return self._file(revision, name)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, parts: list[str]) -> None:
        if self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        revision = parts[1] if len(parts) > 1 else "main"
        commit = {"main": MAIN, MAIN: MAIN, "old": OLD, OLD: OLD}.get(revision)
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if parts[0] == "tree":
            entries = []
            for name, content in self.hub.files.items():
                entry: dict[str, object] = {
                    "type": "file", "path": name, "size": len(content), "oid": git_hash(content),
                }  # fmt: skip
                if is_large(name):
                    sha256 = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 100}
                entries.append(entry)
            return self._send(200, json.dumps(entries).encode())
        siblings = [{"rfilename": name} for name in self.hub.files]
        return self._send(200, json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode())

    def _file(self, revision: str, name: str) -> None:
        if self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        content = self.hub.files[name]
        etag = hashlib.sha256(content).hexdigest() if is_large(name) else git_hash(content)
        if name in self.hub.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if is_large(name):
            headers["X-Linked-Etag"], headers["X-Linked-Size"] = f'"{etag}"', str(len(content))
        asked = self.headers.get("range")
        if self.command == "GET" and name in self.hub.stalled:
            self._send(200, content, headers, self.hub.stalled[name])
            self.rfile.read(1)  # ends when the client does
            return None
        if asked is None:
            return self._send(200, content, headers, self.hub.broken.pop(name, None) if self.command == "GET" else None)
        start = int(asked.removeprefix("bytes=").rstrip("-").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206, content[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, until: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:until])
        if until is not None:
            self.close_connection = True


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Serves until the end of the block."""
    hub = FakeHub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
