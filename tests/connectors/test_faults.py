"""Random lives of two engines with faults at random messages: see `tests/connectors/faults.py`."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from frame.plugins.connectors.blocks import files as block_files
from frame.plugins.connectors.peer import client as peer_client, server as peer_server
from frame.plugins.connectors.push import carrier as push_carrier
from frame.testing.fake_cache import VOCAB
from tests.connectors.faults import HANDING, HELD, KINDS, PLACES, Fault, Faults, World

#: Runs of each connector in `make test`; in `make matrix` so many in each of so many parts.
QUICK, PART, PARTS = 10, 40, 10
PROMPTS = [random.Random(seed).choices(range(VOCAB), k=48) for seed in range(5)]
SHAPES = ({}, {"windows": (0, 6)}, {"num_blocks": 24})
#: Place → the last message to which something happens: most lives have about so many.
LAST = {
    "step": 30,
    "answer": 30,
    "sample": 30,
    "wire": 14,
    "blocks": 3,
    "file": 24,
    "copy": 8,
    "read": 2,
    "write": 4,
    "call": 8,
}
STEPS = ("step", "answer", "sample")

prompts = st.builds(lambda seed, length: PROMPTS[seed][:length], st.integers(0, 4), st.integers(5, 45))
places = st.integers(0, 1)
counts = st.integers(1, 6)
exchanges = st.one_of(
    st.tuples(st.just("hand"), places, prompts, counts),
    st.tuples(st.just("share"), places, prompts, counts),
)
others = st.one_of(
    st.tuples(st.just("add"), places, prompts, counts),
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("abort"), places),
    st.tuples(st.just("reset"), places, st.booleans()),
    st.tuples(st.just("kill"), places),
)
deeds = st.one_of(exchanges, exchanges, others)


def faults_of(connector):
    own = [place for place in PLACES[connector] if place not in STEPS]
    of_place = {
        place: st.builds(Fault, st.just(place), st.integers(0, LAST[place]), st.sampled_from(KINDS[place]))
        for place in PLACES[connector]
    }
    apart = st.one_of([of_place[place] for place in own])
    return st.lists(st.one_of(apart, apart, st.one_of([of_place[place] for place in STEPS])), min_size=1, max_size=6)


def lives(connector):
    return st.fixed_dictionaries(
        {
            "faults": faults_of(connector),
            "deeds": st.lists(deeds, min_size=3, max_size=12),
            "ranks": st.sampled_from((1, 1, 2)),
            "held": st.sampled_from(HELD),
            "late": st.booleans(),
            "policy": st.sampled_from(("recompute", "recompute", "fail")),
            "shape": st.sampled_from(SHAPES),
        }
    )


def live(connector, life):
    """One life: deeds in order, then rest, then the same prompts once more."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(tuple(life["faults"]))
        keys = ("ranks", "held", "late", "policy", "shape")
        with World(connector, Path(folder), faults, **{key: life[key] for key in keys}) as world:
            used = []
            for name, *arguments in life["deeds"]:
                if name in ("add", "hand", "share"):
                    used.append(arguments[1])
                if name == "reset":
                    world.reset(arguments[0], connector=arguments[1])
                else:
                    getattr(world, name)(*arguments)
            world.check()
            for place in (0, 1):  # what was stored meanwhile is right
                world.reset(place, connector=False)
                for prompt in used[:4]:
                    world.add(place, prompt, 2)
            world.check()


def run_lives(connector, count):
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(life=lives(connector))
    def lived(life):
        live(connector, life)

    lived()


def life_of(*faults, deeds=(("share", 1, PROMPTS[0][:22], 4),), ranks=1):
    return {
        "faults": faults,
        "deeds": deeds,
        "ranks": ranks,
        "held": HELD[0],
        "late": False,
        "policy": "recompute",
        "shape": {},
    }


@pytest.mark.parametrize("connector", [name for name in PLACES if name != "multi"])
def test_blocks_travel_where_nothing_happens(connector, tmp_path):
    """A check of the lives themselves: a fault at a message that never comes would show nothing."""
    faults = Faults()
    with World(connector, tmp_path, faults) as world:
        for prompt in PROMPTS[:3]:
            (world.hand if connector in HANDING else world.share)(0, prompt[:30], 3)
        world.check()
        found = Counter()
        for engine in world.engines:
            found.update(engine.engine.stats().connector_counters)
    assert max(found[f"{connector}_{name}"] for name in ("loaded_blocks", "load_bytes", "received_bytes")) > 0
    assert all(faults.counts[place] for place in PLACES[connector])


@pytest.mark.parametrize(
    ("connector", "place", "module", "name"),
    [("peer", "blocks", peer_client, "checksum"), ("disk", "file", block_files, "_checksum")],
)
def test_a_block_that_changes_would_be_noticed(monkeypatch, connector, place, module, name):
    """A check of the lives themselves: without its checksums a connector fails them."""
    life = life_of(*(Fault(place, number, "flip") for number in range(5)))
    live(connector, life)
    sums = {"peer": lambda *_: b"", "disk": lambda *_: bytes(16)}[connector]
    monkeypatch.setattr(module, name, sums)
    monkeypatch.setattr(peer_server, "checksum", sums)
    with pytest.raises(AssertionError, match="got other tokens than without a connector"):
        live(connector, life)


def test_a_block_of_push_that_changes_would_be_noticed(monkeypatch):
    life = life_of(*(Fault("blocks", number, "flip") for number in range(9)), deeds=(("hand", 1, PROMPTS[0][:22], 4),))
    live("push", life)
    monkeypatch.setattr(push_carrier.Carrier, "checksum", lambda *_: -1)
    with pytest.raises(AssertionError, match="got other tokens than without a connector"):
        live("push", life)


@pytest.mark.parametrize("connector", PLACES)
def test_no_fault_yields_a_wrong_token_or_leaves_something(connector):
    run_lives(connector, QUICK)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("connector", PLACES)
def test_no_fault_of_many_yields_a_wrong_token_or_leaves_something(connector, part):
    run_lives(connector, PART)
