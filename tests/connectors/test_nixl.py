"""Two engines that exchange blocks through real NIXL agents: what travels, who may read, and that nothing is lost."""

from __future__ import annotations

import random
import re
import threading
import time

import pytest
from msgspec import structs

from frame.core.engine import engine as engine_module, lifecycle as lifecycle_module
from frame.interfaces import Mark, decode, encode
from frame.plugins.connectors.blocks.wire import PeerError
from frame.plugins.connectors.nixl import (
    agent as nixl_agent,
    holds as nixl_holds,
    links as nixl_links,
    listener as nixl_listener,
    pulls as nixl_pulls,
)
from frame.plugins.connectors.nixl.messages import WorkerFacts
from frame.testing import ConnectorSuite
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.nixl_pairs import NEVER, SECONDS, Pairs, counter, travelling
from tests.free_ports import free_ports

pytest.importorskip("nixl")


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


SHAPES = ConnectorSuite.layouts


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_all_but_the_last_token_of_prompts_travel(pairs, shape):
    layout = make_layout(**{"num_blocks": 128, **shape})
    there, here = pairs.engine(layout), pairs.engine(layout)
    for number, length in enumerate((22, 40, 17, 33, 3)):
        prompt = pairs.prompt(length, seed=number)
        params = pairs.prefill(there, f"p{number}", prompt)
        travel = travelling(length, layout)
        assert (params is None) == (travel == 0)
        assert pairs.decode(here, f"d{number}", prompt, params) == travel
    pairs.rest(there, here)


def test_what_the_proxy_gets_is_what_proxies_know(pairs):
    there = pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(22))
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert [len(group) for group in params["remote_block_ids"]] == [6]
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("engine-under-test", "p")
    assert (params["remote_host"], params["tp_size"]) == ("127.0.0.1", 1)
    assert 0 < params["remote_port"] < 65536


def test_only_missing_blocks_travel(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    here.run(request("before", prompt[:17]))
    params = pairs.prefill(there, "p", prompt)
    assert pairs.decode(here, "d", prompt, params) == 39
    assert counter(here, "loaded_blocks") == 6
    pairs.rest(there, here)


def test_an_engine_that_waits_hears_at_once_what_came(pairs, monkeypatch):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "IDLE_SECONDS", 60)
        assert pairs.decode(here, "d", prompt, params) == 39
    pairs.rest(there, here)


