"""Engines in two processes, with real models: one computes prompts and sends their blocks, the other decodes."""

from __future__ import annotations

import signal
import threading

import pytest

from frame.plugins.connectors.push import (
    carrier as push_carrier,
    decode_side,
    lane as push_lane,
    worker as push_worker,
)
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.mapped_files import FileSharing
from tests.connectors.nixl_prompts import BLOCK_SIZE, Asked, Prefill, open_engine
from tests.free_ports import free_ports

SIZES = (90, 17, 64, 5)
PUSH = {"kv_connector": "push"}


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.fixture(scope="module", params=["llama", "gemma2", pytest.param("qwen3-next", marks=pytest.mark.matrix)])
def model(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the tests")
    return path


class Sides:
    """The process of a prefill engine, which computes prompts in chunks, and requests to a decode engine."""

    def __init__(self, there, engine, port, keeps_states):
        self.there, self.engine, self.here, self.port = there, engine, Asked(engine), port
        self._grain = BLOCK_SIZE if keeps_states else 1  # states are those of whole blocks

    def travel(self, prompt):
        """How many tokens of it are not computed."""
        return (len(prompt) - 1) // self._grain * self._grain if len(prompt) > BLOCK_SIZE else 0

    def prefill(self, prompt):
        return self.there.prefill(prompt, remote_host="127.0.0.1", remote_port=self.port)

    def check(self, name, prompt, params=None):
        """The prompt travels, and the output is that of one engine."""
        self.here.add(name, prompt, params or self.prefill(prompt))
        tokens = self.here.finish(name)
        assert self.here.num_cached(name) == self.travel(prompt)
        assert tokens == self.here.alone(prompt)


@pytest.fixture(scope="module")
def sides(model, secret):
    """One test may kill the process of the prefill engine, the last."""
    port = free_ports()
    there = Prefill(model, secret, **PUSH, max_num_batched_tokens=32, options={"retry_seconds": 0})
    patch = pytest.MonkeyPatch()
    patch.setattr(decode_side, "ANSWERED_SECONDS", 20)
    try:
        with open_engine(model, secret, PUSH, port=port, wait_seconds=20) as engine:
            there.wait_ready()
            yield Sides(there, engine, port, model.name == "qwen3-next")
    finally:
        patch.undo()
        there.close()


@pytest.mark.some(1)
def test_tokens_equal_those_of_one_engine(sides):
    for number, prompt in enumerate(prompts()):
        sides.check(f"d{number}", prompt)
    sides.check("longer", prompts()[0] + [9] * 20)
    assert sides.here.counter("failed_blocks", "push") == 0
    assert sides.there.usage() == sides.here.rest() == 0


def test_who_decodes_may_be_asked_first(sides):
    prompt = prompts(20)[0]
    sides.here.add("first", prompt, {"do_remote_prefill": True})
    for _ in range(5):
        sides.here.step()
    asked = threading.Thread(target=sides.prefill, args=(prompt,))
    asked.start()
    assert sides.here.finish("first") == sides.here.alone(prompt)
    asked.join()
    assert sides.here.num_cached("first") == sides.travel(prompt)
    assert sides.there.usage() == sides.here.rest() == 0


def test_many_at_once(sides):
    given = [prompt for shift in range(30, 33) for prompt in prompts(shift)]
    for number, prompt in enumerate(given):
        sides.here.add(f"m{number}", prompt, sides.prefill(prompt))
        sides.here.step()
    found = [sides.here.finish(f"m{number}") for number in range(len(given))]
    assert found == [sides.here.alone(prompt) for prompt in given]
    assert [sides.here.num_cached(f"m{number}") for number in range(len(given))] == list(map(sides.travel, given))
    assert sides.there.usage() == sides.here.rest() == 0


def test_after_sleep_blocks_lie_elsewhere(sides):
    sides.there.ask(call="sleep")
    sides.there.ask(call="wake_up")
    sides.check("s0", prompts(40)[0])
    sides.here.rest()
    sides.engine.call("sleep", {})
    sides.engine.call("wake_up", {})
    sides.check("s1", prompts(41)[0])
    assert sides.there.usage() == sides.here.rest() == 0


def test_a_prefill_engine_that_dies_costs_the_computation(sides):
    """It dies after its answer, before or while the blocks come."""
    sides.check("k0", prompts(60)[0])
    second = prompts(61)[0]
    sides.here.add("k1", second, {"do_remote_prefill": True})
    sides.here.step()
    sides.prefill(second)
    sides.there.process.send_signal(signal.SIGKILL)
    sides.there.process.wait()
    assert sides.here.finish("k1") == sides.here.alone(second)
    assert sides.here.rest() == 0


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["sent", "written"])
def test_two_workers_on_each_side(secret, tmp_path, monkeypatch, direct):
    """Which send blocks to the other side's, or write them to its devices, for which files stand in."""
    if direct:
        monkeypatch.setattr(push_worker, "sharing_of", lambda device: FileSharing(tmp_path))
        monkeypatch.setattr(push_carrier, "send_bytes", lambda *given: pytest.fail("blocks went over the connection"))
    model = make_checkpoint(tmp_path, "llama")
    settings = {**PUSH, "tensor_parallel_size": 2, "executor": "threads"}
    port = free_ports()
    with open_engine(model, secret, settings, port=port) as engine, open_engine(model, secret, settings) as other:
        here, there = Asked(engine), Asked(other)
        there.add("p", prompts()[0], {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}, 1)
        there.finish("p")
        params = there.outputs["p"][-1].kv_transfer
        assert params["tp_size"] == 2
        there.rest()
        here.add("d", prompts()[0], params)
        tokens = here.finish("d")
        assert here.num_cached("d") == SIZES[0] - 1
        assert tokens == here.alone(prompts()[0])
        assert there.rest() == here.rest() == 0


def test_a_step_never_waits_for_the_other_engine(secret, tmp_path, monkeypatch):
    """Who takes the blocks says nothing until all prompts are computed; the transfers alone are lost."""
    computed, begun = threading.Event(), threading.Event()

    def connect(place, secret, meet, seconds):
        begun.set()
        assert computed.wait(60)
        raise push_lane.PeerError("nobody is there")

    monkeypatch.setattr(push_lane, "connect", connect)
    with open_engine(make_checkpoint(tmp_path, "llama"), secret, PUSH) as engine:
        asked = Asked(engine)
        place = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": 9}
        for number, prompt in enumerate(prompts()):
            asked.add(f"p{number}", prompt, place, 1)
        for number in range(len(SIZES)):
            asked.finish(f"p{number}")
        assert begun.wait(60)
        assert asked.rest() == 0  # what is sent lies in memory of its own, so nobody waits for that either
        computed.set()
