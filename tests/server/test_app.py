"""Settings of the application: pages of other origins, its description, headers, how tokens are shown."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from pydantic import ValidationError
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.front.front import Front
from frame.core.server.app import build_app
from frame.interfaces import ChatOptions
from frame.plugins.endpoints.completions import CompletionsEndpoint
from frame.plugins.endpoints.invocations import InvocationsEndpoint
from frame.plugins.endpoints.models import ModelsEndpoint
from frame.testing import make_setup
from frame.testing.fake_serving import FakeServing

ORIGIN = "https://a.example"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}


def ask(method: str, path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    config, serving = FrameConfig.from_flat(**settings), cast(Any, FakeServing())
    app, _ = build_app(config, serving, [ModelsEndpoint(make_setup("endpoint", config=config, serving=serving))])

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


class Demanding:
    """Middleware that needs more than the application."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit


class Silent:
    """What can be built, but not called."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app


class Idle(BaseHTTPMiddleware):
    """Does not say what it does."""


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """An application, where middleware is wanted."""


def test_middleware_meets_what_the_ingress_has_let_in() -> None:
    named = [f"{__name__}.Marking", f"{__name__}.marking"]
    settings = {"middleware": named, "api_key": ["k"]}
    answer = ask("GET", "/v1/models", {"x-api-key": "k"}, **settings)
    assert answer.headers["x-marks"] == "class, function"  # the last one is outermost
    refused = ask("GET", "/v1/models", {"x-api-key": "wrong"}, **settings)
    assert refused.status_code == 401
    assert "x-marks" not in refused.headers
    for method, path in (("GET", "/health"), ("OPTIONS", "/v1/models")):
        assert ask(method, path, **settings).headers["x-marks"] == "class, function"


@pytest.mark.parametrize(
    "path",
    [
        "json", "no.such.module", "json.nothing", "json.dumps", "", "starlette.middleware.base.BaseHTTPMiddleware",
        *(f"{__name__}.{name}" for name in ("Demanding", "Silent", "Idle", "bare")),
    ],
)  # fmt: skip
def test_middleware_that_is_none_is_refused(path: str) -> None:
    config, serving = FrameConfig.from_flat(middleware=[path]), cast(Any, FakeServing())
    with pytest.raises(ConfigError, match=f"middleware '{re.escape(path)}'"):
        build_app(config, serving, [])


@pytest.mark.parametrize("text", ["def wrong(", "raise RuntimeError('no')"])
def test_middleware_of_a_broken_module_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_middleware.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config, serving = FrameConfig.from_flat(middleware=["broken_middleware.Any"]), cast(Any, FakeServing())
    with pytest.raises(ConfigError, match=r"middleware 'broken_middleware\.Any' cannot be imported"):
        build_app(config, serving, [])


def test_middleware_meets_an_invocation_once_and_lines_of_batches() -> None:
    config, serving = FrameConfig.from_flat(middleware=[f"{__name__}.Marking"]), cast(Any, FakeServing())
    kinds = (CompletionsEndpoint, InvocationsEndpoint)
    app, _ = build_app(
        config, serving, [kind(make_setup("endpoint", config=config, serving=serving)) for kind in kinds]
    )
    marks: list[str] = []

    async def send() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=cast(Any, app)), base_url="http://t") as client:
            answer = await client.post("/invocations", json={"prompt": "x"})
            assert answer.json()["object"] == "text_completion"
            marks.append(answer.headers["x-marks"])
            wrong = await client.post("/invocations", json={"prompt": "x", "temperature": -1})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
            marks.append(wrong.headers["x-marks"])
        assert (await serving.calls.post("/invocations", {"prompt": "x"}, "")).status == 200

    asyncio.run(send())
    assert marks == ["class", "class"]


def test_templates_get_contents_in_the_form_that_is_set() -> None:
    front = cast(Any, SimpleNamespace(config=FrameConfig.from_flat(chat_template_content_format="string")))
    front.chat_template, front.info = None, SimpleNamespace(encodes=False)
    assert Front.with_template(front, ChatOptions()).content_format == "string"
    assert Front.with_template(front, ChatOptions(content_format="openai")).content_format == "openai"