def test_a_full_local_hit_frees_the_prefill_side(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    here.run(request("before", prompt))
    params = pairs.prefill(there, "p", prompt)
    assert pairs.decode(here, "d", prompt, params) == 36
    assert counter(here, "loaded_blocks") == 0
    pairs.rest(there, here)


def test_aborted_before_it_was_admitted_frees_the_prefill_side(pairs):
    there, here = pairs.engine(), pairs.engine(max_num_seqs=1)
    prompt = pairs.prompt(40)
    pairs.add(here, "runs", pairs.prompt(20, seed=5), None, 60)
    for _ in range(3):
        here.step()
    params = pairs.prefill(there, "p", prompt)
    pairs.add(here, "d", prompt, params)
    here.step()
    here.engine.abort(["d"])
    pairs.until(lambda: not there.busy, there, here)
    assert there.engine.stats().kv_usage == 0


def test_one_that_may_not_use_cached_blocks_frees_the_prefill_side(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    one = request("d", prompt, 4, prompt_logprobs=1)
    one.kv_transfer = params
    here.add(one)
    pairs.finish(here, "d")
    assert here.num_cached("d") == 0
    pairs.rest(there, here)


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_aborts_at_any_time_give_everything_back(pairs, steps):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    pairs.add(here, "d", prompt, params)
    pairs.add(here, "stays", pairs.prompt(30, seed=4), None)
    for _ in range(steps):
        here.step()
        time.sleep(0.002)
    here.engine.abort(["d"])
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check("stays")
    assert there.engine.stats().kv_usage == here.engine.stats().kv_usage == 0


def test_an_end_other_than_stop_and_length_keeps_nothing(pairs):
    there = pairs.engine(broken_steps=[0])
    assert pairs.prefill(there, "p", pairs.prompt(40)) is None
    assert there.outputs["p"][-1].finish_reason == "error"
    pairs.add(there, "goes", pairs.prompt(40), {"do_remote_decode": True}, 30)
    for _ in range(4):
        there.step()
    there.engine.abort(["goes"])
    pairs.until(lambda: not there.busy, there)
    assert there.engine.stats().kv_usage == 0


@pytest.mark.matrix
def test_expiry_frees_and_what_comes_later_is_computed(pairs):
    there, here = pairs.engine(options={"lease_seconds": 3}), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    assert there.busy
    pairs.rest(there)
    assert pairs.decode(here, "d", prompt, params) == 0
    pairs.rest(here)


def test_two_requests_with_the_same_parameters_read_once(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    for name in ("0_d", "1_d"):
        pairs.add(here, name, prompt, params)
    pairs.until(lambda: not here.busy, here)
    assert [here.num_cached(name) for name in ("0_d", "1_d")] == [39, 36]
    assert counter(here, "loaded_blocks") == 10
    pairs.rest(there, here)


@pytest.mark.matrix
def test_more_than_the_share_is_not_kept(pairs, caplog):
    caplog.set_level("INFO", "frame")
    there = pairs.engine(make_layout(num_blocks=31), options={"max_held_share": 0.5, "lease_seconds": 3})
    assert re.search(
        r"nixl connector: KV blocks may be read from 127.0.0.1:\d+; up to 15 of 30 are held for", caplog.text
    )
    assert "nixl connector: KV blocks are read from 127.0.0.1" in caplog.text
    assert pairs.prefill(there, "a", pairs.prompt(40)) is not None
    assert pairs.prefill(there, "b", pairs.prompt(40, seed=1)) is None
    assert "max_held_share" in caplog.text
    there.step()
    assert there.engine.stats().connector_gauges["nixl_held_blocks"] == 10
    pairs.rest(there)
    assert there.engine.stats().connector_gauges["nixl_held_blocks"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_request_id": "another"}, ""),
        ({"remote_engine_id": "another"}, ""),
        # not the address of this engine, nor among its peers
        ({"remote_host": "localhost"}, "remote_host 'localhost' is none of the hosts of --plugin.nixl.peers (none are"),
        ({"remote_port": 1}, ""),
        (
            {"remote_port": True},
            "kv_transfer_params: remote_port must be a port from 1 to 65535, got True; such prompts",
        ),
        ({"remote_port": "12x"}, "remote_port must be a port from 1 to 65535, got '12x'"),
        ({"remote_host": None}, "kv_transfer_params: remote_host is missing; such prompts are computed here"),
        ({"remote_engine_id": 5}, "kv_transfer_params: remote_engine_id must be a text of 1 to 512 characters, got 5"),
    ],
)
def test_parameters_that_are_not_right_cost_the_computation(pairs, caplog, changes, said):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt)
    assert pairs.decode(here, "d", prompt, {**params, **changes}) == 0
    assert said in caplog.text
    assert pairs.decode(here, "e", pairs.prompt(40), params) == 36
    pairs.until(lambda: not there.busy, there)
    here.check()


def test_other_block_ids_in_the_parameters_change_nothing(pairs):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    other = {**params, "remote_block_ids": [[3, 2, 1, 9, 9, 9, 9, 9, 9]], "num_blocks": -4}
    assert pairs.decode(here, "d", pairs.prompt(40), other) == 39
    pairs.rest(there, here)


def test_another_tenants_blocks_are_not_given(pairs, monkeypatch):
    """Neither to other tokens nor to equal tokens of another salt: nothing is read, and the owner can still read."""
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, "p", prompt, salt="one")
    read = []
    monkeypatch.setattr(nixl_agent.Agent, "read", lambda self, one: read.append(one))
    assert pairs.decode(here, "thief", prompt, params, salt="two") == 0
    assert pairs.decode(here, "guess", [*prompt[:20], 1 - prompt[20] % 2, *prompt[21:]], params, salt="one") == 0
    assert not read
    monkeypatch.undo()
    assert pairs.decode(here, "d", prompt, params, salt="one") == 39
    pairs.until(lambda: not there.busy, there)


