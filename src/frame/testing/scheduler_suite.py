"""The contract of scheduling policies: an order that is total, stable and lets every request end."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

from frame.core.interfaces.scheduling import SchedulerPolicy

from .engines import drain, fake_engine, request, tokens_of
from .fake_cache import VOCAB, expected_tokens, make_layout
from .fake_executor import FakeExecutor, FakeWorkers
from .fake_worker import FakeWorker
from .plugin_suite import PluginSuite
from .setups import make_setup


@dataclass
class FakeRequest:
    """What a policy may look at."""

    request_id: str
    priority: int = 0
    arrival: float = 0.0
    num_computed: int = 0
    num_tokens: int = 10
    turn: float = 0.0
    owner: str = ""
    owner_running: int = 0


class SchedulerPolicySuite(PluginSuite):
    """The contract of `frame.interfaces.SchedulerPolicy`.

        class TestMine(SchedulerPolicySuite):
            plugin = "mine"            # or target = "package.module:Class"

    Checks the sort key by itself, then frame's scheduler with it, on a cache that is too small for all requests.
    """

    kind = "scheduler"

    def policy(self) -> SchedulerPolicy:
        """A new policy."""
        made = self.make()
        assert isinstance(made, SchedulerPolicy), f"{type(made).__name__} does not derive from SchedulerPolicy"
        return made

    def requests(self, count: int = 40) -> list[FakeRequest]:
        """Requests that differ in everything."""
        draw = random.Random(0)
        return [
            FakeRequest(
                f"r{index}", draw.randrange(-3, 4), draw.random() * 9, draw.randrange(50), draw.randrange(1, 99)
            )
            for index in range(count)
        ]

    def test_keys_are_tuples_that_can_be_compared(self) -> None:
        policy = self.policy()
        keys: list[Any] = [policy.key(one) for one in self.requests()]
        for key in keys:
            assert isinstance(key, tuple), f"key must give a tuple, gave {key!r}"
            assert not any(part != part for part in key), f"key {key!r} holds a NaN"
        backwards = keys[::-1]
        assert sorted(keys) == sorted(backwards), "the order of keys depends on the order of requests"
        for one, other in itertools.combinations(keys, 2):
            found = [one < other, other < one, one == other]
            assert sum(found) == 1, f"keys {one!r} and {other!r} have no order: neither is smaller, nor are they equal"

    def test_keys_depend_on_the_request_alone(self) -> None:
        """Ranks derive the order for themselves, so it may follow nothing but the request."""
        first, second = self.policy(), self.policy()
        requests = self.requests()
        wanted = [first.key(one) for one in requests]
        for index in (3, 0, 7, 3):
            assert first.key(requests[index]) == wanted[index], "the key of a request changed between two calls"
        assert [second.key(replace(one)) for one in reversed(requests)] == wanted[::-1], (
            "another policy orders otherwise"
        )

    def test_looking_changes_nothing(self) -> None:
        policy = self.policy()
        for one in self.requests():
            before = replace(one)
            policy.key(one)
            assert one == before, "key changed the request"

    def test_every_request_ends_on_a_cache_too_small_for_all(self) -> None:
        config = self.config(scheduling_policy=self.name, max_num_seqs=4, max_num_batched_tokens=16)
        layout = make_layout(num_blocks=14)
        executor = FakeExecutor(
            make_setup("executor", config=config, workers=FakeWorkers(lambda rank: FakeWorker(layout)))
        )
        engine = fake_engine(config, executor, self.policy(), layout)
        draw = random.Random(1)
        requests = []
        for index in range(24):
            one = request(str(index), draw.choices(range(VOCAB), k=draw.randrange(1, 30)), draw.randrange(1, 18))
            one.priority, one.arrival = draw.randrange(3), float(index)
            requests.append(one)
        outputs = drain(engine, requests)
        for one in requests:
            want = expected_tokens(one.prompt_ids.tolist(), one.max_tokens)
            assert tokens_of(outputs[one.request_id]) == want, f"request {one.request_id} got other tokens"
        assert engine.stats().kv_usage == 0, "blocks are still in use although nothing runs"
        engine.close()
