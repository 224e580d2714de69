"""The route policy of the documentation that is told what servers have cached."""

from __future__ import annotations

from array import array

from frame.interfaces import KVCleared, KVStored, RouteRequest, Setup
from frame.testing import RoutePolicySuite
from frame.testing.route_policy_suite import FakeRouteServer
from tests.routing.told_policy import ToldPolicy


class TestToldPolicy(RoutePolicySuite):
    target = "tests.routing.told_policy:ToldPolicy"


def test_a_prompt_goes_to_the_server_that_cached_its_beginning() -> None:
    policy, servers = ToldPolicy(Setup()), [FakeRouteServer(f"http://{place}") for place in range(3)]
    request = RouteRequest("/v1/completions", b'{"prompt": [%b]}' % b", ".join(b"%d" % token for token in range(20)))
    servers[0].in_flight = 1
    assert policy.choose(request, servers) is servers[1]
    policy.kv_changed("http://2", 0, KVStored([1], None, array("I", range(16)), 16))
    assert policy.choose(request, servers) is servers[2]
    policy.kv_changed("http://2", 0, KVCleared())
    assert policy.choose(request, servers) is servers[1]
