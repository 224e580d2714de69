"""The offload connector under frame's scheduler, over a fake worker whose cache says what each entry is of."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.setups import mesh_of
from frame.plugins.connectors.blocks import host_slab
from frame.plugins.connectors.blocks.messages import Move
from frame.plugins.connectors.offload.check import check_options
from frame.plugins.connectors.offload.loads import ComingLoads
from frame.plugins.connectors.offload.messages import OffloadStep
from frame.plugins.connectors.offload.options import OffloadOptions
from frame.plugins.connectors.offload.states import StateCopies
from frame.testing import ConnectorSuite
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_worker import BrokenStepError
from tests.connectors.late import LateStreams

#: Bytes of a row where a layout has one group of two layers and blocks of four tokens.
ROW = 2 * 4 * 64
LAYOUTS = {
    "full": {},
    "full and sliding": {"windows": (0, 6)},
    "unequal blocks": {"windows": (0, 6, 0), "strides": (2, 1, 4)},
    "states": {"windows": (0, 6), "strides": (1, 2), "states": 4, "checkpoints": 12},
    "states alone": {"windows": (), "states": 4, "checkpoints": 12},
}


class Suite(ConnectorSuite):
    """Engines with the connector, whose copies are late. Its tests are run elsewhere."""

    __test__ = False
    plugin = "offload"
    share, seed = 0.3, 0

    def worker_side(self, config, layout, rank=0):
        streams = LateStreams(self.share, self.seed + rank)
        placement = Placement(rank=rank, local_rank=rank, mesh=mesh_of(config))
        return self.make(config=config, part="worker", layout=layout, placement=placement, streams=streams)


def suite_of(folder, *, share=0.3, seed=0, **options):
    made = Suite()
    made.folder, made.share, made.seed = folder, share, seed
    made.options = {"size": 0.01, "disk_folder": "", **options}
    return made


def room(num_blocks, row=ROW):
    """The size, in GiB, of a tier that holds so many blocks."""
    return num_blocks * row / (1 << 30)


def worker_of(engine, rank=0):
    return engine.workers.made[rank].transfer.inner


def forget(engine):
    """Has the device's cache forget all prompts."""
    assert engine.engine.call("reset_prefix_cache", {})


