"""Runs schemathesis against a server through its OpenAPI document: wrong and right data, and operations in a row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.server.running import Running

_LISTED = ("/v1/responses", "/v1/files", "/v1/batches")
#: What follows a POST: the operation that takes its id, and where in the body.
_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/files": (
        "/v1/batches",
        {"input_file_id": "$response.body#/id", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    "/v1/responses": ("/v1/responses", {"previous_response_id": "$response.body#/id", "input": "and then?"}),
}


class Outcome(NamedTuple):
    """How a run ended."""

    status: int
    cases: int
    text: str


def refine(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with what makes random data reach the engine: a served model, and where ids come from."""
    _name_model(document, model)
    paths = document["paths"]
    for path in _LISTED:
        post = paths.get(path, {}).get("post")
        if post is None:
            continue
        links = post["responses"]["200"].setdefault("links", {})
        for other, methods in paths.items():
            if other.startswith(f"{path}/{{name}}"):
                for operation in methods.values():
                    name = operation["operationId"]
                    links[name] = {"operationId": name, "parameters": {"name": "$response.body#/id"}}
        if path in _BODIES:
            target, body = _BODIES[path]
            name = paths[target]["post"]["operationId"]
            links[f"then_{name}"] = {"operationId": name, "requestBody": body}
    return document


def _name_model(value: Any, model: str) -> None:
    if isinstance(value, list):
        for item in value:
            _name_model(item, model)
    if isinstance(value, dict):
        properties = value.get("properties")
        if isinstance(properties, dict) and "model" in properties:
            properties["model"] = {"type": "string", "enum": [model]}
        for item in value.values():
            _name_model(item, model)


def run(server: Running, folder: Path, *options: str, model: str = "demo", seconds: float = 120) -> Outcome:
    """One run; its status is 0 when no answer was 5xx, malformed or late."""
    document = folder / "openapi.json"
    described = httpx.get(server.url + "/openapi.json", timeout=10).json()
    document.write_text(json.dumps(refine(described, model)))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", server.url,
        "--checks", "not_a_server_error", "--request-timeout", "30", "--continue-on-failure", "--no-shrink",
        "--warnings", "off", "--suppress-health-check", "all", *options,
    ]  # fmt: skip
    said = folder / "schemathesis.txt"  # can be read while it goes on
    with said.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, cwd=folder, stdout=file, stderr=file, timeout=seconds, check=False).returncode
    text = said.read_text(encoding="utf-8")
    found = re.search(r"(\d+) generated", text)
    return Outcome(status, int(found.group(1)) if found else 0, text)


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found.group(1)) * 1024 if found else 0
