"""The disk behind the tier in host memory, under frame's scheduler and over a fake worker."""

from __future__ import annotations

import random
import shutil
import threading
import time
from concurrent.futures import wait

import pytest

from frame.plugins.connectors.blocks.files import BlockFiles
from frame.plugins.connectors.offload import disk as offload_disk
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.test_offload import forget, lose_steps, room, suite_of, worker_of


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Other work on this machine must not make a disk look as if it did not answer."""
    monkeypatch.setattr(offload_disk, "LOOKUP_SECONDS", 60.0)


def disk_suite(folder, num_blocks=8, **options):
    """A tier of few blocks over a disk."""
    return suite_of(folder, **{"size": room(num_blocks), "disk_folder": str(folder / "disk"), **options})


def counters(engine):
    return engine.engine.stats().connector_counters


def rest(engine):
    """Lets the threads end what they do, and the engine hear of it."""
    latest = time.monotonic() + 60
    while True:
        engine.run(request(f"rest-{time.monotonic()}", [1, 2], 1))
        if not engine.connector.inner.waits:
            return
        assert time.monotonic() < latest, "transfers do not end"
        time.sleep(0.005)


def fill(engine, suite, seeds, length=23):
    for seed in seeds:
        engine.run(request(f"first-{seed}", suite.prompt(length, seed=seed)))
        rest(engine)
    forget(engine)


@pytest.mark.parametrize(
    ("policy", "ranks", "block_size"), [("lru", 1, 4), ("arc", 2, 8), ("lru", 2, 4), ("arc", 1, 8)]
)
def test_evicted_from_host_then_found_on_disk(tmp_path, ranks, policy, block_size):
    suite = disk_suite(tmp_path, 24, policy=policy, block_size=block_size)
    engine = suite.engine(make_layout(ranks=ranks), ranks=ranks)
    fill(engine, suite, range(8))
    assert worker_of(engine)._slab.num_rows == 24
    for seed in range(8):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    assert [engine.num_cached(f"again-{seed}") for seed in range(8)] == [20 // block_size * block_size] * 8
    found = counters(engine)
    assert found["offload_disk_read_bytes"] > 0
    assert found["offload_disk_written_bytes"] > 0
    assert "offload_disk_failed_blocks" not in found
    engine.close()


def test_what_another_engine_left_on_disk_is_found(tmp_path):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8))
    engine.close()
    engine = suite.engine()
    engine.run(request("again", suite.prompt(23, seed=0)))
    engine.check()
    assert engine.num_cached("again") == 20
    engine.close()


def test_engines_of_other_block_sizes_read_no_part_of_a_block_for_another(tmp_path):
    """Blocks of either size that end at the same token have parts of the same numbers."""
    suite = disk_suite(tmp_path)
    for block_size, length in ((8, 11), (16, 23), (8, 23)):
        suite.options["block_size"] = block_size
        engine = suite.engine()
        fill(engine, suite, range(8), length)
        engine.check()
        engine.close()


def test_the_disk_connector_reads_the_same_files(tmp_path):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8))
    engine.close()
    other = suite_of(tmp_path)
    other.plugin, other.options = "disk", {"folder": str(tmp_path / "disk")}
    other.worker_side = type(other).__mro__[1].worker_side.__get__(other)
    engine = other.engine()
    engine.run(request("again", suite.prompt(23, seed=0)))
    engine.check()
    assert engine.num_cached("again") == 20
    engine.close()


def test_a_prompt_on_disk_that_host_memory_has_no_room_for_comes_in_part(tmp_path):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8), length=40)
    engine.close()
    suite.options["size"] = room(3)
    engine = suite.engine()
    engine.run(request("again", suite.prompt(40, seed=0)))
    engine.check()
    assert engine.num_cached("again") == 12
    engine.close()


def test_used_blocks_that_are_about_to_go_stay(tmp_path):
    """A block is found in host memory while it is being written to the disk, and stays then."""
    suite = disk_suite(tmp_path, 12)
    engine = suite.engine()
    worker = worker_of(engine)
    writer, held = worker._mover._writer, []
    worker._mover._writer = type(
        "Held", (), {"submit": lambda self, *work: held.append(work) or writer.submit(id, 0)}
    )()
    side = engine.connector.inner
    keys = []
    leave = side._index.leave
    side._index.leave = lambda count: keys.extend(found := leave(count)) or found
    told = worker._mover.ended
    worker._mover.ended = lambda count: []
    for seed in range(3):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
    engine.run(request("next", [1, 2], 2))
    assert keys
    assert all(side._index.has(key) for key in keys)
    side._index.leave, used = leave, list(keys)
    side._index.use(used)
    side._index.release(used)
    worker._mover.ended, worker._mover._writer = told, writer
    for work in held:
        writer.submit(*work)
    rest(engine)
    assert all(side._index.has(key) for key in used)
    engine.check()
    engine.close()


def test_a_damaged_file_whose_read_ends_between_two_looks_is_not_loaded(tmp_path, monkeypatch):
    """The worker looks which loads can start, then which reads have ended: a read ends in between."""
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8))
    for path in (tmp_path / "disk").rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    worker, goes_on, read = worker_of(engine), threading.Event(), BlockFiles.read
    monkeypatch.setattr(BlockFiles, "read", lambda *given: goes_on.wait(60) and read(*given))
    end = worker._mover.ended

    def ended(count):
        goes_on.set()
        for batch in worker._mover._batches:
            wait(batch.moves)
        return end(count)

    monkeypatch.setattr(worker._mover, "ended", ended)
    engine.run(request("again", suite.prompt(23, seed=0)))
    engine.check()
    assert counters(engine)["offload_failed_blocks"] > 0
    engine.close()


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize(("threads", "queues"), [("_readers", True), ("_readers", False), ("_writer", True)])
def test_a_thread_that_cannot_be_started_costs_the_blocks_that_it_was_to_move(
    tmp_path, monkeypatch, first, threads, queues
):
    """The pool has queued the work by then, so that another of its threads may do it, when the rows are others' too."""
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    if threads == "_readers":
        fill(engine, suite, range(8))
    pool, calls, given = getattr(worker_of(engine)._mover, threads), [], []
    submit = pool.submit

    def submits(*arguments):
        calls.append(arguments)
        if first <= len(calls) <= first + 1:
            given.append(arguments)
            raise RuntimeError("can't start new thread")
        while queues and given:
            submit(*given.pop())
        return submit(*arguments)

    monkeypatch.setattr(pool, "submit", submits)
    for seed in range(8):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    assert len(calls) > first + 1
    index = engine.connector.inner._index
    assert not index._readers
    assert not engine.engine.scheduler.lifecycle.abandoned
    forget(engine)
    assert engine.connector.reset()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_files_are_computed_again(tmp_path, ranks):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine(make_layout(ranks=ranks), ranks=ranks)
    fill(engine, suite, range(8))
    files = sorted((tmp_path / "disk").rglob("*.kv"))
    assert files
    draw = random.Random(0)
    for path in draw.sample(files, len(files) // 2):
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    for seed in range(8):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    assert counters(engine)["offload_disk_failed_blocks"] > 0
    assert not engine.connector.inner._index._readers
    engine.close()


def test_a_full_disk_is_one_sentence_and_a_counter(tmp_path, monkeypatch, caplog):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()

    def full(self, path, header, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "_write_whole", full)
    fill(engine, suite, range(8))
    for seed in range(8):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
    rest(engine)
    engine.check()
    assert counters(engine)["offload_disk_lost_blocks"] > 0
    assert [engine.num_cached(f"again-{seed}") for seed in (0, 1)] == [0, 0]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].endswith("No space left on device; set --plugin.offload.disk_size")
    engine.close()


