"""Running states in the tiers behind the device's memory: shared memory and what outlives a kill, and the disk."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace

import pytest

from frame.plugins.connectors.blocks.files import BlockFiles
from frame.plugins.connectors.offload import disk as offload_disk, states as offload_states
from frame.plugins.connectors.offload.rows_file import MARKS_AT
from frame.plugins.connectors.offload.shelf_index import SLOT, SLOTS_AT
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.test_offload import ROW, forget, room, suite_of, worker_of
from tests.connectors.test_offload_disk import counters, disk_suite, rest
from tests.connectors.test_offload_shared import again, files, fill, kill, live, shared_suite, shelves

#: Bytes of the fake worker's state, which ranks divide, and layouts: a hybrid and one in which nothing keeps tokens.
STATE = 64
SHAPES = {
    "hybrid": {"windows": (0, 6), "strides": (1, 2), "states": 4, "checkpoints": 12},
    "states alone": {"windows": (), "states": 4, "checkpoints": 12},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Other work on this machine must not make a disk look as if it did not answer."""
    monkeypatch.setattr(offload_disk, "LOOKUP_SECONDS", 60.0)


def layout_of(shape, ranks=1, **more):
    return make_layout(200, ranks=ranks, **shape, **more)


def whole(layout, length):
    """The tokens of a prompt that are found once all of it is stored."""
    return (length - 1) // layout.grain * layout.grain


@pytest.mark.some(2)
@shapes
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_after_one_that_was_killed_finds_its_states(tmp_path, shape, ranks):
    suite, layout = shared_suite(tmp_path, size=0.001), layout_of(shape, ranks)
    engine = suite.engine(layout, ranks=ranks)
    fill(engine, suite, 0, 1, 2)
    rest(engine)
    used = engine.connector.inner._rows.index.num_used
    assert used > 2
    kill(engine)
    engine = suite.engine(layout, ranks=ranks)
    assert engine.connector.inner._rows.index.num_used == used
    assert again(engine, suite, 0, 1, 2) == [whole(layout, 23)] * 3
    found = counters(engine)
    assert found["offload_loaded_states"] == 3 * ranks
    assert found["offload_checked_read_bytes"] >= 3 * STATE
    assert "offload_failed_blocks" not in found
    forget(engine)
    engine.run(request("third", suite.prompt(23, seed=1)))
    assert engine.num_cached("third") == whole(layout, 23)
    assert counters(engine)["offload_checked_read_bytes"] == found["offload_checked_read_bytes"]
    engine.close()
    assert not shelves(tmp_path)


@pytest.mark.some(2)
@shapes
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_finds_the_states_of_another(tmp_path, shape, ranks):
    suite, layout = shared_suite(tmp_path, size=0.001), layout_of(shape, ranks)
    first, second = (suite.engine(layout, ranks=ranks) for _ in range(2))
    fill(first, suite, 0, 1)
    rest(first)
    assert again(second, suite, 1, 0) == [whole(layout, 23)] * 2
    found = counters(second)
    assert found["offload_loaded_states"] == 2 * ranks
    assert found["offload_shared_read_bytes"] >= 2 * STATE
    assert "offload_failed_blocks" not in found
    fill(second, suite, 2)
    rest(second)
    assert again(first, suite, 2) == [whole(layout, 23)]
    first.close()
    forget(second)  # what it read is its own
    second.run(request("still", suite.prompt(23)))
    assert second.num_cached("still") == whole(layout, 23)
    second.check()
    second.close()
    assert not shelves(tmp_path)


@shapes
def test_a_state_is_there_for_others_when_its_engine_has_nothing_left_to_do(tmp_path, shape):
    """However long its copy takes: an engine without requests takes no step in which it would hear of the end."""
    suite, layout = shared_suite(tmp_path, size=0.001, share=0.02), layout_of(shape)
    first, second = (suite.engine(layout) for _ in range(2))
    fill(first, suite, 0)
    assert not first.connector.inner._rows.waits
    assert again(second, suite, 0) == [whole(layout, 23)]
    first.close()
    second.close()


@pytest.mark.some(2)
@shapes
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_engines_of_other_numbers_of_ranks_read_states(tmp_path, first, second, shape):
    suite = shared_suite(tmp_path, size=0.001)
    giver = suite.engine(layout_of(shape, first), ranks=first)
    fill(giver, suite, 0, 1)
    rest(giver)
    taker = suite.engine(layout_of(shape, second), ranks=second)
    length = whole(taker.layout, 23)
    assert again(taker, suite, 0) == [length]
    assert counters(taker)["offload_loaded_states"] == second
    kill(giver)
    assert again(taker, suite, 1) == [length]
    fill(taker, suite, 2)
    rest(taker)
    kill(taker)
    engine = suite.engine(layout_of(shape, first), ranks=first)
    assert again(engine, suite, 0, 1, 2) == [length] * 3
    for one in (taker, engine):
        assert not {"offload_shared_failed_blocks", "offload_failed_blocks"} & set(counters(one))
    engine.close()


