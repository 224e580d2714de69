"""What the prefix cache tells of itself is what it holds, whatever happens to requests and steps."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from frame.core.engine.adapters import Adapter
from frame.interfaces import AdapterSource
from frame.kv_events.events import Cleared, Event, RecordedEvents, Removed, Stored
from tests.engine.simulation import Simulation, make_layout, make_request
from tests.engine.test_scheduler_properties import (
    Life,
    connectors,
    examples,
    operations,
    random_setup,
    setups,
    simulate,
)


class Listener:
    """Applies events as they come: `blocks` by (group, hash), with the hash before each and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], tuple[bytes | None, list[int]]] = {}
        self.batches: list[list[Event]] = []
        self.events: RecordedEvents

    def listen(self, layout: Any) -> RecordedEvents:
        self.sizes = [group.block_size for group in layout.groups]
        self.events = RecordedEvents(layout, self.apply, deterministic=False)
        return self.events

    def apply(self, batch: list[Event]) -> None:
        assert batch
        self.batches.append(batch)
        for event in batch:
            if isinstance(event, Stored):
                size, parent = self.sizes[event.group], event.parent
                assert len(event.tokens) == len(event.hashes) * size
                assert len(event.extra) == len(event.hashes) > 0
                for place, name in enumerate(event.hashes):
                    assert (event.group, name) not in self.blocks, "stored twice"
                    tokens = event.tokens[place * size : (place + 1) * size].tolist()
                    self.blocks[event.group, name], parent = (parent, tokens), name
            elif isinstance(event, Removed):
                assert event.hashes
                for name in event.hashes:
                    del self.blocks[event.group, name]  # raises for one that was not there
            else:
                self.blocks.clear()

    def check(self, sim: Simulation, roots: set[bytes]) -> None:
        """What was heard is what the pools publish, and each block's name is the hash of what it is said to hold."""
        self.events.flush()
        kv = sim.scheduler._kv
        pools = [kv.pool, *kv.checkpoints.pools.values()]
        held = {(group, name) for pool in pools for group, part in enumerate(pool._published) for name in part}
        assert self.blocks.keys() == held
        for (group, name), (parent, tokens) in self.blocks.items():
            found = set()
            for before in roots if parent is None else [parent]:
                chain: list[bytes] = []
                kv.hasher.extend(chain, before, array("i", tokens), self.sizes[group] // kv.block_size)
                found.add(chain[-1])
            assert name in found


def run(setup: dict, connector: dict | None, script: list, breaks: float) -> None:
    listener = Listener()
    life = Life(simulate(setup, connector, listener.listen), breaks=breaks)
    roots = {life.sim.scheduler._kv.hasher.root()}
    for operation, seed in script:
        life.apply(operation, seed)
        for request in life.requests.values():
            if request.encoder_ids is not None:
                encoder = request.encoder_ids.astype("<i4").tobytes()
                roots.add(life.sim.scheduler._kv.hasher.root(encoder=encoder))
        listener.check(life.sim, roots)
    life.check()
    listener.check(life.sim, roots)


caching = setups.map(lambda setup: {**setup, "enable_prefix_caching": True})


@examples(100)
@given(setup=caching, script=operations, breaks=st.sampled_from([0.0, 0.0, 0.15]))
def test_replaying_all_events_gives_the_blocks_that_the_pools_publish(setup, script, breaks):
    run(setup, None, script, breaks)


@examples(60)
@given(setup=caching, connector=connectors, script=operations)
def test_so_it_does_where_a_connector_loads_and_fails(setup, connector, script):
    run(setup, connector, script, 0.0)


@pytest.mark.parametrize("seed", range(16))
def test_so_it_does_in_long_lives_with_states_and_resets(seed):
    rng = random.Random(seed)
    setup = {**random_setup(rng), "enable_prefix_caching": True, "holds_states": seed % 2 == 0, "checkpoints": 6}
    names = ["add"] * 4 + ["follow"] * 2 + ["reset"] * 2 + ["launch"] * 6 + ["answer"] * 6
    run(setup, None, [(rng.choice(names), rng.randrange(2**32)) for _ in range(150)], breaks=seed % 3 * 0.05)


def told(*requests: Any, **setup: Any) -> list[Event]:
    """The events of requests that run one after the other."""
    listener = Listener()
    layout = make_layout(64, 4, **setup)
    sim = Simulation(layout=layout, events=listener.listen(layout))
    for request in requests:
        sim.add(request)
        sim.run()
        listener.events.flush()
    return [event for batch in listener.batches for event in batch]


def test_blocks_of_one_request_are_one_event():
    (event,) = told(make_request("a", [*range(1, 12), 1], 1))
    assert isinstance(event, Stored)
    assert event.parent is None
    assert event.tokens.tolist() == [*range(1, 12), 1]
    first, second = told(make_request("a", [1] * 8, 1), make_request("b", [1] * 8 + [2] * 8, 1))
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert second.parent == first.hashes[-1]
    assert second.tokens.tolist() == [2] * 8


def test_groups_have_events_of_their_own():
    events = told(make_request("a", [1] * 16, 1), windows=(None, 4), strides=(1, 2))
    assert [(event.group, len(event.hashes)) for event in events] == [(0, 4), (1, 2)]


def test_what_decides_a_block_besides_the_tokens_is_named():
    (salted,) = told(make_request("a", [1] * 8, 1, salt="s", media_keys=["m"]))
    assert salted.extra == [("m", "s"), None]
    (plain,) = told(make_request("a", [1] * 8, 1))
    assert plain.extra == [None, None]
    (behind,) = told(make_request("a", [1] * 8, 1, encoder_ids=np.array([1, 2], np.int32)), encodes=True)
    assert behind.extra[1] is None
    assert len(behind.extra[0][0]) == 64


def test_a_block_of_an_adapter_names_it():
    listener, layout = Listener(), make_layout(64, 4)
    events = listener.listen(layout)
    sim = Simulation(layout=layout)
    sim.add(make_request("a", [1] * 8, 1))
    request = sim.scheduler.lifecycle.requests["a"]
    request.adapter = Adapter(AdapterSource("tall", "/nowhere"), 1, "")
    request.cache.hashes += [b"first", b"second"]
    events.stored(request, 0, b"first", 4)
    events.stored(request, 0, b"second", 8)
    events.flush()
    ((event,),) = listener.batches
    assert (event.adapter, event.extra) == ("tall", [("tall",), ("tall",)])


@pytest.mark.parametrize("again", [False, True])
def test_a_reset_is_told_and_nothing_is_told_twice(again):
    listener, layout = Listener(), make_layout(64, 4)
    sim = Simulation(layout=layout, events=listener.listen(layout))
    sim.add(make_request("a", [1] * 8, 1))
    sim.run()
    assert sim.scheduler.reset_prefix_cache()
    if again:
        listener.events.flush()
    listener.events.flush()
    assert [type(event) for event in listener.batches[-1]] == [Stored, Cleared]
    assert len(listener.batches) == 1