def test_a_folder_that_goes_away_stops_nothing(tmp_path, caplog):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(4))
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("no folder")
    fill(engine, suite, range(4, 10))
    for seed in range(10):
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
    rest(engine)
    engine.check()
    assert counters(engine)["offload_disk_lost_blocks"] > 0
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    engine.close()


def test_a_folder_that_cannot_be_used_ends_the_start_with_one_sentence(tmp_path):
    (tmp_path / "disk").write_text("no folder")
    with pytest.raises(ValueError, match=r"the folder of the offload connector, .*disk, cannot be used: "):
        disk_suite(tmp_path).engine()


def test_the_disk_holds_no_more_than_it_may(tmp_path):
    suite = disk_suite(tmp_path, 12, disk_size=room(10, 600))
    engine = suite.engine()
    fill(engine, suite, range(12))
    size = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.kv"))
    assert 0 < size <= 10 * 600
    engine.close()


def test_a_disk_that_does_not_answer_makes_no_step_wait(tmp_path, monkeypatch):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8))
    answers = threading.Event()
    monkeypatch.setattr(offload_disk, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(BlockFiles, "has", lambda self, *block: answers.wait(60))
    engine.run(request("again", suite.prompt(23, seed=0)), request("short", [1, 2], 2))
    assert not answers.is_set()
    assert engine.num_cached("again") == 0
    engine.check()
    answers.set()
    engine.close()


def test_a_disk_that_is_slow_makes_no_step_wait(tmp_path, monkeypatch):
    """Neither for what is read nor for what is written: other requests begin and end meanwhile."""
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(8))
    goes_on = threading.Event()
    read, write = BlockFiles.read, BlockFiles.write
    monkeypatch.setattr(BlockFiles, "read", lambda *given: goes_on.wait(60) and read(*given))
    monkeypatch.setattr(BlockFiles, "write", lambda *given: goes_on.wait(60) and write(*given))
    engine.add(request("again", suite.prompt(23, seed=0)))
    for number in range(3):
        engine.add(request(f"other-{number}", suite.prompt(23, seed=20 + number), 5))
    assert engine.run(until=lambda: all(engine.ended(f"other-{number}") for number in range(3)))
    assert not engine.ended("again")
    goes_on.set()
    engine.run()
    assert engine.num_cached("again") == 20
    engine.check()
    engine.close()


