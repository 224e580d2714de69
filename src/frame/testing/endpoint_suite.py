"""The contract of endpoints: routes need the key, errors have one shape, no input causes a server error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import pytest

from frame.core.interfaces.endpoint import Endpoint
from frame.core.interfaces.errors import RequestError
from frame.core.server.app import build_app
from frame.core.server.ingress import OPEN_PATHS

from .fake_serving import FakeServing
from .plugin_suite import PluginSuite

_KEY = "a-key-of-the-test"
#: What a route answers that exists in a peer's API and is not built here: nobody's fault.
NOT_BUILT = 501
_BODIES: Mapping[str, bytes] = {
    "no JSON": b"{",
    "not UTF-8": b'{"a": "\xff"}',
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "nothing": b"",
    "no field": b"{}",
    "wrong types": json.dumps({name: {"a": [1]} for name in ("model", "prompt", "messages", "tokens", "n")}).encode(),
    "not finite": b'{"model": "test-model", "prompt": "a", "messages": [], "temperature": NaN}',
    "deep": b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}",
    "another model": b'{"model": "no-such-model", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
}


class EndpointSuite(PluginSuite):
    """The contract of `frame.interfaces.Endpoint`.

        class TestMine(EndpointSuite):
            plugin = "mine"                              # or target = "package.module:Class"
            bodies = {"/v1/mine": {"prompt": "hello"}}   # optional: bodies that must be answered

    Mounts the routes as frame's server does, over a `FakeServing`, and asks them without and with a key, with wrong
    bodies, and while nothing can be served. The application is built once for the class, like that of a server.
    """

    kind = "endpoint"
    #: path → a body that is answered with a status below 400
    bodies: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: paths that answer while no engine does
    early: ClassVar[tuple[str, ...]] = ("/live", "/load", "/metrics", "/startup", "/stats", "/version")

    _app: ClassVar[Any]

    def serving(self) -> FakeServing:
        """The setup that the endpoint is built with."""
        return FakeServing()

    def endpoint(self, serving: FakeServing) -> Endpoint:
        """A new endpoint."""
        made = self.make(serving=serving)
        assert isinstance(made, Endpoint), f"{type(made).__name__} does not derive from Endpoint"
        return made

    def routes(self) -> Iterator[tuple[str, str]]:
        """(method, path) of every route, parameters of paths filled in."""
        for route in cast(Any, self.endpoint(self.serving()).router()).routes:
            for method in sorted(route.methods):
                yield method, re.sub(r"{[^}]*}", "something", route.path)

    def ask(self, method: str, path: str, body: bytes | None = None, *, app: Any = None, key: str = _KEY) -> Any:
        """The response to one request of the class's application, or of another one."""
        import httpx

        app = self.app() if app is None else app
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=cast(Any, app), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, content=body, headers=headers)

        return asyncio.run(send())

    def app(self) -> Any:
        """The application of this class."""
        if "_app" not in vars(type(self)):
            type(self)._app = self.built(self.serving())
        return type(self)._app

    def built(self, serving: FakeServing) -> Any:
        """A new application."""
        app, _ = build_app(self.config(api_key=[_KEY]), cast(Any, serving), [self.endpoint(serving)])
        return app

    def check_error(self, response: Any, what: str) -> None:
        """Status 4xx or 5xx comes with an error body in the endpoint's shape."""
        errors = self.endpoint(self.serving()).errors
        try:
            body = response.json()
            error = body["error"]
            message, kind = error["message"], error["type"]
        except (ValueError, KeyError, TypeError):
            pytest.fail(f"{what} gave {response.status_code} without an error body: {response.text[:200]!r}")
        assert message, f"{what} gave an error without a message"
        assert kind, f"{what} gave an error without a type"
        expected = errors.body(RequestError(response.status_code, message))
        assert set(body) == set(expected), f"{what} gave an error of another shape: {response.text[:200]!r}"
        assert "Traceback" not in response.text, f"{what} shows a traceback to the client"

    def test_router_gives_routes(self) -> None:
        from fastapi import APIRouter

        router = self.endpoint(self.serving()).router()
        assert isinstance(router, APIRouter), f"router() must give an APIRouter, gave {type(router).__name__}"
        routes = list(self.routes())
        assert routes, "router() gives no route"
        assert len(set(routes)) == len(routes), f"a route is there twice: {routes}"
        for _, path in routes:
            assert path.startswith("/"), f"path {path!r} must start with /"

    def test_every_route_needs_the_key(self) -> None:
        """Except for health routes, and files that the endpoint declares public."""
        public = {("GET", path) for path in self.endpoint(self.serving()).public_paths}
        assert public <= set(self.routes()), (
            f"public_paths name what is no route: {sorted(public - set(self.routes()))}"
        )
        for method, path in set(self.routes()) - public:
            for key in ("", "wrong"):
                response = self.ask(method, path, b"{}" if method != "GET" else None, key=key)
                if path not in OPEN_PATHS:
                    assert response.status_code == 401, f"{method} {path} gave {response.status_code} without the key"
                    self.check_error(response, f"{method} {path} without the key")

    def test_reading_routes_answer(self) -> None:
        for method, path in self.routes():
            if method == "GET":
                response = self.ask(method, path)
                assert response.status_code < 500, f"GET {path} gave {response.status_code}: {response.text[:200]}"
                if response.status_code >= 400:
                    self.check_error(response, f"GET {path}")

    @pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES.keys())
    def test_wrong_bodies_are_the_clients_fault(self, body: bytes) -> None:
        for method, path in self.routes():
            if method in ("POST", "PUT", "PATCH"):
                response = self.ask(method, path, body)
                what = f"{method} {path} with {body[:60]!r}"
                refused = response.status_code < 500 or response.status_code == NOT_BUILT
                assert refused, f"{what} gave {response.status_code}: {response.text[:200]}"
                if response.status_code >= 400:
                    self.check_error(response, what)

    def test_bodies_that_are_too_large_are_refused(self) -> None:
        large = json.dumps({"prompt": "a" * (9 << 20)}).encode()
        for method, path in self.routes():
            if method == "POST":
                response = self.ask(method, path, large)
                assert response.status_code == 413, f"POST {path} gave {response.status_code} for 9 MiB"
                self.check_error(response, f"POST {path} with 9 MiB")

    def test_another_method_is_refused(self) -> None:
        routes = list(self.routes())
        for _, path in routes:
            response = self.ask("DELETE", path)
            if ("DELETE", path) not in routes:
                assert response.status_code in (404, 405), f"DELETE {path} gave {response.status_code}"
                self.check_error(response, f"DELETE {path}")

    def test_routes_say_when_nothing_can_be_served(self) -> None:
        ill = self.built(FakeServing(problem="no engine"))
        for method, path in self.routes():
            response = self.ask(method, path, b"{}" if method != "GET" else None, app=ill)
            if path not in (*self.early, *self.endpoint(self.serving()).public_paths):
                assert response.status_code == 503, f"{method} {path} gave {response.status_code} without an engine"
                self.check_error(response, f"{method} {path} without an engine")

    def test_right_bodies_are_answered(self) -> None:
        bodies = dict(self.bodies)
        tag = self.provider().tags.get("bodies")
        bodies.update(json.loads(tag) if tag else {})
        if not bodies:
            pytest.skip('set `bodies`, or give the provider tags={"bodies": JSON of path → body}')
        for path, body in bodies.items():
            response = self.ask("POST", path, json.dumps(body).encode())
            assert response.status_code < 400, f"POST {path} gave {response.status_code}: {response.text[:300]}"
