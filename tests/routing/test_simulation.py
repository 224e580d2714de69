"""Simulated servers: what a replay of requests over them says, and that it says it again."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from frame.interfaces import KVChange, RoutePolicy, RouteRequest, RouteServer, Setup
from frame.plugins.routing.least_load import LeastLoadPolicy
from frame.plugins.routing.prefix import PrefixPolicy
from frame.plugins.routing.round_robin import RoundRobinPolicy
from frame.plugins.routing.text_prefix import TextPrefixPolicy
from frame.routing.simulation import ServiceModel, TracedRequest, simulate
from frame.settings import PluginError
from frame.testing.route_policy_suite import FakeRouteServer

#: Ten tokens in a second, and steps that cost nothing else.
SLOW = ServiceModel(
    prefill_rate=10, step_seconds=1, request_seconds=0, max_batched_tokens=100, block_size=2, event_seconds=0
)


def traced(at: float, tokens: Sequence[int], output_len: int = 1) -> TracedRequest:
    text = " ".join(f"token {token:06}" for token in tokens)
    body = json.dumps({"prompt": text}).encode()
    return TracedRequest(at, "/v1/completions", body, array("I", tokens), output_len)


def chats(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """Conversations that go on, each with one of some system prompts."""
    draw = random.Random(seed)
    systems = [[draw.randrange(1 << 20) for _ in range(500)] for _ in range(6)]
    live, found, now = [list(draw.choice(systems)) for _ in range(20)], [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        place = draw.randrange(len(live))
        if len(live[place]) > 1500:
            live[place] = list(draw.choice(systems))
        live[place] += [draw.randrange(1 << 20) for _ in range(100)]
        found.append(traced(now, live[place], draw.randint(5, 40)))
    return found


def test_times_are_those_of_the_model() -> None:
    """Ten tokens take a step of 1 + 10 / 10 seconds, further tokens one of a second each."""
    run = simulate(RoundRobinPolicy(Setup()), "x", [traced(5, range(10), output_len=3)], 1, SLOW)
    assert (run.ttfts, run.latencies, run.seconds, run.busy, run.requests) == ([2.0], [4.0], 9.0, [4.0], [1])
    assert (run.hit_rate, run.imbalance) == (0.0, 1.0)


def test_what_is_cached_is_not_computed_again_but_for_the_last_token() -> None:
    trace = [traced(0, range(10)), traced(10, range(10)), traced(20, range(11))]
    run = simulate(RoundRobinPolicy(Setup()), "x", trace, 1, SLOW)
    # eight of ten, since a block has two tokens; ten of eleven
    assert run.ttfts == pytest.approx([2.0, 1.2, 1.1])
    assert (run.cached_tokens, run.prompt_tokens) == (18, 31)


def test_prompts_that_do_not_fit_a_step_take_several_and_others_wait() -> None:
    model = ServiceModel(
        prefill_rate=10, step_seconds=1, request_seconds=0, max_batched_tokens=10, max_requests=1, block_size=2
    )
    run = simulate(RoundRobinPolicy(Setup()), "x", [traced(0, range(20)), traced(0, range(100, 110))], 1, model)
    assert run.ttfts == pytest.approx([4.0, 6.0])


def test_a_full_cache_forgets_what_was_used_longest_ago() -> None:
    model = ServiceModel(prefill_rate=10, step_seconds=1, request_seconds=0, cache_tokens=20, block_size=2)
    first, second, third = range(10), range(100, 110), range(200, 208)
    trace = [traced(10.0 * place, tokens) for place, tokens in enumerate((first, second, first, third, first, second))]
    run = simulate(RoundRobinPolicy(Setup()), "x", trace, 1, model)
    # four of the five blocks of the second one make room for the third one, and its first is kept
    assert [round(10 * ttft) for ttft in run.ttfts] == [20, 20, 12, 18, 12, 18]


@pytest.mark.parametrize("num_servers", [2, 8, 64])
def test_policies_by_prefixes_find_more_and_answer_sooner(num_servers: int) -> None:
    trace = chats(400, rate=5 * num_servers)
    model = ServiceModel(cache_tokens=30_000)
    runs = {
        kind: simulate(kind(Setup()), kind.__name__, trace, num_servers, model)
        for kind in (RoundRobinPolicy, LeastLoadPolicy, TextPrefixPolicy, PrefixPolicy)
    }
    for run in runs.values():
        assert len(run.ttfts) == len(run.latencies) == sum(run.requests) == 400
        assert 0 < run.hit_rate < 1
        assert run.imbalance >= 1
    others = max(runs[RoundRobinPolicy].hit_rate, runs[LeastLoadPolicy].hit_rate)
    for kind in (TextPrefixPolicy, PrefixPolicy):
        assert runs[kind].hit_rate > others + 0.05
        assert sum(runs[kind].ttfts) < sum(runs[RoundRobinPolicy].ttfts)


def test_equal_arguments_give_equal_results() -> None:
    trace = chats(200, rate=10)
    for kind in (RoundRobinPolicy, LeastLoadPolicy, TextPrefixPolicy, PrefixPolicy):
        runs = [simulate(kind(Setup()), "x", trace, 3, ServiceModel(cache_tokens=20_000)) for _ in range(2)]
        assert runs[0] == runs[1]


class Told(RoundRobinPolicy):
    """Notes at each request how many changes it was told of."""

    def __init__(self) -> None:
        super().__init__(Setup())
        self.num_told = 0
        self.at_requests: list[int] = []

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        self.at_requests.append(self.num_told)
        return super().choose(request, servers)

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        self.num_told += 1


@pytest.mark.parametrize(("event_seconds", "told"), [(0, [0, 1]), (7.9, [0, 1]), (8.1, [0, 0])])
def test_events_come_when_the_model_says(event_seconds: float, told: list[int]) -> None:
    policy, model = Told(), replace(SLOW, event_seconds=event_seconds)
    simulate(policy, "x", [traced(0, range(10)), traced(10, range(10))], 1, model)
    assert policy.at_requests == told


class Stray(RoutePolicy):
    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return FakeRouteServer("http://elsewhere")


def test_a_policy_that_names_another_server_is_named() -> None:
    with pytest.raises(
        PluginError, match=r"^route policy 'stray' names .*; there are: http://server-0, http://server-1$"
    ):
        simulate(Stray(Setup()), "stray", [traced(0, range(10))], 2, SLOW)


class Broken(RoutePolicy):
    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        raise KeyError("x")


def test_a_policy_that_raises_is_named() -> None:
    with pytest.raises(PluginError, match=r"^route policy 'broken' has not chosen a server: KeyError: 'x'$"):
        simulate(Broken(Setup()), "broken", [traced(0, range(10))], 2, SLOW)
