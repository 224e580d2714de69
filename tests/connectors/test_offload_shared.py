"""The tier in shared memory: engines beside one another, engines that follow one that was killed, damage."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import stat
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from frame.core.interfaces.mesh import Placement
from frame.core.plugin_host.setups import mesh_of
from frame.interfaces import decode, encode
from frame.plugins.connectors.offload import foreign_rows, neighbours, shelf
from frame.plugins.connectors.offload.check import check_options
from frame.plugins.connectors.offload.options import OffloadOptions
from frame.plugins.connectors.offload.row_forms import RowForm
from frame.plugins.connectors.offload.scheduler import OffloadScheduler
from frame.plugins.connectors.offload.shelf_index import SLOT, SLOTS_AT
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.late import LateStreams
from tests.connectors.test_offload import Suite, forget, lose_steps, room, worker_of
from tests.connectors.test_offload_disk import counters, rest


class Shared(Suite):
    """Engines with names of their own, on one folder of shared memory."""

    __test__ = False
    number = 0

    def scheduler_side(self, config, layout):
        self.number += 1
        return self.make(config=config, layout=layout, engine_id=f"engine-{self.number}")

    def worker_side(self, config, layout, rank=0):
        return self.make(
            config=config,
            part="worker",
            layout=layout,
            placement=Placement(rank=rank, local_rank=rank, mesh=mesh_of(config)),
            streams=LateStreams(self.share, self.seed + rank),
            engine_id=f"engine-{self.number}",
        )


def shared_suite(folder, *, share=0.3, seed=0, **options):
    made = Shared()
    made.folder, made.share, made.seed = folder, share, seed
    made.options = {
        "size": room(64),
        "disk_folder": "",
        "shared": True,
        "shared_folder": str(folder / "memory"),
        **options,
    }
    return made


def kill(engine):
    """Ends an engine as a process that is killed does: what it holds is let go, and nothing is done."""
    engine.connector.inner._shelf.abandon()
    for worker in engine.workers.made:
        worker.transfer.inner._shelf.abandon()


def shelves(folder):
    return sorted(path for path in (folder / "memory").glob("frame-kv-*/*/*") if path.is_dir())


def files(folder, name="*"):
    return sorted(path for one in shelves(folder) for path in one.glob(name))


def fill(engine, suite, *seeds, length=23):
    engine.run(*(request(f"first-{seed}", suite.prompt(length, seed=seed)) for seed in seeds))
    engine.check()


def again(engine, suite, *seeds, length=23):
    """How many tokens of each prompt are found."""
    engine.run(*(request(f"again-{seed}", suite.prompt(length, seed=seed)) for seed in seeds))
    engine.check(*(f"again-{seed}" for seed in seeds))
    return [engine.num_cached(f"again-{seed}") for seed in seeds]


@pytest.mark.parametrize(("ranks", "block_size", "windows"), [(1, 4, (0,)), (2, 8, (0,)), (2, 4, (0, 6))])
def test_a_killed_engine_leaves_a_readable_tier(tmp_path, ranks, block_size, windows):
    suite = shared_suite(tmp_path, block_size=block_size, size=room(200))
    layout = make_layout(num_blocks=200, ranks=ranks, windows=windows)
    engine = suite.engine(layout, ranks=ranks)
    fill(engine, suite, 0, 1, 2)
    used = engine.connector.inner._index.num_used
    kill(engine)
    engine = suite.engine(layout, ranks=ranks)
    assert engine.connector.inner._index.num_used == used
    assert again(engine, suite, 0, 1, 2) == [20 // block_size * block_size] * 3
    found = counters(engine)
    checked = found["offload_checked_read_bytes"]
    assert checked > 0
    forget(engine)
    engine.run(request("third", suite.prompt(23, seed=1)))
    assert engine.num_cached("third") == 20 // block_size * block_size
    assert counters(engine)["offload_checked_read_bytes"] == checked
    assert "offload_checked_failed_blocks" not in counters(engine)
    engine.close()
    assert not shelves(tmp_path)


def test_two_engines_one_tier(tmp_path):
    suite = shared_suite(tmp_path)
    engines = [suite.engine() for _ in range(2)]
    fill(engines[0], suite, 0, 1)
    assert again(engines[1], suite, 1, 0) == [20, 20]
    assert counters(engines[1])["offload_shared_read_bytes"] == 10 * 512
    fill(engines[1], suite, 2)
    assert again(engines[0], suite, 2) == [20]
    third = suite.engine()
    assert again(third, suite, 0, 1, 2) == [20, 20, 20]
    for engine in engines:
        engine.close()
    forget(third)
    assert third.num_cached("again-0") == 20
    third.run(request("still", suite.prompt(23)))
    assert third.num_cached("still") == 20
    third.close()
    assert not shelves(tmp_path)


def test_two_engines_of_two_ranks_share(tmp_path):
    suite = shared_suite(tmp_path, block_size=8)
    engines = [suite.engine(make_layout(ranks=2), ranks=2) for _ in range(2)]
    fill(engines[0], suite, 0, 1)
    assert again(engines[1], suite, 0, 1) == [16, 16]
    for engine in engines:
        engine.close()
    assert not shelves(tmp_path)


@pytest.mark.parametrize("other", [{"model": "other"}, {"block_size": 8}, {"windows": (0, 6)}], ids=str)
def test_engines_of_different_models_in_one_folder_stay_apart(tmp_path, other):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(make_layout()), suite.engine(make_layout(**other))
    fill(first, suite, 0)
    assert again(second, suite, 0) == [0]
    assert again(first, suite, 0) == [20]
    kill(first)
    third = suite.engine(make_layout(**other))
    assert again(third, suite, 0) == [20 // third.layout.grain * third.layout.grain]
    fourth = suite.engine(make_layout())
    assert again(fourth, suite, 0) == [20]
    for engine in (second, third, fourth):
        engine.close()
    assert not shelves(tmp_path)


def test_salts_stay_apart(tmp_path):
    suite = shared_suite(tmp_path)
    engines = [suite.engine() for _ in range(2)]
    for salt, engine in (("mine", engines[0]), ("yours", engines[1]), ("mine", engines[1])):
        one = request(f"{salt}", suite.prompt())
        one.salt = salt
        engine.run(one)
        engine.check()
        assert engine.num_cached(salt) == (20 if (salt, engine) == ("mine", engines[1]) else 0)
    for engine in engines:
        engine.close()


def test_what_is_kept_by_choice_is_there_after_a_clean_end(tmp_path):
    suite = shared_suite(tmp_path, keep=True)
    engine = suite.engine()
    fill(engine, suite, 0)
    engine.close()
    assert len(shelves(tmp_path)) == 1
    suite.options["keep"] = False
    engine = suite.engine()
    assert again(engine, suite, 0) == [20]
    engine.close()
    assert not shelves(tmp_path)


def test_blocks_that_were_being_written_are_not_used(tmp_path):
    suite = shared_suite(tmp_path, share=0.0)
    engine = suite.engine()
    engine.add(request("first", suite.prompt(40), 30))
    for _ in range(3):
        engine.step()
    assert engine.connector.inner._index._writing
    kill(engine)
    suite.share = 0.3
    engine = suite.engine()
    assert engine.connector.inner._index.num_used == 0
    assert again(engine, suite, 0, length=40) == [0]
    engine.close()


def test_what_was_used_last_is_adopted_as_such(tmp_path):
    suite = shared_suite(tmp_path, size=room(15))
    engine = suite.engine()
    for seed in range(3):
        fill(engine, suite, seed)
    forget(engine)
    engine.run(request("used", suite.prompt(23, seed=0)))
    kill(engine)
    engine = suite.engine()
    fill(engine, suite, 3)
    assert again(engine, suite, 0, 2, 1) == [20, 20, 0]
    engine.close()


#: Bytes of a slot's header, of a row's mark, and of rows.
def places(folder):
    (index,), rows = files(folder, "index"), files(folder, "rows-*")
    for slot in range(10):
        for field in (0, 4, 8, 16, 24, 32, 40, 63):
            yield index, SLOTS_AT + SLOT.size * slot + field
    for path in rows:
        for row in range(10):
            for field in (0, 8, 15):
                yield path, 4096 + 16 * row + field
            for field in (0, 1, 100, 511):
                yield path, 8192 + 512 * row + field


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.matrix)])
def test_flipped_bits_are_never_used(tmp_path, count):
    """Each kind of byte of headers, marks and rows, one or all at a time."""
    suite = shared_suite(tmp_path, size=room(24))
    engine = suite.engine()
    fill(engine, suite, 0, 1)
    kill(engine)
    sound = {path: path.read_bytes() for path in files(tmp_path)}
    draw = random.Random(0)
    bad = 0
    for path, place in draw.sample(list(places(tmp_path)), count):
        for one in shelves(tmp_path):
            one.rename(one.with_name("engine-left.t1p1"))
        for name, content in sound.items():
            (shelves(tmp_path)[0] / name.name).write_bytes(content)
        target = shelves(tmp_path)[0] / path.name
        content = bytearray(target.read_bytes())
        content[place] ^= 1 << draw.randrange(8)
        target.write_bytes(content)
        engine = suite.engine()
        again(engine, suite, 0, 1)
        bad += counters(engine).get("offload_checked_failed_blocks", 0)
        kill(engine)
    assert bad > count / 6


@pytest.mark.some(4)
@pytest.mark.parametrize("name", ["index", "rows-0", "rows-1"])
@pytest.mark.parametrize("size", [0, 40, 4100, -1])
def test_truncated_files_are_never_used(tmp_path, name, size):
    suite = shared_suite(tmp_path)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    fill(engine, suite, 0, 1)
    kill(engine)
    (path,) = files(tmp_path, name)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    assert again(engine, suite, 0, 1) == [0, 0]
    forget(engine)
    engine.run(request("third", suite.prompt(23)))
    assert engine.num_cached("third") == 20
    engine.close()


def punch(path):
    """Leaves a hole behind the first bytes of a file; returns its size."""
    content = path.read_bytes()
    os.truncate(path, 0)
    with path.open("r+b") as file:
        file.write(content[:64])
    os.truncate(path, len(content))
    assert path.stat().st_blocks * 512 < len(content)
    return len(content)


@pytest.mark.parametrize("name", ["index", "rows-0"])
def test_what_is_left_with_holes_takes_the_memory_that_it_lacks(tmp_path, name):
    """As of a copy that left out zeros: where no memory is left, the first write to a hole would end the process."""
    suite = shared_suite(tmp_path)
    engine = suite.engine()
    fill(engine, suite, 0)
    kill(engine)
    size = punch(path := files(tmp_path, name)[0])
    engine = suite.engine()
    (path,) = files(tmp_path, name)
    assert path.stat().st_blocks * 512 >= size
    again(engine, suite, 0)
    engine.check()
    engine.close()


@pytest.mark.parametrize("name", ["index", "rows-0"])
def test_what_is_left_with_holes_for_which_there_is_no_memory_is_made_anew(tmp_path, monkeypatch, name):
    suite = shared_suite(tmp_path)
    engine = suite.engine()
    fill(engine, suite, 0)
    kill(engine)
    punch(path := files(tmp_path, name)[0])
    fallocate, before = os.posix_fallocate, path.stat().st_ino

    def fails(descriptor, *where):
        if os.fstat(descriptor).st_ino == before:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, *where)

    kept = path.open("rb")  # else a new file could have its number
    monkeypatch.setattr(os, "posix_fallocate", fails)
    engine = suite.engine()
    (path,) = files(tmp_path, name)
    assert path.stat().st_ino != before
    kept.close()
    engine.close()


def test_weights_of_sums_are_not_made_for_each_row(tmp_path, monkeypatch):
    """They take as long to make as several rows to sum; threads that begin at once may each make some."""
    made = []
    sums = foreign_rows.RowSums
    monkeypatch.setattr(foreign_rows, "RowSums", lambda *given: made.append(given) or sums(*given))
    suite = shared_suite(tmp_path)
    first = suite.engine()
    fill(first, suite, 0, 1)
    second = suite.engine()
    again(second, suite, 0, 1)
    num_read = counters(second)["offload_shared_read_bytes"] // 512
    first.close()
    second.close()
    assert 0 < len(made) <= second.sides[0].inner._options.disk_threads < num_read


def test_a_form_that_is_not_that_of_the_rows_is_never_followed(tmp_path):
    """Here its layers have changed their places."""
    suite = shared_suite(tmp_path)
    first = suite.engine(make_layout(ranks=2), ranks=2)
    fill(first, suite, 0)
    for path in files(tmp_path, "form-*"):
        form = decode(path.read_bytes(), RowForm)
        one, other = form.layers
        swapped = [replace(one, start=other.start), replace(other, start=one.start)]
        path.write_bytes(encode(replace(form, layers=swapped)))
    second = suite.engine(make_layout())
    again(second, suite, 0)
    assert counters(second)["offload_shared_failed_blocks"] == 5
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["index", "rows-0"])
def test_what_another_engine_damages_or_removes_is_never_used(tmp_path, name):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine()
    fill(first, suite, 0, 1, 2)
    assert again(second, suite, 0) == [20]
    (path,) = (shelves(tmp_path)[0] / one for one in [name])
    content = bytearray(path.read_bytes())
    start = SLOTS_AT if name == "index" else 8192
    for place in range(start, len(content), 7):
        content[place] ^= 255
    path.write_bytes(content)
    again(second, suite, 1)
    path.unlink()
    again(second, suite, 2)
    assert counters(second)["offload_shared_read_bytes"] == 5 * 512
    second.check()
    kill(first)
    second.close()


@pytest.mark.some(3)
@pytest.mark.parametrize("shape", [{}, {"windows": (0, 6)}, {"latents": 2}], ids=str)
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_engines_of_other_numbers_of_ranks_read_what_fits(tmp_path, first, second, shape):
    suite = shared_suite(tmp_path, size=room(200))
    giver = suite.engine(make_layout(200, ranks=first, **shape), ranks=first)
    fill(giver, suite, 0, 1)
    taker = suite.engine(make_layout(200, ranks=second, **shape), ranks=second)
    assert again(taker, suite, 0) == [20]
    assert counters(taker)["offload_shared_read_bytes"] > 0
    assert "offload_shared_failed_blocks" not in counters(taker)
    kill(giver)
    assert again(taker, suite, 1) == [20]
    assert "offload_shared_failed_blocks" not in counters(taker)
    fill(taker, suite, 2)
    kill(taker)
    next_one = suite.engine(make_layout(200, ranks=first, **shape), ranks=first)
    assert again(next_one, suite, 0, 1, 2) == [20, 20, 20]
    assert "offload_shared_failed_blocks" not in counters(next_one)
    next_one.close()


@pytest.mark.parametrize("second", [2, 1])
def test_heads_that_a_backend_does_not_tell_are_read_by_the_same_rank_alone(tmp_path, monkeypatch, second):
    tell = FakeMemory.__init__

    def told(memory, *given):
        tell(memory, *given)
        for name, view in memory.views.items():
            form = dataclasses.replace(view.format, head_axis=None)
            memory.views[name] = dataclasses.replace(view, format=form, heads=None)

    monkeypatch.setattr(FakeMemory, "__init__", told)
    suite = shared_suite(tmp_path)
    first = suite.engine(make_layout(ranks=2), ranks=2)
    fill(first, suite, 0)
    other = suite.engine(make_layout(ranks=second), ranks=second)
    assert again(other, suite, 0) == [20 if second == 2 else 0]
    assert "offload_shared_failed_blocks" not in counters(other)
    first.close()
    other.close()


def test_a_slot_that_is_written_while_it_is_read_is_not_used(tmp_path):
    """The other engine gives the slot to another prompt between question and copy, or in the middle of the copy."""
    suite = shared_suite(tmp_path, size=room(6))
    first, second = suite.engine(), suite.engine()
    fill(first, suite, 0)
    slab, count = worker_of(second)._slab, 0
    take = slab.take

    def late(*given):
        nonlocal count
        count += 1
        if count == 2:
            fill(first, suite, 1, 2)
        return take(*given)

    slab.take = late
    again(second, suite, 0)
    assert counters(second)["offload_shared_failed_blocks"] > 0
    first.close()
    second.close()


def test_reset_forgets_what_neighbours_hold(tmp_path):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine()
    fill(first, suite, 0)
    assert second.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert again(second, suite, 0) == [0]
    assert first.engine.call("reset_prefix_cache", {"reset_connector": True})
    kill(first)
    third = suite.engine()
    assert third.connector.inner._index.num_used == 0
    second.close()
    third.close()


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    suite = shared_suite(tmp_path)
    root = tmp_path / "memory" / f"frame-kv-{os.geteuid()}"
    root.mkdir(parents=True)
    root.chmod(0o750)
    with pytest.raises(ValueError, match="mode 750: others could read prompts in it or plant blocks; it must be a f"):
        suite.engine()
    root.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is no folder: shared memory for blocks needs one of this user with mode 700"):
        suite.engine()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_link_is_followed(tmp_path):
    suite = shared_suite(tmp_path)
    engine = suite.engine()
    fill(engine, suite, 0)
    kill(engine)
    (rows,) = files(tmp_path, "rows-0")
    rows.rename(tmp_path / "moved")
    rows.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    engine = suite.engine()
    assert again(engine, suite, 0) == [0]
    assert (tmp_path / "moved").read_bytes() == before
    engine.close()


def test_nothing_is_left_behind(tmp_path):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine(make_layout(model="other"))
    fill(first, suite, 0)
    first.close()
    assert len(list((tmp_path / "memory").glob("*/*"))) == 1
    second.close()
    assert not list((tmp_path / "memory").iterdir())


def test_files_are_this_user_s_alone(tmp_path):
    suite = shared_suite(tmp_path)
    engine = suite.engine()
    fill(engine, suite, 0)
    for path in (tmp_path / "memory").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    engine.close()


def test_more_than_shared_memory_has_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ValueError, match=r"is to keep 0.0 GiB of blocks in shared memory, where .* GiB are free \(No"):
        shared_suite(tmp_path).engine()


def test_a_tier_larger_than_shared_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=1 << 14, f_frsize=4096))
    options = OffloadOptions(size=1, shared=True, shared_folder=tmp_path / "memory")
    with pytest.raises(
        ValueError,
        match=r"1.0 GiB of blocks are to be kept in shared memory, and .*/memory has room for 0.1 GiB: lower",
    ):
        check_options(options, 1, 1)
    check_options(OffloadOptions(size=1, shared_folder=tmp_path), 1, 1)


def test_shelves_of_engines_that_are_gone_make_room(tmp_path, monkeypatch):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(make_layout(model="a")), suite.engine(make_layout(model="b"))
    kill(first)
    monkeypatch.setattr(shelf.Shelf, "free_bytes", lambda self: 0)
    third = suite.engine(make_layout(model="c"))
    assert len(shelves(tmp_path)) == 2
    second.close()
    third.close()


def test_workers_whose_engine_died_leave_the_tier(tmp_path):
    suite = shared_suite(tmp_path)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    fill(engine, suite, 0)
    engine.connector.inner._shelf.abandon()
    for worker in engine.workers.made:
        worker.transfer.inner.close()
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    assert again(engine, suite, 0) == [20]
    engine.close()


def test_an_engine_whose_worker_died_leaves_the_tier(tmp_path):
    suite = shared_suite(tmp_path)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    fill(engine, suite, 0)
    worker_of(engine, 1)._shelf.abandon()
    engine.close()
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    assert again(engine, suite, 0) == [20]
    engine.close()
    assert not list((tmp_path / "memory").iterdir())


def test_workers_of_another_machine_leave_nothing(tmp_path):
    suite = shared_suite(tmp_path)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    fill(engine, suite, 0)
    (tmp_path / "memory").rename(tmp_path / "there")
    (tmp_path / "memory").mkdir()
    engine.connector.inner._shelf.abandon()
    (led,) = (tmp_path / "there").glob("*/*/*/engine")
    led.unlink()
    for worker in engine.workers.made:
        assert list((tmp_path / "there").glob("*/*/*/rows-*"))
        worker.transfer.inner.close()
    assert not list((tmp_path / "there").glob("*/*/*"))


def test_workers_that_outlive_their_engine_are_waited_for(tmp_path, monkeypatch):
    suite = shared_suite(tmp_path)
    engine = suite.engine()
    fill(engine, suite, 0)
    engine.connector.inner._shelf.abandon()
    worker = worker_of(engine)._shelf
    sleep = shelf.time.sleep
    monkeypatch.setattr(shelf.time, "sleep", lambda seconds: (worker.abandon(), sleep(seconds)))
    engine = suite.engine()
    assert again(engine, suite, 0) == [20]
    engine.close()


def test_no_descriptor_is_left(tmp_path):
    suite = shared_suite(tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        first, second = suite.engine(), suite.engine()
        fill(first, suite, 0)
        again(second, suite, 0)
        first.close()
        second.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def live(suite, draw, layout_of, num_prompts):
    """Two engines beside one another, killed and followed by others, whose files are damaged; returns the last ones.

    `layout_of` gives the layout of an engine of so many ranks.
    """
    folder = suite.folder

    def make():
        ranks = draw.choice([1, 2])
        sizes = {"max_num_batched_tokens": draw.choice([8, 64]), "late": draw.randrange(3)}
        made = suite.engine(layout_of(ranks), ranks=ranks, **sizes)
        lost = draw.sample(range(60), 2)
        for worker in made.workers.made:
            lose_steps(worker, lost)
        return made

    engines = [make(), make()]
    gone = set()
    for number in range(40):
        engine = draw.choice(engines)
        prompt = suite.prompt(draw.randrange(1, 40), seed=draw.randrange(num_prompts))
        engine.add(request(str(number), prompt, draw.randrange(1, 9)))
        for _ in range(draw.randrange(8)):
            draw.choice(engines).step()
        if draw.random() < 0.1:
            gone.add(str(number))
            engine.engine.abort([str(number)])
        if draw.random() < 0.1:
            engine.engine.call("reset_prefix_cache", {"reset_connector": draw.random() < 0.3})
        if draw.random() < 0.08:
            place = draw.randrange(2)
            kill(engines[place])
            name = engines[place].connector.inner._shelf.name
            left = [path for path in files(folder) if path.parent.name == name and path.stat().st_size]
            for path in draw.choices(left, k=draw.randrange(6)):
                with path.open("r+b") as file:
                    file.seek(draw.randrange(path.stat().st_size))
                    file.write(b"x")
            engines[place] = make()
        kept = sorted((folder / "disk").rglob("*.kv"))
        if kept and draw.random() < 0.2:
            path = draw.choice(kept)
            path.write_bytes(path.read_bytes()[:-1] + b"x")
    for engine in engines:
        engine.run()
        failed = {name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason == "error"}
        if names := set(engine.requests) - gone - failed:
            engine.check(*names)
        rest(engine)
    return engines


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 3 else pytest.mark.matrix) for seed in range(20)]
)
def test_random_lives(tmp_path, seed):
    """Two engines beside one another, killed and followed by others, small tiers, a disk or none: right tokens."""
    draw = random.Random(seed)
    windows = draw.choice([(0,), (0, 6)])
    suite = shared_suite(
        tmp_path,
        share=draw.choice([0.05, 0.5]),
        seed=seed,
        size=room(16 * len(windows)),
        block_size=draw.choice([0, 8]),
        policy=draw.choice(["lru", "arc"]),
        disk_folder=str(tmp_path / "disk") if draw.random() < 0.4 else "",
    )

    def layout(ranks):
        return make_layout(num_blocks=40 * len(windows), windows=windows, ranks=ranks)

    for engine in live(suite, draw, layout, num_prompts=5):
        assert not engine.connector.inner._index._readers
        engine.close()
    assert not shelves(tmp_path) or suite.number > 2


def test_what_lies_beside_shelves_or_goes_away_ends_no_start(tmp_path):
    suite = shared_suite(tmp_path)
    first = suite.engine()
    (root,) = (tmp_path / "memory").iterdir()
    (root / "stray").write_bytes(b"")
    (root / "link").symlink_to(tmp_path)
    second = suite.engine(make_layout(model="other"))
    fill(second, suite, 0)
    first.close()
    second.close()


def test_an_index_that_says_more_than_it_has_is_not_read(tmp_path):
    suite = shared_suite(tmp_path)
    first = suite.engine()
    fill(first, suite, 0)
    (path,) = files(tmp_path, "index")
    for number in (1 << 63, 1 << 50):
        with path.open("r+b") as file:
            file.seek(40)
            file.write(number.to_bytes(8, "little"))
        second = suite.engine()
        assert again(second, suite, 0) == [0]
        second.close()
    first.close()


def test_an_index_that_its_engine_makes_anew_is_read_anew(tmp_path, monkeypatch):
    """A neighbour has read what a dead engine left when the next one, of another size, takes its place."""
    monkeypatch.setattr(neighbours, "_LIST_SECONDS", 0.0)
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine()
    fill(first, suite, 0)
    kill(first)
    share = OffloadScheduler._share

    def late(*given):
        second.connector.inner._neighbours.refresh()
        share(*given)

    monkeypatch.setattr(OffloadScheduler, "_share", late)
    suite.options["size"] = room(40)
    third = suite.engine()
    fill(third, suite, 1)
    assert again(second, suite, 1) == [20]
    assert "offload_shared_failed_blocks" not in counters(second)
    second.close()
    third.close()


def test_forms_that_are_not_written_yet_are_read_later(tmp_path):
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine()
    fill(first, suite, 0, 1)
    (path,) = shelves(tmp_path)[0].glob("form-0")
    content = path.read_bytes()
    path.write_bytes(b"")
    again(second, suite, 0)
    path.write_bytes(content)
    failed = counters(second)["offload_shared_failed_blocks"]
    assert again(second, suite, 1) == [20]
    assert counters(second)["offload_shared_failed_blocks"] == failed
    first.close()
    second.close()


@pytest.mark.parametrize("kind", ["long", "row", "layer"])
def test_forms_that_can_be_of_no_row_are_passed_over(tmp_path, kind):
    """None is followed, and no memory is taken for what one says."""
    suite = shared_suite(tmp_path)
    first, second = suite.engine(), suite.engine(make_layout(ranks=2), ranks=2)
    fill(first, suite, 0)
    (path,) = shelves(tmp_path)[0].glob("form-0")
    form = decode(path.read_bytes(), RowForm)
    match kind:
        case "long":
            path.write_bytes(path.read_bytes() + bytes(2 << 20))
        case "row":
            path.write_bytes(encode(replace(form, row_bytes=1 << 40)))
        case "layer":
            path.write_bytes(encode(replace(form, layers=[replace(form.layers[0], start=-1), form.layers[1]])))
    again(second, suite, 0)
    assert counters(second)["offload_shared_failed_blocks"] > 0
    assert "offload_shared_read_bytes" not in counters(second)
    first.close()
    second.close()
