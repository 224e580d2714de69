"""A small client of the OpenAI routes for the terminal commands: streams answers over `http.client`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from frame.quoting import quoted

_CONNECT_SECONDS = 10.0
#: Variables that hold the key without `--api-key`; the first that is set counts.
_KEYS = ("FRAME_API_KEY", "OPENAI_API_KEY")
#: OpenSSL's error numbers for a certificate that was made for another name or address.
_FOR_ANOTHER = (62, 64)
#: Exit status of a command that ctrl-C has ended.
INTERRUPTED = 130


class TerminalError(Exception):
    """The server cannot be reached, or refuses; the message is one sentence."""


_URL = "http://127.0.0.1:8000"


def add_client_arguments(parser: argparse.ArgumentParser, *, sampling: bool = True, url: str | None = _URL) -> None:
    """Adds the flags of address and key, and with `sampling` those of a request to a model."""
    shown = "" if url is None else f" (default: {url})"
    parser.add_argument("--url", default=url, help=f"Address of the server{shown}.")
    parser.add_argument("--api-key", help=f"Key to present; default: {' or '.join(_KEYS)} of the environment.")
    if not sampling:
        return
    parser.add_argument("--model-name", help="Model to ask; default: the first that the server names.")
    parser.add_argument("--max-tokens", type=int, help="Most tokens of an answer; default: the server's.")
    parser.add_argument("--temperature", type=float, help="Sampling temperature; default: the model's.")


class TerminalClient:
    """One server. `arguments` come from `add_client_arguments`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        try:
            self._url = urlsplit(arguments.url if "//" in arguments.url else f"http://{arguments.url}")
            known = self._url.scheme in ("http", "https") and bool(self._url.hostname) and self._url.port != 0
        except ValueError:  # not a port number, or an unclosed bracket
            known = False
        if not known:
            raise TerminalError(f"--url must be like {_URL}, got {quoted(arguments.url)}")
        self._prefix = self._url.path.rstrip("/").removesuffix("/v1")
        self._key = arguments.api_key or next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
        self._settings = {
            name: value
            for name in ("max_tokens", "temperature")
            if (value := getattr(arguments, name, None)) is not None
        }
        self.model = getattr(arguments, "model_name", None) or self._first_model()

    def _first_model(self) -> str:
        names = self.served_models()
        if not names:
            raise TerminalError(f"the server at {self._url.geturl()} serves no model")
        return names[0]

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Streams the answer to a conversation."""
        for choice in self._stream("/v1/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        """Streams the continuation of a text."""
        for choice in self._stream("/v1/completions", {"prompt": prompt}):
            yield choice["text"]

    def served_models(self) -> list[str]:
        """The names of the models that the server lists."""
        with self._request("GET", "/v1/models", None) as response:
            body = response.read()
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, LookupError, TypeError):
            reason = f"{self._url.geturl()} does not list models as OpenAI's /v1/models does"
            raise TerminalError(f"{reason}; name another server with --url") from None

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {"model": self.model, "stream": True, **self._settings, **fields}
        response = self._request("POST", path, json.dumps(body).encode())
        try:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise TerminalError(event["error"]["message"])
                    yield from event["choices"]
        except (OSError, http.client.HTTPException, ValueError):
            raise TerminalError("the connection to the server broke") from None
        finally:
            response.close()

    def _request(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_CONNECT_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}  # so that the response owns the socket
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer may take its time
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise TerminalError(_unreachable(self._url.geturl(), error)) from None
        if response.status != http.client.OK:
            with response:
                raise TerminalError(_message(response.status, response.read()))
        return response


def typed_lines(invitation: str) -> Iterator[str]:
    """The lines of standard input, until it ends or ctrl-C is pressed.

    `invitation` and a prompt are shown only where a person types: nothing but answers goes into a pipe.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        print(invitation, file=sys.stderr)
    while True:
        if interactive and not sys.stdout.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            # given to `input`, the prompt survives editing of the line
            line = input("> " if interactive and sys.stdout.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print(file=sys.stderr)
            return
        yield line


def show(pieces: Iterable[str]) -> tuple[str, bool]:
    """Prints an answer as it arrives; returns its text, and False when ctrl-C ended it."""
    shown: list[str] = []
    ended = True
    try:
        for piece in pieces:
            shown.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        ended = False
    print()
    return "".join(shown), ended


def _unreachable(url: str, error: Exception) -> str:
    """Why the server cannot be reached, and what to do where that is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        if error.verify_code in _FOR_ANOTHER:
            return f"the certificate of {url} is not for this address: {reason}; give the server's name with --url"
        return (
            f"the certificate of {url} is not trusted: {reason}; set SSL_CERT_FILE to a PEM file that holds it, or "
            "the authority that has signed it"
        )
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return f"what answers at {url} does not speak TLS; try --url {url.replace('https://', 'http://', 1)}"
    if isinstance(error, http.client.RemoteDisconnected) and url.startswith("http://"):
        return f"{url} hangs up without an answer; if it speaks TLS, try --url {url.replace('http://', 'https://', 1)}"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"no server answers at {url}: {reason}; `frame serve` starts one, --url names another"


def _message(status: int, body: bytes) -> str:
    try:
        again = "; try again in a moment" if status == http.client.SERVICE_UNAVAILABLE else ""
        return f"the server answers {status}: {json.loads(body)['error']['message']}{again}"
    except (ValueError, KeyError, TypeError):
        return f"the server answers {status}"
