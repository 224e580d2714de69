"""The route policy that the documentation shows."""

from __future__ import annotations

from frame.interfaces import Setup
from frame.testing import RoutePolicySuite
from tests.routing.fakes import CHAT, front, reply, servers
from tests.routing.session_policy import SessionPolicy


class TestSessionPolicy(RoutePolicySuite):
    target = "tests.routing.session_policy:SessionPolicy"


async def test_requests_of_one_key_meet_on_one_server() -> None:
    behaviours = (reply(200), reply(200), reply(200))
    policy = SessionPolicy(Setup())
    async with servers(*behaviours) as made, front(*(one.url for one in made), policy=policy) as f:
        for number in range(12):
            await f.client.post(CHAT, json={"prompt_cache_key": f"chat {number % 3}"})
        for server in made:
            keys = [seen.json["prompt_cache_key"] for seen in server.seen]
            assert all(keys.count(key) == 4 for key in keys)
        at = next(server for server in made if server.seen)
        key, counts = at.seen[0].json["prompt_cache_key"], [len(server.seen) for server in made]
        await at.stop()
        assert (await f.client.post(CHAT, json={"prompt_cache_key": key})).status_code == 200
        assert sum(len(server.seen) for server in made) == sum(counts) + 1
