"""Connectors under engines of models whose layers keep a running state: tokens are those of one engine without any."""

from __future__ import annotations

import time
from functools import partial

import pytest

from frame.plugins.connectors.blocks.messages import state_key
from frame.plugins.connectors.nixl import worker as nixl_worker
from frame.plugins.connectors.offload.worker import OffloadWorker
from frame.plugins.connectors.peer.client import PeerClient
from frame.plugins.connectors.push import decode_side
from frame.plugins.connectors.push.inbox import Inbox
from tests.connectors.mooncake_pairs import use_fake
from tests.connectors.nixl_prompts import Asked
from tests.connectors.state_models import MODELS, SIZES, cached, complete, engine_of, prompts, write_model

NOTHING = [0] * len(SIZES)
SMALL_BUFFERS = {"buffer_bytes": 1 << 24, "send_buffer_bytes": 1 << 22, "retry_seconds": 0, "wait_seconds": 60}
#: Options of connectors whose prefill engines send.
SENDS = {"push": SMALL_BUFFERS, "mooncake": {**SMALL_BUFFERS, "trusted_network": True, "bootstrap_port": 0}}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(name, folder, what an engine alone says to the prompts)"""
    folder = write_model(tmp_path_factory.mktemp("model"), request.param)
    with engine_of(folder) as engine:
        tokens, found = complete(engine, prompts())
    assert found == NOTHING
    return request.param, folder, tokens


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("hybrid"), "qwen3-next")
    with engine_of(folder) as engine:
        return folder, complete(engine, prompts())[0]


@pytest.mark.some(3)
def test_a_new_engine_reads_states_and_blocks_from_the_disk(model, tmp_path):
    name, folder, want = model
    with engine_of(folder, "disk", {"folder": str(tmp_path)}) as engine:
        assert complete(engine, prompts()) == (want, NOTHING)
    with engine_of(folder, "disk", {"folder": str(tmp_path)}) as engine:
        assert complete(engine, prompts()) == (want, cached(name))
        counters = engine.stats().connector_counters
        assert counters["disk_loaded_states"] == sum(map(bool, cached(name)))
        # from then on they are here
        assert complete(engine, prompts(), "again") == (want, cached(name))
        looked_for = {"disk_lookup_tokens": counters["disk_lookup_tokens"]}  # with what no state stands for
        assert engine.stats().connector_counters | looked_for == counters


def test_states_that_are_damaged_or_lost_are_computed_again(model, tmp_path):
    name, folder, want = model
    options = {"folder": str(tmp_path)}
    with engine_of(folder, "disk", options) as engine:
        complete(engine, prompts())
    files = sorted(tmp_path.rglob("*.kv"))
    states = [path for path in files if len(path.stem) > min(len(one.stem) for one in files)] or files
    for number, path in enumerate(states):
        data = bytearray(path.read_bytes())
        data[-7] ^= 0x40
        path.write_bytes(bytes(data[: len(data) // 2] if number % 2 else data))
    with engine_of(folder, "disk", options) as engine:
        assert complete(engine, prompts())[0] == want
        assert engine.stats().connector_counters["disk_failed_blocks"] > 0
    with engine_of(folder, "disk", options) as engine:
        assert complete(engine, prompts()) == (want, cached(name))
    for path in states:
        path.unlink()
    with engine_of(folder, "disk", options) as engine:
        assert complete(engine, prompts()) == (want, NOTHING)


def test_a_peer_gives_its_states_and_what_does_not_come_is_computed(model, tmp_path, monkeypatch):
    name, folder, want = model
    address = f"unix:{tmp_path}/holder"
    with engine_of(folder, "peer", {"listen": address}) as holder:
        complete(holder, prompts())
        with engine_of(folder, "peer", {"peers": [address], "lookup_seconds": 20}) as engine:
            assert complete(engine, prompts()) == (want, cached(name))
            assert engine.stats().kv_usage == 0
            assert complete(engine, prompts(1))[1] == NOTHING
        fetch = PeerClient.fetch
        monkeypatch.setattr(PeerClient, "fetch", lambda *given: [] if is_state(given[1][0]) else fetch(*given))
        with engine_of(folder, "peer", {"peers": [address], "lookup_seconds": 20}) as engine:
            assert complete(engine, prompts())[0] == want
            assert engine.stats().connector_counters["peer_failed_blocks"] == sum(map(bool, cached(name)))
            assert engine.stats().kv_usage == 0


@pytest.mark.some(1)
def test_a_prefill_engine_hands_its_states_over_and_what_does_not_come_is_computed(model, tmp_path, monkeypatch):
    pytest.importorskip("nixl")
    name, folder, want = model
    (tmp_path / "secret").write_text("a secret of the tests")
    options = {"secret_file": str(tmp_path / "secret"), "lease_seconds": 300, "retry_seconds": 0}
    with engine_of(folder, "nixl", options) as prefill, engine_of(folder, "nixl", options) as decode:
        there, here = Asked(prefill), Asked(decode)

        def passed(label, given):
            """Hands all prompts over before the first is decoded; returns as `complete`."""
            names = [f"{label}{index}" for index in range(len(given))]
            for one, prompt in zip(names, given, strict=True):
                there.add(one, prompt, {"do_remote_decode": True}, 1)
                there.finish(one)
            for one, prompt in zip(names, given, strict=True):
                here.add(one, prompt, there.outputs[one][-1].kv_transfer)
            return [here.finish(one) for one in names], [here.num_cached(one) for one in names]

        assert passed("d", prompts()) == (want, cached(name))
        assert here.counter("failed_blocks") == 0
        assert there.rest() == here.rest() == 0
        # the states are here by now
        assert complete(decode, prompts(), "again") == (want, cached(name))
        monkeypatch.setattr(nixl_worker, "_covers", lambda *given: False)
        assert decode.call("reset_prefix_cache", {})
        assert passed("lost", prompts())[0] == want
        assert here.counter("failed_blocks") > 0
        assert there.rest() == here.rest() == 0


@pytest.mark.some(2)
@pytest.mark.parametrize("connector", ["push", "mooncake"])
def test_a_prefill_engine_sends_its_states_and_what_does_not_come_is_computed(model, tmp_path, monkeypatch, connector):
    """The engine to which Mooncake writes is one of this process."""
    name, folder, want = model
    (tmp_path / "secret").write_text("a secret of the tests")
    options = {"secret_file": str(tmp_path / "secret"), **SENDS[connector]}
    use_fake(monkeypatch)
    monkeypatch.setattr(decode_side, "ANSWERED_SECONDS", 60)
    with engine_of(folder, connector, options) as prefill, engine_of(folder, connector, options) as decode:
        there, here = Asked(prefill), Asked(decode)
        passed = partial(send, there, here)
        assert passed("d", prompts()) == (want, cached(name))
        assert here.counter("failed_blocks", connector) == there.counter("unsent_prompts", connector) == 0
        assert there.rest() == here.rest() == 0
        # the states are here by now
        assert complete(decode, prompts(), "again") == (want, cached(name))
        # those that the prefill engine finds in its cache
        alone = complete(prefill, prompts(1), "alone")[0]
        assert passed("found", prompts(1)) == (alone, cached(name))
        monkeypatch.setattr(Inbox, "claim", lambda *given: None)
        lost = passed("lost", prompts(2))[0]
        assert lost == complete(prefill, prompts(2), "not lost")[0]
        assert here.counter("failed_blocks", connector) > 0
        assert there.rest() == here.rest() == 0


def send(there, here, label, given):
    """Has prompts be computed by one engine and decoded by the other; returns as `complete`."""
    names = [f"{label}{index}" for index in range(len(given))]
    place = {"remote_host": "127.0.0.1", "remote_port": here.engine.scheduler._transfers.connector.door.port}
    for one, prompt in zip(names, given, strict=True):
        there.add(one, prompt, {"do_remote_decode": True, **place}, 1)
        there.finish(one)
        here.add(one, prompt, there.outputs[one][-1].kv_transfer)
    return [here.finish(one, beside=there) for one in names], [here.num_cached(one) for one in names]


def is_state(key):
    return key == state_key(key.removesuffix(state_key(b"")))


def test_states_that_the_device_forgot_come_back_from_host_memory(model):
    name, folder, want = model
    with engine_of(folder, kv_offloading_size=0.01) as engine:
        assert complete(engine, prompts()) == (want, NOTHING)
        for label in ("again", "and again"):
            assert engine.call("reset_prefix_cache", {})
            assert complete(engine, prompts(), label) == (want, cached(name))
        engine.call("sleep", {})
        engine.call("wake_up", {})
        assert complete(engine, prompts(), "after sleep") == (want, cached(name))
        counters = engine.stats().connector_counters
        assert counters["offload_loaded_states"] == 3 * sum(map(bool, cached(name)))
        assert "offload_failed_blocks" not in counters


#: The first stage of the second kind has no attention, so that one of its two ranks keeps no tokens.
RANKS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def test_states_in_shared_memory_are_for_other_engines_and_the_next_one(model, tmp_path):
    name, folder, want = model
    (tmp_path / "shm").mkdir()
    options = {"size": 0.01, "shared": True, "shared_folder": str(tmp_path / "shm"), "keep": True}
    with engine_of(folder, "offload", options) as engine:
        assert complete(engine, prompts()) == (want, NOTHING)
        with engine_of(folder, "offload", options) as other:
            assert complete(other, prompts(), "beside") == (want, cached(name))
            counters = other.stats().connector_counters
            assert counters["offload_loaded_states"] == sum(map(bool, cached(name)))
            assert counters["offload_shared_read_bytes"] > 0
            assert "offload_failed_blocks" not in counters
    with engine_of(folder, "offload", options) as engine:
        assert complete(engine, prompts(), "after") == (want, cached(name))
        counters = engine.stats().connector_counters
        assert counters["offload_checked_read_bytes"] > 0
        assert "offload_failed_blocks" not in counters


@pytest.mark.some(1)
def test_states_go_to_the_disk_and_come_back(model, tmp_path, monkeypatch):
    """Host memory has room for two of them, or three."""
    name, folder, want = model
    sizes = (90, 17, 70, 100, 5)  # each leaves one state
    given = prompts(sizes=sizes)
    want = [want[number] if size in SIZES else None for number, size in enumerate(sizes)]
    make = OffloadWorker._make_slab

    def small(worker, device, form, size, kind):
        return make(worker, device, form, 4 * form.row_bytes - 1 if kind else size, kind)

    monkeypatch.setattr(OffloadWorker, "_make_slab", small)
    options = {"size": 0.01, "disk_folder": str(tmp_path / "disk"), "disk_size": 0.1}
    with engine_of(folder, "offload", options) as engine:
        found = []
        for label in ("first", "again"):
            for number, prompt in enumerate(given):
                found.append(complete(engine, [prompt], f"{label}{number}"))
                latest, connector = time.monotonic() + 60, engine.scheduler._transfers.connector
                while connector.waits:
                    assert time.monotonic() < latest, "transfers do not end"
                    complete(engine, [[5, 6]], f"{label}{number}-{time.monotonic()}-")  # which fill no block
                    time.sleep(0.005)
            assert engine.call("reset_prefix_cache", {})
        counters = engine.stats().connector_counters
    assert [tokens for (tokens,), _ in found[:5]] == [tokens for (tokens,), _ in found[5:]]
    assert all(tokens == wanted for ((tokens,), _), wanted in zip(found, want, strict=False) if wanted is not None)
    assert [count for _, (count,) in found] == [*NOTHING, *cached(name, sizes)]
    assert counters["offload_disk_written_bytes"] > 0
    assert counters["offload_disk_read_bytes"] > 0
    assert not {"offload_failed_blocks", "offload_disk_lost_blocks"} & counters.keys()


#: What is left to `make matrix` is shown in parts elsewhere.
OFTEN = {("disk", "tensor"), ("offload", "pipeline")}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}", marks=[] if (name, kind) in OFTEN else [pytest.mark.matrix])
    for name in ("disk", "offload", "peer", "nixl")
    for kind in RANKS
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("connector", "kind"), CASES)
def test_each_of_two_ranks_moves_its_part(tmp_path, hybrid, connector, kind):
    (folder, want), ranks = hybrid, RANKS[kind]
    (tmp_path / "secret").write_text("a secret of the tests")
    options = {
        "disk": {"folder": str(tmp_path / "kv")},
        "offload": {"size": 0.01},
        "peer": {"listen": f"unix:{tmp_path}/one"},
        "nixl": {"secret_file": str(tmp_path / "secret"), "lease_seconds": 300},
    }[connector]
    others = {"peers": [f"unix:{tmp_path}/one"], "lookup_seconds": 20} if connector == "peer" else options
    with engine_of(folder, connector, options, **ranks, executor="threads") as engine:
        if connector == "nixl":
            there = Asked(engine)
            for index, prompt in enumerate(prompts()):
                there.add(f"r{index}", prompt, {"do_remote_decode": True}, 1)
                there.finish(f"r{index}")
            given = [there.outputs[f"r{index}"][-1].kv_transfer for index in range(len(SIZES))]
        else:
            assert complete(engine, prompts()) == (want, NOTHING)
        if connector == "offload":
            assert engine.call("reset_prefix_cache", {})
            assert complete(engine, prompts(), "again") == (want, cached("qwen3-next"))
            return
        with engine_of(folder, connector, others, **ranks, executor="threads") as other:
            if connector == "nixl":
                here = Asked(other)
                for index, prompt in enumerate(prompts()):
                    here.add(f"r{index}", prompt, given[index])
                    here.finish(f"r{index}")
                found = [here.tokens(f"r{index}") for index in range(len(SIZES))]
                assert [here.num_cached(f"r{index}") for index in range(len(SIZES))] == cached("qwen3-next")
                assert found == want
                assert there.rest() == here.rest() == 0
            else:
                assert complete(other, prompts(), "again") == (want, cached("qwen3-next"))
            counters = other.stats().connector_counters
            assert not counters.get(f"{connector}_failed_blocks")


@pytest.mark.parametrize("kind", ["pipeline", pytest.param("tensor", marks=pytest.mark.matrix)])
def test_each_of_two_ranks_sends_its_part(tmp_path, hybrid, kind):
    (folder, want), ranks = hybrid, RANKS[kind]
    (tmp_path / "secret").write_text("a secret of the tests")
    made = partial(engine_of, folder, "push", {"secret_file": str(tmp_path / "secret"), **SENDS["push"]})
    with made(**ranks, executor="threads") as prefill, made(**ranks, executor="threads") as decode:
        there, here = Asked(prefill), Asked(decode)
        assert send(there, here, "d", prompts()) == (want, cached("qwen3-next"))
        assert here.counter("failed_blocks", "push") == there.counter("unsent_prompts", "push") == 0
        assert there.rest() == here.rest() == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", list(RANKS))
def test_each_of_two_ranks_finds_its_part_of_what_outlives_the_engine(tmp_path, hybrid, kind):
    """In shared memory, beside one another and after another, and on the disk behind it."""
    (folder, want), ranks = hybrid, RANKS[kind]
    (tmp_path / "shm").mkdir()
    options = {"size": 0.01, "shared": True, "shared_folder": str(tmp_path / "shm"), "keep": True}
    options["disk_folder"] = str(tmp_path / "disk")
    with engine_of(folder, "offload", options, **ranks, executor="threads") as engine:
        assert complete(engine, prompts()) == (want, NOTHING)
        with engine_of(folder, "offload", options, **ranks, executor="threads") as other:
            assert complete(other, prompts(), "beside") == (want, cached("qwen3-next"))
            assert "offload_failed_blocks" not in other.stats().connector_counters
    with engine_of(folder, "offload", options, **ranks, executor="threads") as engine:
        assert complete(engine, prompts(), "after") == (want, cached("qwen3-next"))
        assert "offload_failed_blocks" not in engine.stats().connector_counters
