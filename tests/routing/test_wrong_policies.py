"""Route policies of packages that are wrong: every request is answered, and one line says which policy gave what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.interfaces import KVChange, KVCleared, Route, RoutePolicy, Setup
from tests.routing.fakes import CHAT, front, reply, servers

NAMED = ("--policy", "round-robin")


class Told(RoutePolicy):
    """Does what a test says."""

    routed: Any = None
    prepares = False
    counted: Any = None

    def choose(self, request: Any, servers: Any) -> Any:
        return servers[0]

    def route(self, request: Any, servers: Any, prefills: Any) -> Any:
        return self.routed(servers, prefills)

    async def prepare(self, request: Any, servers: Any, ask: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    def figures(self) -> Any:
        return self.counted


def raising(error: BaseException) -> Any:
    def route(servers: Any, prefills: Any) -> Any:
        raise error

    return route


def right(servers: Any, prefills: Any) -> Route:
    return Route(servers[0])


@pytest.mark.parametrize(
    ("routed", "problem"),
    [
        (raising(RuntimeError("first\nsecond")), "RuntimeError: first second"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (lambda servers, prefills: None, "it gave None, which is no Route"),
        (lambda servers, prefills: (servers[0], None), "which is no Route"),
        (lambda servers, prefills: Route(None), "it names None; there are: URLS"),  # type: ignore[arg-type]
        (lambda servers, prefills: Route(servers[0].url), "it names 'FIRST'; there are: URLS"),
        (lambda servers, prefills: Route(servers[0], servers[1]), "it names SECOND for the prompt; there are: none"),
        (lambda servers, prefills: Route([1]), "it names [1]; there are: URLS"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_choice_is_named_with_the_servers_that_there_are(
    routed: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Told(Setup())
    policy.routed = routed
    async with servers(reply(200), reply(200)) as made, front(*(one.url for one in made), *NAMED, policy=policy) as f:
        assert (await f.client.post(CHAT, json={})).status_code == 200
        first, second = (one.url for one in made)
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    problem = problem.replace("URLS", f"{first}, {second}").replace("FIRST", first).replace("SECOND", second)
    assert len(said) == 1
    assert said[0].startswith("route policy 'round-robin' has not chosen a server, so the one with the least load ")
    assert said[0].endswith(problem)


async def test_what_a_policy_awaits_in_vain_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    policy = Told(Setup())
    policy.routed, policy.prepares = right, True
    async with servers(reply(200)) as (made,), front(made.url, *NAMED, policy=policy) as f:
        assert (await f.client.post(CHAT, json={})).status_code == 200
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said == ["route policy 'round-robin' has not prepared a request: CancelledError"]


@pytest.mark.parametrize(
    ("counted", "shown", "problem"),
    [
        (None, {}, "route policy 'round-robin' gives figures that are no names → numbers: None"),
        (
            {"right": 2, "many": "x"},
            {"right": 2},
            "route policy 'round-robin' counts 'many' as 'x', which is no number",
        ),
        ({"right": 2, 5: 3}, {"right": 2}, "route policy 'round-robin' counts 5, which is no name of a figure"),
        ({"a b": 3}, {}, "route policy 'round-robin' counts 'a b', which is no name of a figure"),
    ],
)
async def test_figures_that_cannot_be_shown_are_left_out(
    counted: Any, shown: dict[str, float], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Told(Setup())
    policy.routed, policy.counted = right, counted
    async with servers(reply(200)) as (made,), front(made.url, *NAMED, policy=policy) as f:
        for _ in range(2):
            assert (await f.client.get("/fleet")).json()["figures"] == shown
            metrics = await f.client.get("/metrics")
            assert metrics.status_code == 200
            assert ('figure="right"' in metrics.text) == bool(shown)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [problem]


class Deaf(Told):
    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        raise RuntimeError("told to fail")


async def test_a_policy_that_fails_at_a_change_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    named = ("--kv-events", "tcp://127.0.0.1:1", *NAMED)
    async with servers(reply(200)) as (made,), front(made.url, *named, policy=Deaf(Setup())) as f:
        assert f.followers is not None
        for _ in range(2):
            f.followers._changed(made.url, 0, KVCleared())
        f.followers.close()
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in said] == [
        "route policy 'round-robin' failed in kv_changed: RuntimeError: told to fail"
    ]