@pytest.mark.some(6)
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("ranks", [1, 2])
def test_evicted_then_hit(tmp_path, shape, policy, ranks):
    suite = suite_of(tmp_path, policy=policy)
    engine = suite.engine(make_layout(200, ranks=ranks, **shape), ranks=ranks)
    prompts = [suite.prompt(length, seed=length) for length in (22, 40, 33)]
    engine.run(*(request(f"first-{index}", prompt) for index, prompt in enumerate(prompts)))
    forget(engine)
    engine.run(*(request(f"again-{index}", prompt) for index, prompt in enumerate(prompts)))
    engine.check()
    grain = engine.layout.grain
    for index, prompt in enumerate(prompts):
        assert engine.num_cached(f"first-{index}") == 0
        assert engine.num_cached(f"again-{index}") == (len(prompt) - 1) // grain * grain
    stats = engine.engine.stats()
    assert stats.connector_counters["offload_hit_tokens"] == sum(
        engine.num_cached(f"again-{index}") for index in range(3)
    )
    assert stats.connector_counters["offload_lookup_tokens"] == 2 * sum(
        len(prompt) // grain * grain for prompt in prompts
    )
    saved = sum(len(prompt) // grain for prompt in prompts)
    row = sum(worker_of(engine, rank).tokens.num_bytes for rank in range(ranks))
    states = stats.connector_counters.get("offload_saved_states", 0) * worker_of(engine).states.num_bytes
    assert bool(states) == ("states" in shape)
    assert stats.connector_counters["offload_save_bytes"] == saved * row + states
    assert stats.connector_gauges["offload_used_bytes"] == saved * row + states
    assert stats.connector_gauges["offload_size_bytes"] >= saved * row
    assert stats.connector_counters["offload_load_seconds"] > 0
    assert stats.connector_counters["offload_save_seconds"] > 0
    engine.close()


@pytest.mark.parametrize("shape", [LAYOUTS["states"], LAYOUTS["states alone"]], ids=["beside tokens", "alone"])
def test_a_state_that_cannot_be_loaded_is_computed(tmp_path, monkeypatch, shape):
    suite = suite_of(tmp_path)
    engine = suite.engine(make_layout(200, **shape))
    prompts = [suite.prompt(length, seed=length) for length in (22, 40, 33)]
    engine.run(*(request(f"first-{index}", prompt) for index, prompt in enumerate(prompts)))
    forget(engine)
    load, calls = StateCopies.load, []

    def fails(copies, move, row):
        calls.append(move.owner)
        if len(calls) != 2:
            raise RuntimeError("told to fail")
        load(copies, move, row)

    monkeypatch.setattr(StateCopies, "load", fails)
    engine.run(*(request(f"again-{index}", prompt) for index, prompt in enumerate(prompts)))
    engine.check()
    assert sorted(calls) == ["again-0", "again-1", "again-2"]
    counters = engine.engine.stats().connector_counters
    assert counters["offload_loaded_states"] == 1
    assert counters["offload_failed_blocks"] >= 2
    engine.close()


@pytest.mark.parametrize("seed", range(12))
def test_states_that_come_late_or_are_given_away_change_no_token(tmp_path, seed):
    """Few blocks for states, which are given away in the step in which they are copied."""
    draw = random.Random(seed)
    suite = suite_of(tmp_path, share=draw.choice([0.05, 0.1, 0.5]), seed=seed, size=room(draw.choice([8, 30, 200])))
    windows = draw.choice([(), (0,), (0, 6)])
    broken = {draw.randrange(5, 60) for _ in range(draw.randrange(3))}
    layout = make_layout(60, windows=windows, states=4, checkpoints=draw.choice([1, 2, 6]))
    engine = suite.engine(layout, broken, max_num_batched_tokens=draw.choice([5, 12, 64]))
    gone = set()
    for number in range(30):
        prompt = suite.prompt(draw.randrange(1, 40), seed=draw.randrange(3))
        engine.add(request(str(number), prompt, draw.randrange(1, 9), seed=draw.randrange(2)))
        for _ in range(draw.randrange(5)):
            engine.step()
        if draw.random() < 0.1:
            gone.add(str(number))
            engine.engine.abort([str(number)])
        if draw.random() < 0.2:
            engine.engine.call("reset_prefix_cache", {"reset_running_requests": draw.random() < 0.5})
    engine.run()
    failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
    engine.check(*(set(engine.requests) - gone - failed))
    assert engine.engine.stats().connector_counters["offload_saved_states"] > 0
    engine.close()


def test_a_device_that_holds_the_prompt_loads_nothing(tmp_path):
    suite = suite_of(tmp_path)
    engine = suite.engine()
    engine.run(request("first", suite.prompt(22)))
    engine.run(request("again", suite.prompt(22)), request("longer", suite.prompt(20) + suite.prompt(20, 5)))
    engine.check()
    assert engine.num_cached("again") == engine.num_cached("longer") == 20
    assert "offload_load_bytes" not in engine.engine.stats().connector_counters
    engine.close()


@pytest.mark.parametrize("block_size", [4, 8, 12])
def test_blocks_of_its_own_size(tmp_path, block_size):
    suite = suite_of(tmp_path, block_size=block_size)
    engine = suite.engine(max_num_batched_tokens=10)
    engine.run(request("first", suite.prompt(38)), request("second", suite.prompt(17, seed=1)))
    forget(engine)
    engine.run(request("again", suite.prompt(38)), request("other", suite.prompt(20) + suite.prompt(20, seed=5)))
    engine.check()
    assert engine.num_cached("again") == 36 // block_size * block_size
    assert engine.num_cached("other") == 20 // block_size * block_size
    engine.close()


def test_a_block_size_that_does_not_fit_is_refused(tmp_path):
    suite = suite_of(tmp_path, block_size=6)
    with pytest.raises(ValueError, match="block_size is 6, and must be a multiple of 4"):
        suite.engine()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_full_tier_keeps_beginnings(tmp_path, policy):
    suite = suite_of(tmp_path, size=room(8), policy=policy)
    engine = suite.engine()
    for seed in range(3):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
    forget(engine)
    engine.run(*(request(f"again-{seed}", suite.prompt(23, seed=seed)) for seed in reversed(range(3))))
    engine.check()
    assert [engine.num_cached(f"again-{seed}") for seed in range(3)] == [0, 12, 20]
    engine.close()


def test_a_prompt_that_is_larger_than_the_tier_keeps_its_beginning(tmp_path):
    suite = suite_of(tmp_path, size=room(5))
    engine = suite.engine()
    engine.run(request("first", suite.prompt(40)))
    forget(engine)
    engine.run(request("again", suite.prompt(40)))
    engine.check()
    assert engine.num_cached("again") == 20
    engine.close()


def test_salts_stay_apart(tmp_path):
    suite = suite_of(tmp_path)
    engine = suite.engine()
    for salt in (None, "mine", "yours"):
        one = request(f"first-{salt}", suite.prompt())
        one.salt = salt
        engine.run(one)
        assert engine.num_cached(f"first-{salt}") == 0
    forget(engine)
    for salt in ("yours", "theirs", None, "mine"):
        one = request(f"again-{salt}", suite.prompt())
        one.salt = salt
        engine.run(one)
        assert engine.num_cached(f"again-{salt}") == (0 if salt == "theirs" else 20)
    engine.check()
    engine.close()


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(20))
def test_stores_never_read_a_block_that_was_given_away(tmp_path, seed):
    """Saves that are late, while blocks are preempted, trimmed and given to others: what is found later is right."""
    draw = random.Random(seed)
    windows = draw.choice([(0,), (0, 6), (5,)])
    suite = suite_of(tmp_path, share=draw.choice([0.02, 0.2]), seed=seed)
    layout = make_layout(num_blocks=30 if len(windows) > 1 else 24, windows=windows)
    engine = suite.engine(layout, max_num_batched_tokens=draw.choice([7, 64]))
    for number in range(12):
        engine.add(request(f"{number}", suite.prompt(20, seed=number % 5), draw.randrange(1, 25)))
        for _ in range(draw.randrange(6)):
            engine.step()
    engine.run()
    assert engine.engine.stats().preemptions > 0 or windows != (0,)
    forget(engine)
    engine.run(*(request(f"again-{seed}", suite.prompt(20, seed=seed)) for seed in range(5)))
    engine.check()
    engine.close()


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(30))
def test_random_lives(tmp_path, seed):
    """Small tiers, late copies, broken steps, aborts, resets: right tokens, and every row and block comes back."""
    draw = random.Random(seed)
    windows = draw.choice([(0,), (0, 6)])
    options = {
        "policy": draw.choice(["lru", "arc"]),
        "block_size": draw.choice([0, 8]),
        "size": room(12 * len(windows)),
    }
    suite = suite_of(tmp_path, share=draw.choice([0.05, 0.5]), seed=seed, **options)
    ranks = draw.choice([1, 2])
    layout = make_layout(num_blocks=30 * len(windows), windows=windows, ranks=ranks)
    broken = set(draw.sample(range(80), 3)) if draw.random() < 0.5 else ()
    settings = {"max_num_batched_tokens": draw.choice([5, 16, 64]), "late": draw.randrange(3)}
    engine = suite.engine(layout, broken, ranks=ranks, **settings)
    lost = draw.sample(range(80), 3)
    for worker in engine.workers.made:
        lose_steps(worker, lost)
    gone = set()
    for number in range(30):
        prompt = suite.prompt(draw.randrange(1, 40), seed=draw.randrange(4))
        engine.add(request(str(number), prompt, draw.randrange(1, 9)))
        for _ in range(draw.randrange(6)):
            engine.step()
        if draw.random() < 0.15:
            gone.add(str(number))
            engine.engine.abort([str(number)])
        if draw.random() < 0.1:
            engine.engine.call("reset_prefix_cache", {"reset_connector": draw.random() < 0.5})
    engine.run()
    failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
    engine.check(*(set(engine.requests) - gone - failed))
    engine.run(request("last", suite.prompt(5, seed=99), 3))
    side = engine.connector.inner
    assert not side._transfers
    assert not side._reading
    assert not side._index._writing
    assert engine.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert side._index.num_used == 0
    engine.close()