def test_reset_removes_what_is_on_disk_and_what_is_on_its_way(tmp_path):
    suite = disk_suite(tmp_path, 24)
    engine = suite.engine()
    fill(engine, suite, range(7))
    for seed in range(7, 9):
        engine.run(request(f"first-{seed}", suite.prompt(23, seed=seed)))
    assert engine.engine.call("reset_prefix_cache", {"reset_connector": True})
    rest(engine)
    assert not list((tmp_path / "disk").rglob("*.kv"))
    assert engine.connector.inner._index.num_used == 0
    engine.run(*(request(f"again-{seed}", suite.prompt(23, seed=seed)) for seed in range(8)))
    assert engine.num_cached("again-0") == 0
    engine.check()
    engine.close()


def test_blocks_that_are_not_saved_because_the_host_is_slow_are_counted(tmp_path):
    suite = suite_of(tmp_path, share=0.0)
    engine = suite.engine(make_layout(24))
    engine.add(request("first", suite.prompt(60), 8))
    for _ in range(2):
        engine.step()
    engine.add(request("second", suite.prompt(20, seed=1), 2))
    for _ in range(3):
        engine.step()
    worker_of(engine)._save_queue.share = 1.0
    engine.run()
    engine.check()
    assert counters(engine)["offload_unsaved_blocks"] == 5
    engine.close()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.matrix) for seed in range(20)]
)
def test_random_lives(tmp_path, seed):
    """Engines that follow one another on a disk, with lost steps, aborts, resets and damage: right tokens, no leaks."""
    draw = random.Random(seed)
    windows, ranks = draw.choice([(0,), (0, 6)]), draw.choice([1, 2])
    suite = disk_suite(
        tmp_path,
        12 * len(windows),
        share=draw.choice([0.05, 0.5]),
        seed=seed,
        block_size=draw.choice([0, 8]),
        policy=draw.choice(["lru", "arc"]),
    )
    layout = make_layout(num_blocks=30 * len(windows), windows=windows, ranks=ranks)
    for life in range(3):
        engine = suite.engine(layout, ranks=ranks, max_num_batched_tokens=draw.choice([8, 64]), late=draw.randrange(3))
        lost = draw.sample(range(60), 2)
        for worker in engine.workers.made:
            lose_steps(worker, lost)
        gone = set()
        for number in range(16):
            name = f"{life}-{number}"
            prompt = suite.prompt(draw.randrange(1, 40), seed=draw.randrange(6))
            engine.add(request(name, prompt, draw.randrange(1, 9)))
            for _ in range(draw.randrange(8)):
                engine.step()
            if draw.random() < 0.15:
                gone.add(name)
                engine.engine.abort([name])
            if draw.random() < 0.1:
                engine.engine.call("reset_prefix_cache", {"reset_connector": draw.random() < 0.3})
            files = sorted((tmp_path / "disk").rglob("*.kv"))
            if files and draw.random() < 0.2:
                path = draw.choice(files)
                path.write_bytes(path.read_bytes()[:-1])
        engine.run()
        failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
        if names := set(engine.requests) - gone - failed:
            engine.check(*names)
        rest(engine)
        side = engine.connector.inner
        assert not side._reading
        assert not side._index._writing
        assert not side._index._readers
        assert not side._index._leaving
        engine.close()
