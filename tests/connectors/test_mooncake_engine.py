"""Engines in two processes, with real models and Mooncake's real transfer engine over TCP, where it is there."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from frame.plugins.connectors.mooncake import engine as mooncake_engine
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.mooncake_pairs import lacks
from tests.connectors.nixl_prompts import BLOCK_SIZE, Asked, Prefill, open_engine
from tests.free_ports import free_ports

SIZES = (90, 17, 64, 5)
CACHED = [size - 1 if size > BLOCK_SIZE else 0 for size in SIZES]
MOONCAKE = {"kv_connector": "mooncake"}
OPTIONS = {"trusted_network": True, "retry_seconds": 0, "expiry_seconds": 5}


@pytest.fixture(autouse=True, scope="module")
def _is_here():
    if (reason := lacks()) is not None:
        pytest.skip(reason)


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the tests")
    return path


@pytest.fixture(scope="module")
def sides(model, secret):
    """(process of an engine, requests to one here, what asks for prompts of either); the last test kills the first."""
    ports = [free_ports(), free_ports()]
    options = {**OPTIONS, "bootstrap_port": ports[0]}
    there = Prefill(model, secret, **MOONCAKE, max_num_batched_tokens=32, options=options)
    try:
        with open_engine(model, secret, MOONCAKE, **OPTIONS, bootstrap_port=ports[1]) as engine:
            there.wait_ready()
            takes = [{"do_remote_prefill": True, "remote_bootstrap_addr": f"http://127.0.0.1:{port}"} for port in ports]
            yield there, Asked(engine), takes
    finally:
        there.close()


def test_tokens_equal_those_of_one_engine(sides):
    there, here, (takes, _) = sides
    for number, prompt in enumerate(prompts()):
        params = there.prefill(prompt)
        assert (params is None) == (CACHED[number] == 0)
        here.add(f"d{number}", prompt, {**takes, **(params or {})})
        tokens = here.finish(f"d{number}")
        assert here.num_cached(f"d{number}") == CACHED[number]
        assert tokens == here.alone(prompt)
    assert here.counter("failed_blocks", "mooncake") == 0
    assert there.usage() == here.rest() == 0


def test_both_may_be_asked_at_once(sides):
    there, here, (takes, _) = sides
    prompt = prompts(20)[0]
    asked = threading.Thread(target=there.prefill, args=(prompt,), kwargs={"transfer_id": "xfer-1"})
    asked.start()
    here.add("both", prompt, {**takes, "transfer_id": "xfer-1"})
    assert here.finish("both") == here.alone(prompt)
    asked.join()
    assert here.num_cached("both") == CACHED[0]
    assert there.usage() == here.rest() == 0


def test_a_decode_engine_that_dies_while_it_is_written_to_costs_nothing_else(sides, monkeypatch):
    there, here, (_, takes) = sides
    send = mooncake_engine.MooncakeCarrier.send

    def die(*arguments):
        there.process.send_signal(signal.SIGKILL)
        there.process.wait()
        return send(*arguments)

    here.add("p", prompts(40)[0], {"do_remote_decode": True}, 1)
    here.finish("p")
    assert here.engine.scheduler.has_transfers()
    monkeypatch.setattr(mooncake_engine.MooncakeCarrier, "send", die)
    asked = threading.Thread(target=lambda: _asked(there, prompts(40)[0], takes))
    asked.start()
    assert here.rest() == 0
    asked.join()
    assert there.process.wait() == -signal.SIGKILL
    here.add("after", prompts(41)[0], None)
    assert here.finish("after") == here.alone(prompts(41)[0])
    latest = time.monotonic() + 60
    while not here.counter("unsent_prompts", "mooncake"):  # an idle engine hears of it in a later step
        assert time.monotonic() < latest
        here.add(f"later {time.monotonic()}", prompts(42)[3])
        here.rest()
    assert here.counter("unsent_prompts", "mooncake") == 1


def _asked(there, prompt, params):
    with pytest.raises(AssertionError, match="the prefill engine ended"):
        there.ask(id="d", prompt=prompt, params=params, count=4)