def test_another_model_is_refused_without_decoding(pairs, monkeypatch, caplog):
    """The engine that differs is told nothing of the other one's memory, and gives NIXL nothing to parse."""
    there, here = pairs.engine(), pairs.engine(make_layout(model="other"))
    params = pairs.prefill(there, "p", pairs.prompt(40))
    monkeypatch.setattr(nixl_agent.Agent, "_meet", None)
    asked = []
    ask = nixl_pulls.Pulls._ask
    monkeypatch.setattr(nixl_pulls.Pulls, "_ask", lambda self, pull: asked.append(ask(self, pull)))
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    assert asked == [None]
    assert "differ in the model (a hash of config.json, weights and dtype): test at the prefill engine, other at" in (
        caplog.text
    )
    assert there.busy
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ({"block_size": 6}, "the block size, and neither is a multiple of the other: 4 at the prefill engine, 6 at"),
        ({"layers": 3}, "the number of layers that keep tokens: 2 at the prefill engine, 3 at the decode engine"),
        ({"windows": (6,)}, "how long tokens are kept, of layer group0.layer0: all 0 at the prefill engine, window 5"),
    ],
    ids=["block", "layers", "window"],
)
def test_engines_that_do_not_fit_say_why(pairs, shape, what, caplog):
    there, here = pairs.engine(), pairs.engine(make_layout(**shape))
    params = pairs.prefill(there, "p", pairs.prompt(40))
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    here.check()
    assert f"differ in {what}" in caplog.text


def test_another_secret_is_refused(pairs, tmp_path, caplog):
    (tmp_path / "other").write_text("quite another secret")
    there, here = pairs.engine(), pairs.engine(options={"secret_file": str(tmp_path / "other")})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    assert "did not accept the secret" in caplog.text


def test_without_a_secret_nothing_is_exchanged_and_the_start_says_so(pairs, caplog):
    there, here = pairs.engine(), pairs.engine(options={"secret_file": None})
    assert "no secret_file" in caplog.text
    assert pairs.prefill(here, "p", pairs.prompt(40)) is None
    params = pairs.prefill(there, "p", pairs.prompt(40, seed=1))
    assert pairs.decode(here, "d", pairs.prompt(40, seed=1), params) == 0


def test_what_arrives_too_late_counts_as_failed_and_is_computed(pairs, monkeypatch):
    """The lease ended while the read went on: what came may be of another request by now."""
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    begin = nixl_agent.Agent._begin

    def late(self, read):
        read.deadline = time.monotonic() + nixl_agent.MARGIN_SECONDS - 0.001  # it has begun, and ends after this
        return begin(self, read)

    monkeypatch.setattr(nixl_agent.Agent, "_begin", late)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 10


def test_a_read_waits_until_launched_steps_have_left_the_blocks(pairs, monkeypatch):
    class HeldMark(Mark):
        passed = False

        def done(self):
            return HeldMark.passed

    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    monkeypatch.setattr(here.workers.made[0].transfer.inner._queue, "mark", HeldMark)
    begun, begin = [], nixl_agent.Agent._begin
    monkeypatch.setattr(nixl_agent.Agent, "_begin", lambda self, read: begun.append(read) or begin(self, read))
    pairs.add(here, "d", pairs.prompt(40), params)
    latest = time.monotonic() + 0.5
    while time.monotonic() < latest:
        here.step()
        time.sleep(0.002)
    assert here.engine.scheduler.lifecycle.loading
    assert not begun
    HeldMark.passed = True
    pairs.rest(there, here)
    assert (here.num_cached("d"), len(begun)) == (39, 1)


def test_a_device_that_fails_before_a_read_costs_one_computation(pairs, monkeypatch):
    class BrokenMark(Mark):
        def done(self):
            raise RuntimeError("an illegal memory access")

    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    again = pairs.prefill(there, "q", pairs.prompt(80))
    with monkeypatch.context() as once:
        once.setattr(here.workers.made[0].transfer.inner._queue, "mark", BrokenMark)
        pairs.decode(here, "d", pairs.prompt(40), params)
    assert counter(here, "failed_blocks") == 10
    pairs.decode(here, "e", pairs.prompt(80), again)  # the thread that reads is still there
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 10
    assert counter(here, "loaded_blocks") > 0


