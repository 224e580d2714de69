"""Blocks that pass through host memory, as for devices that NIXL cannot reach."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.interfaces import SideQueue
from frame.plugins.connectors.blocks import host_slab
from frame.plugins.connectors.nixl import holds as nixl_holds, mirror as nixl_mirror
from frame.plugins.connectors.nixl.options import NixlOptions
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.nixl_pairs import Pairs, counter

pytest.importorskip("nixl")


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


BUFFER = {"host_buffer": True}


def travel(pairs, there, here, name, prompt):
    """Returns how many tokens of the prompt were not computed; both engines step, as their loops do."""
    pairs.add(here, f"d{name}", prompt, pairs.prefill(there, f"p{name}", prompt))
    pairs.until(lambda: here.ended(f"d{name}"), there, here)
    return here.num_cached(f"d{name}")


@pytest.mark.parametrize(
    ("there", "here"), [(BUFFER, BUFFER), (BUFFER, {}), ({}, BUFFER)], ids=["both", "prefill", "decode"]
)
def test_prompts_travel_through_host_memory(pairs, there, here):
    shape = {"windows": (0, 6)}
    first = pairs.engine(make_layout(128, **shape), options=there)
    second = pairs.engine(make_layout(block_size=8, ranks=2, **shape), ranks=2, options=here)
    for number, length in enumerate((41, 22, 60)):
        prompt = pairs.prompt(length, seed=number)
        assert travel(pairs, first, second, number, prompt) == length - 1
    assert counter(second, "failed_blocks") == 0
    pairs.rest(first, second)


def test_only_host_memory_is_given_to_nixl(pairs):
    there = pairs.engine(options=BUFFER)
    worker = there.workers.made[0]
    caches = [view.bytes for view in worker.memory.views.values()]
    given = worker.transfer.inner._facts.agent.layers
    assert {one.address for one in given}.isdisjoint(cache.data_ptr() for cache in caches)
    assert [(one.count, one.size) for one in given] == [tuple(cache.shape) for cache in caches]


def test_a_reader_waits_until_the_blocks_are_in_host_memory(pairs, monkeypatch):
    """The answer is out before they are; what is not there is never read."""
    there, here = pairs.engine(options=BUFFER), pairs.engine(options=BUFFER)
    go, fetch = threading.Event(), nixl_mirror.Mirror.fetch
    monkeypatch.setattr(
        nixl_mirror.Mirror, "fetch", lambda self, blocks: self._queue.run(go.wait) or fetch(self, blocks)
    )
    params = pairs.prefill(there, "p", pairs.prompt(40))
    pairs.add(here, "d", pairs.prompt(40), params)
    for _ in range(20):
        there.step(), here.step()
    assert not there.connector.inner._holds._holds["p"].leases
    go.set()
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check()
    assert counter(here, "loaded_blocks") == 10


@pytest.mark.parametrize(("call", "loaded", "failed"), [("fetch", 0, 0), ("put", 0, 10)])
def test_a_copy_that_fails_costs_the_computation(pairs, monkeypatch, call, loaded, failed):
    monkeypatch.setattr(nixl_holds, "_GIVEN_SECONDS", 0.1)
    there, here = pairs.engine(options=BUFFER), pairs.engine(options=BUFFER)

    def broken(mirror, blocks):
        mirror._queue.run(lambda: 1 / 0)
        return mirror._queue.mark()

    monkeypatch.setattr(nixl_mirror.Mirror, call, broken)
    params = pairs.prefill(there, "p", pairs.prompt(40))
    pairs.add(here, "d", pairs.prompt(40), params)
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check()
    assert (counter(here, "loaded_blocks"), counter(here, "failed_blocks")) == (loaded, failed)


def test_sleep_moves_the_host_memory(pairs):
    there, here = pairs.engine(options=BUFFER), pairs.engine(options=BUFFER)
    for number, asleep in enumerate((None, there, here)):
        if asleep is not None:
            asleep.engine.call("sleep")
            asleep.engine.call("wake_up", {"tags": ["kv_cache", "weights"]})
        prompt = pairs.prompt(40, seed=number)
        assert travel(pairs, there, here, number, prompt) == 39
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 0


def test_blocks_are_copied_both_ways_and_no_others():
    memory = FakeMemory(make_layout(12, windows=(0, 6)), 0)
    caches = [view.bytes for view in memory.views.values()]
    for cache in caches:
        cache.copy_(torch.randint(0, 255, cache.shape, dtype=torch.uint8))
    before = [cache.clone() for cache in caches]
    mirror = nixl_mirror.Mirror(memory.views, lambda size: torch.zeros(size, dtype=torch.uint8), SideQueue())
    mirror.fetch([[3, 1, 2, 0, 3], [7]]).wait()
    for (name, view), cache in zip(memory.views.items(), before, strict=True):
        copied = [1, 2, 3, 7]  # the groups' layers share slots
        assert torch.equal(mirror.layers[name][copied], cache[copied])
        assert not mirror.layers[name][[0, 4, 5, 6, 8, 9, 10, 11]].any()
        view.bytes.zero_()
    mirror.put([[1], [7, 0]]).wait()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[1, 7]], old[[1, 7]])
        assert not cache[[0, 2, 3]].any()


def test_rows_are_copied_in_one_piece_also_of_narrow_layers():
    memory = FakeMemory(make_layout(12, latents=2, windows=(), ranks=2, chunks=(10,)), 0)
    mirror = nixl_mirror.Mirror(memory.views, lambda size: torch.zeros(size, dtype=torch.uint8), SideQueue())
    assert any(not view.bytes.is_contiguous() for view in memory.views.values())
    for _, device, host in mirror._pairs:
        assert device.is_contiguous()
        assert host.is_contiguous()
    assert [(name, rows.shape, rows.stride()) for name, rows in mirror.layers.items()] == [
        (name, view.bytes.shape, view.bytes.stride()) for name, view in memory.views.items()
    ]


def test_more_than_this_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(host_slab, "_memory", lambda: (1 << 30, 1000))
    memory = FakeMemory(make_layout(), 0)
    with pytest.raises(ValueError, match=r"are available: a smaller KV cache needs less, or end what else uses it$"):
        nixl_mirror.Mirror(memory.views, torch.empty, SideQueue())
    assert NixlOptions().host_buffer is False