@shapes
def test_states_of_which_no_parts_are_told_are_not_read_by_engines_that_divide_them_otherwise(
    tmp_path, shape, monkeypatch
):
    tell = FakeMemory.__init__

    def told(memory, *given):
        tell(memory, *given)
        memory.views = {name: replace(view, runs=()) for name, view in memory.views.items()}

    monkeypatch.setattr(FakeMemory, "__init__", told)
    suite = shared_suite(tmp_path, size=0.001)
    first = suite.engine(layout_of(shape))
    fill(first, suite, 0)
    rest(first)
    second = suite.engine(layout_of(shape, 2), ranks=2)
    assert again(second, suite, 0) == [0]
    found = counters(second)
    assert not {"offload_shared_failed_blocks", "offload_failed_blocks", "offload_loaded_states"} & set(found)
    third = suite.engine(layout_of(shape, 2), ranks=2)
    rest(second)
    assert again(third, suite, 0) == [whole(third.layout, 23)]
    for engine in (first, second, third):
        engine.close()


def test_salts_and_models_keep_states_apart(tmp_path):
    suite, layout = shared_suite(tmp_path, size=0.001), layout_of(SHAPES["states alone"])
    engines = [suite.engine(layout) for _ in range(2)]
    engines.append(suite.engine(layout_of(SHAPES["states alone"], model="other")))
    for salt, engine, found in (("mine", 0, 0), ("yours", 1, 0), ("mine", 1, 20), ("mine", 2, 0)):
        one = request(f"{salt}-{engine}", suite.prompt())
        one.salt = salt
        engines[engine].run(one)
        rest(engines[engine])
        assert engines[engine].num_cached(f"{salt}-{engine}") == found
    for engine in engines:
        engine.close()


@pytest.mark.some(3)
@shapes
@pytest.mark.parametrize("name", ["index", "rows", "marks"])
def test_states_that_are_damaged_are_computed_again(tmp_path, shape, name):
    """Where they lie, by an engine that follows one that was killed, and by another one."""
    suite, layout = shared_suite(tmp_path, size=0.001), layout_of(shape)
    first = suite.engine(layout)
    fill(first, suite, 0, 1, 2)
    rest(first)
    other = suite.engine(layout)
    (path,) = (shelves(tmp_path)[0] / {"index": "state-index"}.get(name, "state-rows-0") for _ in range(1))
    states = first.connector.inner._rows.index
    slots = [block.slot for block in states._blocks.values()]
    start = worker_of(first)._states.slab._start
    with path.open("r+b") as file:
        for slot in slots:
            place = {"index": SLOTS_AT + SLOT.size * slot + 8, "rows": start + STATE * slot + 5}
            file.seek(place.get(name, MARKS_AT + 16 * slot + 9))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x10]))
    again(other, suite, 0)
    kill(first)
    engine = suite.engine(layout)
    again(engine, suite, 1, 2)
    assert counters(other)["offload_shared_failed_blocks"] > 0
    assert counters(engine)["offload_checked_failed_blocks"] > 0
    assert not any(counters(one).get("offload_loaded_states") for one in (other, engine))
    for name in ("third", "fourth"):  # a state that was found damaged late is saved when it is computed the next time
        forget(engine)
        rest(engine)
        engine.run(request(name, suite.prompt(23, seed=1)))
    assert engine.num_cached("fourth") == whole(layout, 23)
    engine.check()
    other.close()
    engine.close()


def test_no_descriptor_of_states_is_left(tmp_path):
    suite = shared_suite(tmp_path, size=0.001, disk_folder=str(tmp_path / "disk"))
    for number in range(3):
        if number == 1:
            gc.collect()
            before = len(os.listdir("/proc/self/fd"))
        first, second = (suite.engine(layout_of(SHAPES["hybrid"])) for _ in range(2))
        fill(first, suite, 0)
        rest(first)
        again(second, suite, 0)
        first.close()
        second.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.some(3)
@shapes
@pytest.mark.parametrize("name", ["state-index", "state-rows-0", "state-form-0"])
def test_states_whose_files_are_gone_are_computed_again(tmp_path, shape, name):
    suite, layout = shared_suite(tmp_path, size=0.001), layout_of(shape)
    engine = suite.engine(layout)
    fill(engine, suite, 0)
    rest(engine)
    kill(engine)
    (path,) = files(tmp_path, name)
    path.unlink()
    engine = suite.engine(layout)
    assert again(engine, suite, 0) == [whole(layout, 23) if name == "state-form-0" else 0]
    engine.close()


@pytest.fixture
def few(monkeypatch):
    """Makes options of a tier for few states, and for more tokens than they stand for."""

    def sizes(shape, num_states):
        if not shape["windows"]:
            return {"size": room(num_states, STATE)}
        monkeypatch.setattr(offload_states, "STATE_SHARE", (num_states + 0.5) * STATE / (200 * ROW))
        return {"size": room(200)}

    return sizes