@pytest.mark.parametrize("blocks", [[10**6], [64], [-3], [2**40], [0], [1, 2]], ids=str)
def test_block_ids_that_the_other_engine_cannot_have_are_not_read(pairs, monkeypatch, blocks):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(8 + 1))
    lease = nixl_holds.Holds.lease

    def wrong(self, *arguments):
        ticket, right, seconds = lease(self, *arguments)
        return ticket, [[right[0][0], *blocks]], seconds

    monkeypatch.setattr(nixl_holds.Holds, "lease", wrong)
    monkeypatch.setattr(nixl_agent.Agent, "_begin", None)
    pairs.decode(here, "d", pairs.prompt(9), params)
    pairs.rest(there, here)
    assert counter(here, "loaded_blocks") == 0


def test_data_ranks_have_ports_of_their_own(pairs):
    there = pairs.engine()
    pairs.options["port"] = port = free_ports(4)
    side = pairs.make(config=pairs.config(kv_connector="nixl"), layout=make_layout(), data_rank=3)
    side.connect({0: there.workers.made[0].transfer.handshake()})
    assert side._listener.port == port + 3
    side.close()


@pytest.mark.matrix
def test_reads_that_take_long_renew_their_lease(pairs, monkeypatch):
    """A read of 5 s under leases of 3 s: it arrives in time, and the other side has kept the blocks."""
    for module in (nixl_agent, nixl_pulls):
        monkeypatch.setattr(module, "MARGIN_SECONDS", 0.1)  # so that a renewal has time on a busy machine
    there, here = pairs.engine(options={"lease_seconds": 3}), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    begin, until = nixl_agent.Agent._begin, time.monotonic() + 5
    monkeypatch.setattr(
        nixl_agent.Agent, "_begin", lambda self, read: begin(self, read) if time.monotonic() > until else None
    )
    pairs.add(here, "d", pairs.prompt(40), params)
    pairs.rest(there, here)
    assert time.monotonic() > until
    assert (counter(here, "loaded_blocks"), counter(here, "failed_blocks")) == (10, 0)


@pytest.mark.parametrize("when", ["asked", "renewed"])
def test_threads_that_cannot_be_started_cost_one_computation(pairs, monkeypatch, when):
    """The prefill engine is not asked, or the lease is not renewed and ends; later prompts travel again."""
    there, here = pairs.engine(options={"lease_seconds": 3}), pairs.engine()
    pulls = here.connector.inner._pulls
    params = pairs.prefill(there, "p", pairs.prompt(40))
    refused = []

    def refuse(*work):
        refused.append(work)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(nixl_agent.Agent, "_begin", lambda agent, read: None)
        if when == "renewed":
            pairs.add(here, "d", pairs.prompt(40), params)
            pairs.until(lambda: pulls._loading, here)
        patch.setattr(pulls._askers, "submit", refuse)
        if when == "asked":
            pairs.add(here, "d", pairs.prompt(40), params)
        pairs.finish(here, "d")
    assert refused
    assert here.num_cached("d") == 0
    later = pairs.prefill(there, "later", pairs.prompt(40, seed=1))
    assert pairs.decode(here, "e", pairs.prompt(40, seed=1), later) == 39
    pairs.rest(there, here)


def test_an_engine_that_is_gone_costs_the_computation(pairs):
    there, here = pairs.engine(), pairs.engine(options={"retry_seconds": 0})
    first = pairs.prefill(there, "p", pairs.prompt(40))
    assert pairs.decode(here, "d", pairs.prompt(40), first) == 39
    second = pairs.prefill(there, "q", pairs.prompt(40, seed=1))
    there.close()
    pairs.made.remove(there)
    assert pairs.decode(here, "e", pairs.prompt(40, seed=1), second) == 0
    pairs.rest(here)


def test_a_load_fails_where_the_agent_is_gone(pairs, monkeypatch):
    """The lease is granted, and then the memory goes away: a read that fails is computed, and frees the other side."""
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    worker = there.workers.made[0].transfer.inner
    worker._agent.close()
    worker._agent = None
    pairs.add(here, "d", pairs.prompt(40), params)
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check()
    assert counter(here, "failed_blocks") == 10


def slow_reads(engine, monkeypatch, state, rank=0):
    """NIXL says that reads of a rank go on, and then what `state` does."""
    nixl = engine.workers.made[rank].transfer.inner._agent._nixl
    transfer = nixl.transfer
    monkeypatch.setattr(nixl, "transfer", lambda handle: transfer(handle) and "PROC")
    monkeypatch.setattr(nixl, "check_xfer_state", state)
    return nixl