def lose_steps(worker, lost):
    """Has steps of these numbers fail before the connector hears of them."""
    change = worker._change_state

    def fails(plan):
        change(plan)
        if plan.step in lost:
            for slot in plan.slots.tolist():
                worker.slots[slot].spoiled = True
            raise BrokenStepError("before the connector hears of it")

    worker._change_state = fails


@pytest.mark.parametrize("shape", ["full", "states"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_step_failed_before_it_began_gives_its_rows_back(tmp_path, ranks, shape):
    """Else host memory would keep them for ever, and the connector could not be reset."""
    suite = suite_of(tmp_path, share=1.0)
    engine = suite.engine(make_layout(ranks=ranks, **LAYOUTS[shape]), ranks=ranks)
    engine.run(request("first", suite.prompt(40)))
    forget(engine)
    side, failed = worker_of(engine), []
    load = side.load

    def fails(step):
        if step.loads and not failed:
            failed.append(step.number)
            raise RuntimeError("the device fails")
        load(step)

    side.load = fails
    engine.run(request("again", suite.prompt(40)))
    assert failed
    engine.check()
    assert not engine.connector.inner.waits
    assert not engine.connector.inner._index._readers
    forget(engine)
    engine.run(request("later", suite.prompt(40)))
    assert engine.num_cached("later") > 0
    assert engine.connector.reset()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_step_was_lost_gives_its_blocks_back(tmp_path, ranks):
    suite = suite_of(tmp_path, share=1.0)
    engine = suite.engine(make_layout(ranks=ranks), ranks=ranks)
    engine.run(request("first", suite.prompt(40)))
    forget(engine)
    following = engine.engine.scheduler._num_steps
    for worker in engine.workers.made:
        lose_steps(worker, [following])
    engine.run(request("again", suite.prompt(40)))
    engine.check()
    assert not engine.connector.inner._index._readers
    assert engine.num_cached("again") == 36
    engine.close()


def test_reset_forgets_what_is_being_saved_too(tmp_path):
    suite = suite_of(tmp_path, share=0.0)
    engine = suite.engine()
    engine.add(request("first", suite.prompt(40), 30))
    for _ in range(3):
        engine.step()
    side = engine.connector.inner
    assert side._index._writing
    assert side.reset()
    worker_of(engine)._save_queue.share = 1.0
    engine.run()
    assert side._index.num_used == 0
    engine.close()


def test_sleep_ends_the_copies_and_waking_keeps_the_tier(tmp_path):
    suite = suite_of(tmp_path, share=0.0)
    engine = suite.engine()
    engine.add(request("first", suite.prompt(40), 20))
    for _ in range(3):
        engine.step()
    worker = worker_of(engine)
    assert worker._save_queue.work
    worker.register({})
    assert not worker._save_queue.work
    assert not worker.tokens.parts


def test_sleep_lets_go_of_the_memory_of_states(tmp_path):
    engine = suite_of(tmp_path).engine(make_layout(**LAYOUTS["states"]))
    worker = worker_of(engine)
    assert worker._states.stored.parts
    worker.register({})
    assert not worker._states.stored.parts
    engine.close()


def test_values_that_are_not_finite_are_not_kept(tmp_path):
    suite = suite_of(tmp_path)
    engine = suite.engine()
    worker = worker_of(engine)
    end = worker.end_step

    def spoils(finished):
        for part in worker.tokens.parts:
            part.cache.view(torch.float32).fill_(float("nan"))
        return end(finished)

    worker.end_step = spoils
    engine.run(request("first", suite.prompt(22), 1))
    assert engine.connector.inner._index.num_used == 0
    assert engine.engine.stats().connector_counters["offload_unsaved_blocks"] == 5
    engine.close()


def test_states_that_are_not_finite_are_not_kept(tmp_path):
    suite = suite_of(tmp_path)
    engine = suite.engine(make_layout(**LAYOUTS["states"]))
    worker = worker_of(engine)
    save = worker.save_states

    def spoils(moves):
        worker.states.parts[-1].cache[moves[0].blocks[-1][0], -4:].fill_(0xFF)
        save(moves)

    worker.save_states = spoils
    engine.run(request("first", suite.prompt(22), 1))
    engine.run(request("goes on", suite.prompt(2), 40))  # copies may end in later steps
    assert engine.connector.inner._rows.index.num_used == 0
    counters = engine.engine.stats().connector_counters
    assert "offload_saved_states" not in counters
    assert counters["offload_unsaved_states"] == 1
    engine.close()


def test_a_copy_that_fails_costs_its_help_only(tmp_path):
    suite = suite_of(tmp_path)
    engine = suite.engine()
    engine.run(request("first", suite.prompt(30)))
    forget(engine)
    worker = worker_of(engine)
    worker._copies.runs, runs = lambda rows: 1 / 0, worker._copies.runs
    engine.run(request("again", suite.prompt(30)), request("new", suite.prompt(30, seed=3)))
    worker._copies.runs = runs
    forget(engine)
    engine.run(request("third", suite.prompt(30)), request("newer", suite.prompt(30, seed=3)))
    engine.check()
    assert engine.num_cached("third") == 28
    assert engine.num_cached("newer") == 0
    assert engine.engine.stats().connector_counters["offload_failed_blocks"] == 7
    engine.close()


def test_a_tier_larger_than_memory_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"100000.0 GiB of blocks are to be kept, and this machine has .* of memory: l"
    ):
        suite_of(tmp_path, size=100_000).engine()


def test_more_than_is_available_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_slab, "_memory", lambda: (8 << 30, 2 << 30))
    with pytest.raises(
        ValueError, match=r"is to keep 3.0 GiB of blocks, and 2.0 GiB of this machine's memory are avail"
    ):
        suite_of(tmp_path, size=3).engine()


