"""The OpenAPI document of all default routes can be read by others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.core.server.app import build_app, make_endpoints
from frame.testing.fake_serving import FakeServing


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    config, serving = FrameConfig(), cast(Any, FakeServing())
    app, _ = build_app(config, serving, make_endpoints(config, Registry.load(), serving))

    async def ask() -> Any:
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = (await client.get("/openapi.json")).json()
            assert (await client.get("/openapi.json")).json() == first
            return first

    found: dict[str, Any] = asyncio.run(ask())
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert len(found) > 10
    for reference in found:
        place: Any = document
        assert reference.startswith("#/")
        for part in reference[2:].split("/"):
            place = place[part]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in document["components"]["schemas"])
    assert "$defs" not in str(document)


def test_operations_have_names_of_their_own_and_answers(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["responses"] for operation in operations)
    assert document["openapi"].startswith("3.")
    assert document["info"]["version"]


def test_routes_that_read_json_say_what(document: dict[str, Any]) -> None:
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/batches",
        "/tokenize",
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"]["properties"]