@pytest.mark.parametrize("ends", ["raises", "ERR"])
def test_a_read_that_breaks_off_is_computed(pairs, monkeypatch, ends):
    def state(handle):
        if ends == "raises":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return ends

    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    slow_reads(here, monkeypatch, state)
    pairs.decode(here, "d", pairs.prompt(40), params)
    pairs.rest(there, here)
    assert (counter(here, "loaded_blocks"), counter(here, "failed_blocks")) == (0, 10)


def test_a_read_that_failed_ends_when_nixl_lets_go_of_it(pairs, monkeypatch):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    tried, nixl = [], slow_reads(here, monkeypatch, lambda handle: "ERR")
    release = nixl.release_xfer_handle

    def refuse(handle):
        tried.append(handle)
        if len(tried) < 50:
            raise RuntimeError("it is active")
        release(handle)

    monkeypatch.setattr(nixl, "release_xfer_handle", refuse)
    pairs.decode(here, "d", pairs.prompt(40), params)
    pairs.rest(there, here)
    assert (len(tried), counter(here, "failed_blocks")) == (50, 10)


@pytest.mark.parametrize("why", ["lease", "stall"])
@pytest.mark.parametrize("then", ["DONE", "ERR"])
def test_nobody_waits_for_a_read_that_does_not_end_and_its_blocks_stay_out_of_use(pairs, monkeypatch, why, then):
    """NIXL may write to them until it says that the read is over: the request is computed in others."""
    options = {"stall_seconds": 0.05} if why == "stall" else {}
    there, here = pairs.engine(), pairs.engine(options=options)
    params = pairs.prefill(there, "p", pairs.prompt(40))
    states, lifecycle = ["PROC"], here.engine.scheduler.lifecycle

    def state(handle):
        if why == "lease":
            monkeypatch.setattr(nixl_agent, "MARGIN_SECONDS", 2 * NEVER)  # now that it has begun
        return states[-1]

    released, nixl = [], slow_reads(here, monkeypatch, state)
    monkeypatch.setattr(nixl, "release_xfer_handle", released.append)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    pairs.until(lambda: not there.busy, there)  # it has the word that nobody needs them
    assert (released, list(lifecycle.abandoned)) == ([], ["d"])
    blocks = [block for table in lifecycle.abandoned["d"].cache.blocks for block in table]
    assert here.engine.stats().kv_usage == len(blocks) / (here.engine.stats().num_blocks - 1)
    states.append(then)
    pairs.rest(there, here)
    assert len(released) == 1
    assert (counter(here, "loaded_blocks"), counter(here, "failed_blocks")) == (0, 10)


def test_a_worker_keeps_its_memory_while_a_read_may_write_to_it(pairs, monkeypatch):
    monkeypatch.setattr(nixl_agent, "_CLOSE_SECONDS", 0.05)
    there, here = pairs.engine(), pairs.engine(options={"stall_seconds": 0.05})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    states, worker = ["PROC"], here.workers.made[0].transfer
    slow_reads(here, monkeypatch, lambda handle: states[-1])
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    with pytest.raises(
        RuntimeError, match=r"a read from \S+ has gone on for \d+ s and may still write to the KV cache"
    ):
        worker.register({})
    assert list(worker.pending_loads()) == ["d"]
    states.append("DONE")
    worker.register({})
    assert not list(worker.pending_loads())


def test_a_worker_keeps_its_memory_if_it_cannot_go_and_goes_on_reading(pairs, monkeypatch):
    """The cache is given to it again as it was, and later prompts travel."""
    monkeypatch.setattr(engine_module, "TRANSFER_SECONDS", 0.05)
    monkeypatch.setattr(nixl_agent, "_CLOSE_SECONDS", 0.05)
    there, here = pairs.engine(), pairs.engine(options={"stall_seconds": 0.05})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    with monkeypatch.context() as patch:
        stuck = slow_reads(here, patch, lambda handle: "PROC")
        assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
        assert len(here.engine.scheduler.lifecycle.abandoned) == 1
        with pytest.raises(RuntimeError, match="may still write to the KV cache: try again later"):
            here.engine.call("sleep")
    assert here.workers.made[0].transfer.inner._agent._nixl is stuck
    later = pairs.prefill(there, "later", pairs.prompt(44, seed=1))
    assert pairs.decode(here, "e", pairs.prompt(44, seed=1), later) == 43
    pairs.rest(there, here)