def test_each_machine_is_asked_for_its_workers_part(monkeypatch):
    monkeypatch.setattr(host_slab, "_memory", lambda: (8 << 30, 8 << 30))
    check_options(OffloadOptions(size=16), 4, 2)
    with pytest.raises(ValueError, match=r"16.0 GiB of blocks are to be kept, and this machine has 8.0 GiB"):
        check_options(OffloadOptions(size=16), 4, 1)


@pytest.mark.parametrize("options", [{"keep": True}, {"disk_size": 3}], ids=str)
def test_an_option_without_the_one_that_it_belongs_to_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} has no effect without (shared|disk_folder)"):
        OffloadOptions(**options)
    OffloadOptions(**options, shared=True, disk_folder="x")


def test_a_tier_without_room_for_a_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hold no block of 4 tokens, which take 0.0 MiB: raise kv_offloading_size"):
        suite_of(tmp_path, size=room(0.5)).engine()


@pytest.mark.parametrize(("size", "num_blocks"), [(0.5, 1048576), (0.03125, 65536)])
def test_one_line_says_what_is_kept(tmp_path, caplog, size, num_blocks):
    with caplog.at_level("INFO", "frame.connectors.offload"):
        suite_of(tmp_path, size=size, policy="arc").engine().close()
    (line,) = [record.message for record in caplog.records]
    assert line == f"offloading: {size} GiB of host memory keep {num_blocks} blocks of 4 tokens, policy arc"


