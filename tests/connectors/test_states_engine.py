"""Connectors under engines of models whose layers keep a running state: tokens are those of one engine without any."""

from __future__ import annotations

import pytest

from frame.plugins.connectors.block_messages import state_key
from frame.plugins.connectors.nixl_worker import NixlWorker
from frame.plugins.connectors.peer_client import PeerClient
from tests.connectors.nixl_prompts import Asked
from tests.connectors.state_models import MODELS, SIZES, cached, complete, engine_of, prompts, write_model

NOTHING = [0] * len(SIZES)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(name, folder, what an engine alone says to the prompts)"""
    folder = write_model(tmp_path_factory.mktemp("model"), request.param)
    with engine_of(folder) as engine:
        tokens, found = complete(engine, prompts())
    assert found == NOTHING
    return request.param, folder, tokens


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
        assert engine.stats().connector_counters == counters


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


def test_a_prefill_engine_hands_its_states_over_and_what_does_not_come_is_computed(model, tmp_path, monkeypatch):
    pytest.importorskip("nixl")
    name, folder, want = model
    (tmp_path / "secret").write_text("a secret of the tests")
    options = {"secret_file": str(tmp_path / "secret"), "lease_seconds": 20, "retry_seconds": 0}
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
        monkeypatch.setattr(NixlWorker, "_fits", lambda *given: False)
        assert decode.call("reset_prefix_cache", {})
        assert passed("lost", prompts())[0] == want
        assert here.counter("failed_blocks") > 0
        assert there.rest() == here.rest() == 0


def is_state(key):
    return key == state_key(key.removesuffix(state_key(b"")))


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_the_device_forgot_come_back_from_host_memory(model, ranks):
    name, folder, want = model
    if ranks == 2 and name != "qwen3-next":
        pytest.skip("one model on two ranks is enough")
    with engine_of(folder, ranks=ranks, kv_offloading_size=0.01) as engine:
        assert complete(engine, prompts()) == (want, NOTHING)
        for label in ("again", "and again"):
            assert engine.call("reset_prefix_cache", {})
            assert complete(engine, prompts(), label) == (want, cached(name))
        counters = engine.stats().connector_counters
        assert counters["offload_loaded_states"] == 2 * ranks * sum(map(bool, cached(name)))
        assert "offload_failed_blocks" not in counters
