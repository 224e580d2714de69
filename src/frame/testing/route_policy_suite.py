"""The contract of route policies: an answer at once, among what is given, that changes nothing, whatever it is told."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from frame.kv_events.changes import KVChange, KVCleared, KVRemoved, KVStored
from frame.routing.policy import Route, RoutePolicy, RouteRequest, RouteServer, ServerRole

from .plugin_suite import PluginSuite

_CHAT = "/v1/chat/completions"
#: Bodies that a front gets: none, chats of several lengths, and what is no JSON, or none of that form.
_BODIES = (
    b"",
    b'{"messages": [{"role": "user", "content": "Hello"}]}',
    b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"word " * 20_000),
    b'{"prompt": [1, 2, 3]}',
    b"[1]",
    b"null",
    b'{"messages": ',
    b"\xff\x00",
    b"[" * 10_000,
)


@dataclass(eq=False)
class FakeRouteServer:
    """What a policy may look at."""

    url: str
    role: ServerRole = "serve"
    in_flight: int = 0
    num_other: int = 0
    kv_usage: float | None = None


class RoutePolicySuite(PluginSuite):
    """The contract of `frame.interfaces.RoutePolicy`.

        class TestMine(RoutePolicySuite):
            plugin = "mine"            # or target = "package.module:Class"

    How good a choice must be is not part of the contract.
    """

    kind = "route-policy"

    def policy(self) -> RoutePolicy:
        """A new policy."""
        made = self.make()
        assert isinstance(made, RoutePolicy), f"{type(made).__name__} does not derive from RoutePolicy"
        return made

    def cases(self) -> Iterator[tuple[RouteRequest, list[FakeRouteServer], list[FakeRouteServer]]]:
        """Requests of every form with servers that come, go and change, and with or without ones for prompts."""
        draw = random.Random(0)
        for place in range(400):
            path = draw.choice((_CHAT, _CHAT, "/v1/models", "/v1/messages"))
            request = RouteRequest(path, _BODIES[place % len(_BODIES)])
            servers, prefills = (
                [
                    FakeRouteServer(
                        f"http://{role}-{number}",
                        role,
                        draw.randrange(9),
                        draw.randrange(3),
                        draw.choice((None, draw.random())),
                    )
                    for number in draw.sample(range(9), draw.randint(least, 4))
                ]
                for role, least in _ROLES
            )
            yield request, servers, prefills

    def test_it_names_a_server_that_it_is_given(self) -> None:
        policy = self.policy()
        for request, servers, prefills in self.cases():
            for given in (servers, prefills):
                if given:
                    found = policy.choose(request, given)
                    assert any(found is one for one in given), f"choose gave {found!r}, which is none of its servers"

    def test_prompts_are_computed_where_they_can_be(self) -> None:
        policy = self.policy()
        for request, servers, prefills in self.cases():
            route = self._routed(policy, request, servers, prefills)
            if route.prefill is not None:
                assert any(route.prefill is one for one in prefills), f"{route.prefill!r} is none of the prefills"

    def _routed(
        self,
        policy: RoutePolicy,
        request: RouteRequest,
        servers: Sequence[RouteServer],
        prefills: Sequence[RouteServer],
    ) -> Route:
        route = policy.route(request, servers, prefills)
        assert isinstance(route, Route), f"route must give a Route, gave {route!r}"
        assert any(route.server is one for one in servers), f"{route.server!r} is none of the servers"
        return route

    def test_any_request_is_routed(self) -> None:
        """Bodies come from clients, and may be anything."""
        policy = self.policy()
        servers: list[RouteServer] = [FakeRouteServer("http://one"), FakeRouteServer("http://two")]
        prefills: list[RouteServer] = [FakeRouteServer("http://three", "prefill")]
        for body in _BODIES:
            for path in (_CHAT, "/", "/v1/completions", "/%00"):
                try:
                    policy.route(RouteRequest(path, body), servers, prefills)
                except Exception as error:
                    raise AssertionError(f"{type(error).__name__} for the body {body[:40]!r}: {error}") from error

    def test_looking_changes_nothing(self) -> None:
        policy = self.policy()
        for request, servers, prefills in self.cases():
            path, body, given = request.path, request.body, [*servers, *prefills]
            before = [vars(replace(one)) for one in given]
            policy.route(request, servers, prefills)
            assert (request.path, request.body) == (path, body), "route changed the request"
            assert [*servers, *prefills] == given, "route changed the list of servers"
            assert [vars(one) for one in given] == before, "route changed a server"

    def test_any_request_is_prepared(self) -> None:
        """Servers may say nothing, or what is no answer."""
        policy = self.policy()
        servers: list[RouteServer] = [FakeRouteServer(f"http://server-{place}") for place in range(3)]
        for change in _changes():
            policy.kv_changed("http://server-1", 0, change)
        for answer in (None, b"", b"null", b"[1]", b'{"tokens": [1, 2, 3]}', b'{"tokens": "x"}', b"\xff"):
            for body in _BODIES:
                request = RouteRequest(_CHAT, body)
                problem = asyncio.run(self._prepared(policy, request, servers, answer))
                assert problem is None, f"prepare raised {problem} for the body {body[:40]!r} and the answer {answer!r}"
                assert (request.path, request.body) == (_CHAT, body), "prepare changed the request"
                policy.route(request, servers, [])

    async def _prepared(
        self, policy: RoutePolicy, request: RouteRequest, servers: list[RouteServer], answer: bytes | None
    ) -> str | None:
        """What `prepare` raises, where a server it asks answers so."""

        async def ask(server: RouteServer, path: str, body: bytes) -> bytes | None:
            assert any(server is one for one in servers), f"prepare asks {server!r}, which is none of its servers"
            assert path.startswith("/"), f"prepare asks for {path!r}"
            return answer

        try:
            await policy.prepare(request, servers, ask)
        except AssertionError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def test_any_change_of_a_cache_is_taken_while_requests_are_routed(self) -> None:
        """From a thread of its own, of servers that it has and has not been given, in orders that make no sense."""
        policy, problems = self.policy(), list[str]()

        def tell() -> None:
            try:
                for place, change in enumerate(_changes() * 20):
                    policy.kv_changed(f"http://serve-{place % 12}", place % 3, change)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=tell)
        thread.start()
        for request, servers, prefills in self.cases():
            request.tokens = range(64)
            self._routed(policy, request, servers, prefills)
        thread.join()
        assert not problems, f"kv_changed raised {problems[0]}"

    def test_figures_are_numbers_with_plain_names(self) -> None:
        policy = self.policy()
        for request, servers, prefills in self.cases():
            policy.route(request, servers, prefills)
        figures = policy.figures()
        assert isinstance(figures, Mapping), f"figures must give names → numbers, gave {figures!r}"
        for name, value in figures.items():
            assert isinstance(name, str), f"{name!r} is no name of a figure"
            assert re.fullmatch("[a-z][a-z0-9_]*", name), f"{name!r} is no name of a figure"
            assert isinstance(value, int | float), f"the figure {name} is {value!r}"


def _changes() -> list[KVChange]:
    tokens = array("I", range(64))
    return [
        KVRemoved([1, 2], "GPU"),
        KVStored([1, 2, 3, 4], None, tokens, 16, medium="GPU"),
        KVStored([b"x", b"y"], b"unknown", tokens[:32], 16, "adapter", [("salt",), ()], "CPU"),
        KVStored([1, 9], None, array("I"), 0, medium="DISK"),
        KVStored([], None, array("I"), 4),
        KVStored([5], None, tokens, 64),
        KVRemoved([3, b"y"], "GPU"),
        KVCleared(),
        KVCleared(),
        KVStored([1], None, tokens[:16], 16),
    ]


_ROLES: tuple[tuple[ServerRole, int], ...] = (("serve", 1), ("prefill", 0))
