"""Errors of every layer have the shape of the endpoint that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, cast

import httpx
import pytest
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from frame.core.config.tree import FrameConfig
from frame.core.server.app import build_app
from frame.core.server.errors import field_error
from frame.interfaces import Endpoint, ErrorShape, RequestError
from frame.testing import make_setup
from frame.testing.fake_serving import FakeServing


class Short(ErrorShape):
    def body(self, error: RequestError) -> dict[str, Any]:
        return {"wrong": error.message}

    def event(self, error: RequestError) -> bytes:
        return b"event: wrong\ndata: %d\n\n" % error.status


class Odd(Endpoint):
    errors = Short()

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/odd/{name}", self._fail, methods=["POST"], response_model=None)
        router.add_api_route("/owner", self._owner, methods=["GET"])
        router.add_api_route("/v1/more/turns", self._owner, methods=["GET"])
        return router

    async def _fail(self, name: str) -> Any:
        if name == "stream":
            return self.serving.http.events(self._frames())
        raise RequestError(418, "no\ntea", param="cup") if name == "known" else ValueError("secret")

    async def _frames(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise RequestError(503, "gone")

    async def _owner(self, request: Request) -> str:
        owner: str = self.serving.http.owner(request)
        return owner


def ask(method: str, path: str, key: str = "k1", **options: Any) -> httpx.Response:
    config = FrameConfig.from_flat(api_key=["k1", "k2"])
    app, _ = build_app(
        config, cast(Any, FakeServing()), [Odd(make_setup("endpoint", config=config, serving=FakeServing()))]
    )

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers={"x-api-key": key}, **options)

    return asyncio.run(send())


def test_routes_handlers_and_ingress_use_the_shape_of_the_route() -> None:
    assert ask("POST", "/odd/known", json={}).json() == {"wrong": "no tea"}
    assert ask("POST", "/odd/unknown", json={}).json() == {"wrong": "internal error"}
    assert ask("POST", "/odd/known", content=b"{").json()["wrong"].startswith("the body must be JSON")
    refused = ask("POST", "/odd/known", key="k3", json={})
    assert refused.status_code == 401
    assert set(refused.json()) == {"wrong"}
    assert ask("DELETE", "/odd/known").json()["wrong"].startswith("method DELETE")


def test_streams_end_with_the_event_of_the_route() -> None:
    assert ask("POST", "/odd/stream", json={}).text == "data: 1\n\nevent: wrong\ndata: 503\n\n"


def test_other_paths_have_the_usual_shape() -> None:
    assert set(ask("GET", "/nothing").json()["error"]) == {"message", "type", "param", "code"}
    assert set(ask("GET", "/ownership").json()["error"]) == {"message", "type", "param", "code"}


def test_paths_below_a_route_have_its_shape() -> None:
    found = ask("GET", "/owner/of/what")
    assert (found.status_code, found.json()) == (404, {"wrong": "no route '/owner/of/what'"})


def test_a_path_without_its_version_names_the_route() -> None:
    error = ask("GET", "/more/turns").json()["error"]
    assert error["message"] == "no route '/more/turns'; there is '/v1/more/turns'"


def test_owners_differ_by_key() -> None:
    first, second = ask("GET", "/owner").json(), ask("GET", "/owner", key="k2").json()
    assert first
    assert second
    assert first != second
    assert "k1" not in first


def test_a_field_with_a_long_name_or_value() -> None:
    class Body(BaseModel):
        weights: dict[str, int] = {}

    word = "x" * 400
    shown = f"{'x' * 80}…{'x' * 40}"
    for given, said in (
        ({"weights": {word: "a"}}, f"weights.{shown} (400 characters) must be a valid integer, "),
        ({"weights": {"a": word}}, f"got '{shown}' (400 characters)"),
    ):
        with pytest.raises(ValidationError) as raised:
            Body.model_validate(given)
        error = field_error(raised.value, Body.model_fields)
        assert said in error.message
        assert len(error.message) < 320
    assert f"'/{'x' * 79}…{'x' * 40}' (401 characters)" in ask("GET", f"/{word}").text


def test_a_union_names_what_is_wrong_with_the_branch_that_was_meant() -> None:
    class Body(BaseModel):
        stop: str | Annotated[list[str], Field(max_length=2)] | None = None

    for given, said in (
        (["a"] * 3, "stop must have at most 2 items, got 3"),
        (7, "stop must be a valid string, got 7"),
        (["a", 7], "stop.1 must be a valid string, got 7"),
    ):
        with pytest.raises(ValidationError) as raised:
            Body.model_validate({"stop": given})
        assert field_error(raised.value, Body.model_fields).message == said
