"""The contract of route policies: an answer at once, among what is given, that changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
            route = policy.route(request, servers, prefills)
            assert isinstance(route, Route), f"route must give a Route, gave {route!r}"
            assert any(route.server is one for one in servers), f"{route.server!r} is none of the servers"
            if route.prefill is not None:
                assert any(route.prefill is one for one in prefills), f"{route.prefill!r} is none of the prefills"

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


_ROLES: tuple[tuple[ServerRole, int], ...] = (("serve", 1), ("prefill", 0))