def test_layers_of_a_group_share_the_numbers_of_blocks(tmp_path, monkeypatch):
    suite = suite_of(tmp_path)
    engine = suite.engine(make_layout(200))
    worker, staged, copies = worker_of(engine), [], []
    streams, run = worker.setup.streams, worker._run
    monkeypatch.setattr(streams, "stage", lambda array, stage=streams.stage: staged.append(1) or stage(array))
    monkeypatch.setattr(worker, "_run", lambda *given: copies.append(1) or run(*given))
    for name in ("first", "again"):
        engine.run(request(name, suite.prompt(22, seed=1)))
        forget(engine)
    engine.check()
    assert len(worker.tokens.parts) == 2
    assert len(staged) == len(copies) > 1


def test_a_load_that_cannot_begin_leaves_those_behind_it():
    mover = SimpleNamespace(coming=lambda row: None)
    loads = ComingLoads(mover, lambda moves: None)
    moves = [Move("first", b"a", [[1]], 0), Move("second", b"b", [[2]], 0)]
    loads.add(OffloadStep(blocks_name="b", number=1, loads=moves, load_rows=[0, 1]))
    begun = loads.ready()
    assert next(begun).owner == "first"
    begun.close()  # as where the first one raises
    assert loads.owners == ["second"]
    assert [copy.owner for copy in loads.ready()] == ["second"]
    assert loads.owners == []