def test_silent_ports_leave_other_hosts_their_threads(pairs, monkeypatch):
    """Requests may name any port of a host that is allowed; each held a thread for `lookup_seconds`."""
    there, here = pairs.engine(), pairs.engine(options={"peers": ["127.0.0.1", "127.0.0.2"]})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    over, asked, ask = threading.Event(), threading.Semaphore(0), nixl_links.Link.ask

    def silent(link, question, kind):
        if link._source.host == "127.0.0.2":
            asked.release()
            assert over.wait(SECONDS)
            raise PeerError("no answer in time")
        return ask(link, question, kind)

    monkeypatch.setattr(nixl_links.Link, "ask", silent)
    try:
        for port in range(1, 20):
            lost = {**params, "remote_host": "127.0.0.2", "remote_port": port}
            pairs.add(here, f"lost {port}", pairs.prompt(40, seed=port), lost)
        pairs.until(lambda: asked.acquire(blocking=False), here)
        assert pairs.decode(here, "d", pairs.prompt(40), params) == 39
    finally:
        over.set()
    pairs.rest(there, here)


def two_ranks_that_read(pairs, monkeypatch):
    """A decode engine of two ranks with a read that nobody waits for any more; `states` is what NIXL says, by rank.

    That of the first rank ends when it is to end.
    """
    monkeypatch.setattr(engine_module, "TRANSFER_SECONDS", 0.05)
    monkeypatch.setattr(nixl_agent, "_CLOSE_SECONDS", 2)
    layout = make_layout(256, ranks=2)
    there, here = pairs.engine(layout, ranks=2), pairs.engine(layout, ranks=2, options={"stall_seconds": 0.05})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    agents = [worker.transfer.inner._agent for worker in here.workers.made]
    states = ["PROC", "PROC"]
    for rank in range(2):
        slow_reads(here, monkeypatch, lambda handle, rank=rank: states[rank], rank)
    begin_none = agents[0].end_reads

    def end_reads():
        states[0] = "DONE"
        return begin_none()

    monkeypatch.setattr(agents[0], "end_reads", end_reads)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    assert list(here.engine.scheduler.lifecycle.abandoned) == ["d"]
    return there, here, agents, states