@pytest.mark.some(2)
@shapes
@pytest.mark.parametrize(("policy", "ranks"), [("lru", 1), ("arc", 2)])
def test_states_that_host_memory_has_no_room_for_come_back_from_the_disk(tmp_path, few, shape, policy, ranks):
    layout = layout_of(shape, ranks)
    suite = disk_suite(tmp_path, policy=policy, **few(shape, 5))
    engine = suite.engine(layout, ranks=ranks)
    for seed in range(8):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    assert engine.connector.inner._sizes.num_states == 5
    for seed in range(8):
        forget(engine)
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    assert [engine.num_cached(f"again-{seed}") for seed in range(8)] == [whole(layout, 23)] * 8
    found = counters(engine)
    assert found["offload_loaded_states"] == 8 * ranks
    assert found["offload_disk_read_bytes"] > 0
    assert not {"offload_disk_failed_blocks", "offload_failed_blocks", "offload_disk_lost_blocks"} & set(found)
    engine.close()


@shapes
def test_an_engine_after_another_finds_states_on_the_disk_and_computes_damaged_ones(tmp_path, few, shape):
    layout = layout_of(shape)
    suite = disk_suite(tmp_path, **few(shape, 3))
    engine = suite.engine(layout)
    for seed in range(8):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.close()
    states = {path: path.stat().st_size for path in (tmp_path / "disk").rglob("*.kv")}
    states = [path for path in states if path.stem.endswith(b"state".hex())]
    assert len(states) >= 5
    for path in states[::2]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    # blocks of tokens that did not need to go are gone: those of the first engine are given to this one
    suite.options.update(few(shape, 12))
    engine = suite.engine(layout)
    for seed in range(8):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    found = counters(engine)
    assert (found.get("offload_disk_failed_blocks", 0) > 0) == (not shape["windows"])
    engine.close()


@shapes
def test_a_full_disk_costs_no_token(tmp_path, few, shape, monkeypatch):
    layout = layout_of(shape)
    suite = disk_suite(tmp_path, **few(shape, 3))
    engine = suite.engine(layout)

    def full(self, path, header, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "_write_whole", full)
    for label in ("first", "again"):
        for seed in range(6):
            forget(engine)
            engine.run(request(f"{label}-{seed}", suite.prompt(23, seed=seed)))
            rest(engine)
    engine.check()
    assert counters(engine)["offload_disk_lost_blocks"] > 0
    engine.close()


@shapes
def test_reset_removes_states_everywhere(tmp_path, few, shape):
    layout = layout_of(shape)
    suite = shared_suite(tmp_path, disk_folder=str(tmp_path / "disk"), **few(shape, 3))
    engine, other = suite.engine(layout), suite.engine(layout)
    for seed in range(6):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    for one in (engine, other):
        assert one.engine.call("reset_prefix_cache", {"reset_connector": True})
        rest(one)
    assert not list((tmp_path / "disk").rglob("*.kv"))
    assert again(other, suite, *range(6)) == [0] * 6
    kill(engine)
    third = suite.engine(layout)
    assert third.connector.inner._rows.index.num_used == 0
    other.close()
    third.close()


def test_the_disk_connector_reads_the_states(tmp_path, few):
    """Of models in which nothing keeps tokens; else blocks of tokens may still be in host memory alone."""
    layout = layout_of(SHAPES["states alone"])
    suite = disk_suite(tmp_path, **few(SHAPES["states alone"], 3))
    engine = suite.engine(layout)
    for seed in range(6):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.close()
    other = suite_of(tmp_path)
    other.plugin, other.options = "disk", {"folder": str(tmp_path / "disk")}
    other.worker_side = type(other).__mro__[1].worker_side.__get__(other)
    engine = other.engine(layout)
    engine.run(request("again", suite.prompt(23, seed=0)))
    engine.check()
    assert engine.num_cached("again") == 20
    engine.close()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.matrix) for seed in range(30)]
)
def test_random_lives_with_states(tmp_path, few, seed):
    """Two engines beside one another, killed, damaged and followed by others, few states, a disk or none."""
    draw = random.Random(seed)
    shape = SHAPES[draw.choice(list(SHAPES))]
    suite = shared_suite(
        tmp_path,
        share=draw.choice([0.05, 0.5]),
        seed=seed,
        policy=draw.choice(["lru", "arc"]),
        block_size=draw.choice([0, 16]),
        disk_folder=str(tmp_path / "disk") if draw.random() < 0.6 else "",
        **few(shape, draw.choice([2, 6, 18])),
    )

    def layout(ranks):
        return make_layout(60, ranks=ranks, **{**shape, "checkpoints": draw.choice([2, 8])})

    for engine in live(suite, draw, layout, num_prompts=4):
        side = engine.connector.inner
        for index in (side._index, side._rows.index):
            assert not index._readers
            assert not index._writing
            assert not index._leaving
        engine.close()
    assert not shelves(tmp_path) or suite.number > 2
