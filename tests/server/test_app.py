"""Settings of the application: pages of other origins, its description, headers, how tokens are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.front.front import Front
from frame.core.front.template import ChatOptions
from frame.core.server.app import build_app
from frame.core.testing.fake_serving import FakeServing
from frame.plugins.endpoints.models import ModelsEndpoint

ORIGIN = "https://a.example"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}


def ask(method: str, path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    config, serving = FrameConfig.from_flat(**settings), cast(Any, FakeServing())
    app, _ = build_app(config, serving, [ModelsEndpoint(config=config, serving=serving)])

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_pages_of_other_origins_may_do_what_is_set() -> None:
    assert ask("OPTIONS", "/v1/completions", PREFLIGHT, allowed_origins=[ORIGIN]).status_code == 200
    answer = ask("GET", "/v1/models", {"origin": ORIGIN}, allowed_origins=[ORIGIN], allow_credentials=True)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    for settings in ({"allowed_methods": ["GET"]}, {"allowed_headers": ["x-other"]}):
        refused = ask("OPTIONS", "/v1/completions", PREFLIGHT, allowed_origins=[ORIGIN], **settings)
        assert refused.status_code == 400
    assert "access-control-allow-origin" not in ask("GET", "/v1/models", {"origin": ORIGIN}).headers


@pytest.mark.parametrize("origins", [[], ["*"]], ids=["none", "any"])
def test_cookies_need_origins_by_name(origins: list[str]) -> None:
    with pytest.raises(ValidationError, match="allow_credentials needs allowed_origins that name the origins"):
        FrameConfig.model_validate({"server": {"allow_credentials": True, "allowed_origins": origins}})


def test_the_description_of_the_routes_can_be_left_out() -> None:
    assert ask("GET", "/openapi.json").status_code == 200
    assert ask("GET", "/openapi.json", openapi=False).status_code == 404


def test_the_number_of_headers_is_a_setting() -> None:
    headers = {f"x-{number}": "1" for number in range(40)}
    assert ask("GET", "/v1/models", headers).status_code == 200
    answer = ask("GET", "/v1/models", headers, max_headers=32)
    assert answer.status_code == 431
    assert "may have 32 headers (--max-headers)" in answer.json()["error"]["message"]


class Marking:
    """Middleware as a class."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-marks", b"class")]}
            await send(message)

        await self._app(scope, receive, marked)


async def marking(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    answer = await call_next(request)
    answer.headers.append("x-marks", "function")
    return answer


def test_middleware_sees_what_has_a_key_only() -> None:
    named = [f"{__name__}.Marking", f"{__name__}.marking"]
    settings = {"middleware": named, "api_key": ["k"]}
    answer = ask("GET", "/v1/models", {"x-api-key": "k"}, **settings)
    assert answer.headers["x-marks"] == "class, function"  # the last one is outermost
    refused = ask("GET", "/v1/models", {"x-api-key": "wrong"}, **settings)
    assert refused.status_code == 401
    assert "x-marks" not in refused.headers


@pytest.mark.parametrize("path", ["json", "no.such.module", "json.nothing", "json.dumps", ""])
def test_middleware_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"middleware '{path}'"):
        ask("GET", "/v1/models", middleware=[path])


def test_templates_get_contents_in_the_form_that_is_set() -> None:
    front = cast(Any, SimpleNamespace(config=FrameConfig.from_flat(chat_template_content_format="string")))
    front.chat_template = None
    assert Front.with_template(front, ChatOptions()).content_format == "string"
    assert Front.with_template(front, ChatOptions(content_format="openai")).content_format == "openai"