def test_where_one_rank_refuses_to_sleep_no_other_lets_go(pairs, monkeypatch):
    """Else nobody would hear how reads of the others end, and the blocks would be nobody's for ten minutes."""
    there, here, agents, states = two_ranks_that_read(pairs, monkeypatch)
    monkeypatch.setattr(nixl_agent, "_CLOSE_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="may still write to the KV cache: try again later"):
        here.engine.call("sleep")
    assert not here.engine.call("is_sleeping")
    assert [worker.transfer.inner._agent for worker in here.workers.made] == agents
    assert list(here.engine.scheduler.lifecycle.abandoned) == ["d"]
    states[1] = "DONE"
    pairs.rest(there, here)
    assert here.engine.stats().kv_usage == 0
    monkeypatch.undo()  # reads are as quick as they are
    later = pairs.prefill(there, "later", pairs.prompt(44, seed=1))
    for agent in agents:
        agent._stall_seconds = NEVER
    assert pairs.decode(here, "e", pairs.prompt(44, seed=1), later) == 43
    pairs.rest(there, here)
    here.engine.call("sleep")
    here.engine.call("wake_up")


def test_blocks_come_back_after_a_sleep_that_failed_once_all_reads_have_ended(pairs, monkeypatch):
    there, here, agents, states = two_ranks_that_read(pairs, monkeypatch)
    begin_none, second = agents[1].end_reads, here.workers.made[1]

    def end_reads():
        states[1] = "DONE"
        return begin_none()

    def keeps():
        raise RuntimeError("its memory cannot go")

    monkeypatch.setattr(agents[1], "end_reads", end_reads)
    with monkeypatch.context() as patch:
        patch.setattr(second.memory, "lose", keeps)
        with pytest.raises(RuntimeError, match="its memory cannot go"):
            here.engine.call("sleep")
    assert not here.engine.call("is_sleeping")
    assert not here.engine.scheduler.lifecycle.abandoned
    assert here.engine.stats().kv_usage == 0
    pairs.rest(there, here)


def test_blocks_of_a_read_that_goes_on_stay_out_of_use_however_long_it_takes(pairs, monkeypatch):
    monkeypatch.setattr(lifecycle_module, "ABANDONED_SECONDS", 0.05)
    there, here = pairs.engine(), pairs.engine(options={"stall_seconds": 0.05})
    params = pairs.prefill(there, "p", pairs.prompt(40))
    states, lifecycle = ["PROC"], here.engine.scheduler.lifecycle
    slow_reads(here, monkeypatch, lambda handle: states[-1])
    pairs.decode(here, "d", pairs.prompt(40), params)
    for number in range(3):
        time.sleep(0.06)
        pairs.add(here, f"more {number}", pairs.prompt(9, seed=number), None)
        pairs.finish(here, f"more {number}")
        assert list(lifecycle.abandoned) == ["d"]
    states.append("DONE")
    pairs.rest(there, here)
    assert here.engine.stats().kv_usage == 0


def test_the_end_of_an_old_read_is_not_taken_for_that_of_a_later_one_with_its_id(pairs, monkeypatch):
    there, here = pairs.engine(), pairs.engine(options={"stall_seconds": 0.05})
    first, second = (pairs.prefill(there, name, pairs.prompt(40, seed=seed)) for seed, name in enumerate("pq"))
    handles, states = [], {}

    def state(handle):
        if handle not in handles:
            handles.append(handle)
        return states.get(handles.index(handle), "PROC")

    slow_reads(here, monkeypatch, state)
    pairs.decode(here, "d", pairs.prompt(40), first)
    lifecycle, agent = here.engine.scheduler.lifecycle, here.workers.made[0].transfer.inner._agent
    lifecycle.give_up_abandoned()  # as after ten minutes without a word
    agent._stall_seconds = NEVER
    here.outputs["d"].clear()
    here.connector.ended.clear()
    pairs.add(here, "d", pairs.prompt(40, seed=1), second)
    pairs.until(lambda: len(handles) == 2, here)
    states[0] = "DONE"
    pairs.until(lambda: len(agent._reads) == 1, here)
    for _ in range(20):
        here.step()
    assert list(lifecycle.loading) == ["d"], "the load of the later request has not ended"
    states[1] = "DONE"
    pairs.finish(here, "d")
    assert here.num_cached("d") == 39
    pairs.rest(there, here)


@pytest.mark.parametrize("ended", ["fails", "aborted"])
def test_a_request_that_ends_with_its_load_leaves_the_blocks_to_the_read(pairs, monkeypatch, ended):
    policy = {"kv_load_failure_policy": "fail"} if ended == "fails" else {}
    there, here = pairs.engine(), pairs.engine(options={"stall_seconds": 0.05}, **policy)
    params = pairs.prefill(there, "p", pairs.prompt(40))
    states, lifecycle = ["PROC"], here.engine.scheduler.lifecycle
    slow_reads(here, monkeypatch, lambda handle: states[-1])
    pairs.add(here, "d", pairs.prompt(40), params)
    pairs.until(lambda: lifecycle.loading, here)
    if ended == "aborted":
        here.engine.abort(["d"])
    pairs.until(lambda: lifecycle.abandoned and not here.busy, here)
    assert here.engine.stats().kv_usage > 0
    states.append("DONE")
    pairs.collect(here)
    pairs.until(lambda: not there.busy, there)
    assert here.engine.stats().kv_usage == 0
    assert here.outputs["d"][-1].finish_reason == ("error" if ended == "fails" else "abort")


def test_a_port_in_use_ends_the_start_with_a_sentence(pairs):
    there = pairs.engine()
    port = pairs.prefill(there, "p", pairs.prompt(40))["remote_port"]
    pairs.options["port"] = port
    side = pairs.scheduler_side(pairs.config(kv_connector="nixl"), make_layout())
    with pytest.raises(
        ValueError,
        match=rf"the nixl connector cannot listen on 127\.0\.0\.1:{port}: Address already in "
        r"use; choose another --kv-ip or --plugin\.nixl\.port$",
    ):
        side.connect({0: there.workers.made[0].transfer.handshake()})
    side.close()


def test_workers_on_another_machine_are_refused(pairs):
    there = pairs.engine()
    facts = decode(there.workers.made[0].transfer.handshake(), WorkerFacts)
    side = pairs.scheduler_side(pairs.config(kv_connector="nixl"), make_layout())
    with pytest.raises(ValueError, match="all on one machine"):
        side.connect({0: encode(structs.replace(facts, machine="another"))})
    side.close()


def test_roles(pairs):
    only_holds, only_reads = pairs.engine(kv_role="producer"), pairs.engine(kv_role="consumer")
    params = pairs.prefill(only_holds, "p", pairs.prompt(40))
    assert pairs.prefill(only_reads, "p", pairs.prompt(40)) is None
    assert pairs.decode(only_holds, "d", pairs.prompt(40, seed=1), params) == 0
    assert pairs.decode(only_reads, "d", pairs.prompt(40), params) == 36
    pairs.rest(only_holds, only_reads)


def test_random_lives(pairs):
    """Prompts through two prefill engines and a small decode engine, with preemptions, aborts and broken steps."""
    draw = random.Random(3)
    layout = make_layout(num_blocks=120, windows=(0, 6))
    sources = [pairs.engine(layout, max_num_batched_tokens=size) for size in (7, 64)]
    here = pairs.engine(make_layout(num_blocks=44, windows=(0, 6)), broken_steps=[25], max_num_batched_tokens=16)
    gone = set()
    for number in range(40):
        prompt = pairs.prompt(draw.randrange(1, 44), seed=draw.randrange(4))
        source = draw.choice(sources)
        params = pairs.prefill(source, f"p{number}", prompt)
        pairs.add(here, f"d{number}", prompt, params, draw.randrange(1, 14))
        for _ in range(draw.randrange(6)):
            here.step()
        if draw.random() < 0.2:
            here.engine.abort([f"d{number}"])
            gone.add(f"d{number}")
    pairs.until(lambda: not any(one.busy for one in (*sources, here)), *sources, here)
    failed = {name for name, outputs in here.outputs.items() if outputs[-1].finish_reason == "error"}
    here.check(*(set(here.requests) - gone - failed))
    for source in sources:
        source.check()
    assert counter(here, "loaded_blocks") > 50


@pytest.mark.parametrize("until", ["granted", "reads", "released"])
def test_a_decode_engine_that_closes_gives_its_leases_back(pairs, monkeypatch, until):
    """Whether a request has its lease, its blocks are being read, or were to be given back: no lease need end."""
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    if until == "reads":
        monkeypatch.setattr(nixl_agent.Agent, "_begin", lambda agent, read: None)
    pulls = here.connector.inner._pulls
    pairs.add(here, "d", pairs.prompt(40), params)
    if until == "granted":
        match = nixl_pulls.Pulls.match
        monkeypatch.setattr(nixl_pulls.Pulls, "match", lambda *given: match(*given) and (None, False))
        pairs.until(lambda: any(pull.asked and pull.asked.done() for pull in pulls._pulls.values()), here)
    elif until == "reads":
        pairs.until(lambda: pulls._loading, here)
    else:
        here.step()
        here.engine.abort(["d"])
    here.close()
    pairs.until(lambda: not there.busy, there)


@pytest.mark.some(1)
def test_a_decode_engine_closes_in_time_where_the_other_side_says_nothing(pairs, monkeypatch):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, "p", pairs.prompt(40))
    pairs.add(here, "d", pairs.prompt(40), params)
    monkeypatch.setattr(nixl_agent.Agent, "_begin", lambda agent, read: None)
    pulls = here.connector.inner._pulls
    pairs.until(lambda: pulls._loading, here)
    answers = threading.Event()
    monkeypatch.setattr(nixl_listener.NixlListener, "_answer", lambda self, question: answers.wait(10 * SECONDS))
    start = time.monotonic()
    here.close()
    assert time.monotonic() - start < SECONDS
    answers.set()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("giving", [0, 1])
def test_engines_that_share_experts_read_of_one_another(pairs, giving, ranks):
    """The worker of the second is not the first one of the mesh, but of its engine."""
    experts = {"data_parallel_size": 2, "enable_expert_parallel": True}
    gives, takes = (pairs.engine(ranks=ranks, data_parallel_rank=rank, **experts) for rank in (giving, 1 - giving))
    params = pairs.prefill(gives, "p", pairs.prompt(40))
    assert pairs.decode(takes, "d", pairs.prompt(40), params) == 39
    pairs.rest(gives, takes)
