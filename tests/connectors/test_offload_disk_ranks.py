"""The disk behind the tier between engines of other parallel sizes, and the records that say how their rows lie."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from frame.interfaces import encode
from frame.plugins.connectors.blocks.files import HEADER, ROOT, BlockFiles
from frame.plugins.connectors.offload import disk as offload_disk, disk_forms, states as offload_states
from frame.plugins.connectors.offload.disk_forms import VERSION, DiskForms, EngineForms, WorkerForm
from frame.plugins.connectors.offload.row_forms import LayerForm, RowForm
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.test_offload import ROW, room
from tests.connectors.test_offload_disk import counters, disk_suite, fill, rest

SHAPES = {
    "full": {},
    "sliding": {"windows": (0, 6)},
    "latents": {"windows": (0,), "latents": 2},
    "states": {"windows": (0, 6), "strides": (1, 2), "states": 4, "checkpoints": 12},
    "states alone": {"windows": (), "states": 4, "checkpoints": 12},
}
SEEDS = range(4)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Other work on this machine must not make a disk look as if it did not answer."""
    monkeypatch.setattr(offload_disk, "LOOKUP_SECONDS", 60.0)


@pytest.fixture
def small(monkeypatch):
    """Options of a tier that holds but a few prompts of a shape."""

    def options(shape):
        if not shape.get("windows", (0,)):
            return {"size": room(3, 64)}
        monkeypatch.setattr(offload_states, "STATE_SHARE", 0.01)
        return {"size": room(*((16, 4 * ROW) if "states" in shape else (24, (1 + len(shape)) * ROW)))}

    return options


def layout_of(shape, ranks, **more):
    return make_layout(200, ranks=ranks, **shape, **more)


def written(suite, layout, ranks):
    """Has an engine of so many ranks leave prompts on the disk."""
    engine = suite.engine(layout, ranks=ranks)
    fill(engine, suite, SEEDS)
    press(engine, suite)
    engine.close()


def press(engine, suite):
    """Has all go to the disk that was used before."""
    fill(engine, suite, range(100, 110))
    assert "offload_disk_lost_blocks" not in counters(engine)


def asked(engine, suite, seeds=SEEDS):
    for seed in seeds:
        engine.run(request(f"again-{seed}", suite.prompt(23, seed=seed)))
        rest(engine)
    engine.check()
    return [engine.num_cached(f"again-{seed}") for seed in seeds]


def records(folder):
    return sorted(path for path in (folder / "disk" / ROOT / "forms").rglob("*") if path.is_file())


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("block_size", [0, pytest.param(16, marks=pytest.mark.matrix)])
def test_engines_of_other_numbers_of_ranks_read_the_disk(tmp_path, small, first, second, shape, block_size):
    suite = disk_suite(tmp_path, block_size=block_size, **small(shape))
    written(suite, layout_of(shape, first), first)
    suite.options["size"] = 0.01
    engine = suite.engine(layout_of(shape, second), ranks=second)
    length = 16 if block_size and shape.get("windows", (0,)) else 22 // engine.layout.grain * engine.layout.grain
    found = asked(engine, suite)
    assert found == [length] * 4
    told = counters(engine)
    assert told["offload_disk_read_bytes"] > 0
    assert not {"offload_disk_failed_blocks", "offload_failed_blocks"} & set(told)
    engine.close()


def test_what_was_read_of_others_is_written_as_its_own(tmp_path, small):
    """And found by engines of either size when the others' files are gone."""
    suite = disk_suite(tmp_path, **small({}))
    written(suite, layout_of({}, 1), 1)
    theirs = list((tmp_path / "disk").rglob("*.kv"))
    engine = suite.engine(layout_of({}, 2), ranks=2)
    assert asked(engine, suite) == [20] * 4
    press(engine, suite)
    engine.close()
    for path in theirs:
        path.unlink()
    suite.options["size"] = 0.01
    for ranks in (1, 2):
        engine = suite.engine(layout_of({}, ranks), ranks=ranks)
        assert asked(engine, suite) == [20] * 4
        engine.close()


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "long", "none"])
def test_without_a_sound_record_nothing_is_read(tmp_path, small, damage):
    suite = disk_suite(tmp_path, **small({}))
    written(suite, layout_of({}, 1), 1)
    (path,) = records(tmp_path)
    data = bytearray(path.read_bytes())
    data[HEADER.size + 10] ^= 1
    match damage:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "flipped":
            path.write_bytes(data)
        case "long":
            path.write_bytes(path.read_bytes() + bytes(disk_forms.MOST_BYTES))
    suite.options["size"] = 0.01
    engine = suite.engine(layout_of({}, 2), ranks=2)
    assert asked(engine, suite) == [20 if damage == "none" else 0] * 4
    assert "offload_disk_failed_blocks" not in counters(engine)
    engine.close()
    # its own engine misses nothing, and gives it back
    engine = suite.engine(layout_of({}, 1))
    assert asked(engine, suite) == [20] * 4
    engine.close()
    assert path in records(tmp_path)


def test_a_record_that_goes_while_its_engine_runs_is_written_again(tmp_path, small, monkeypatch):
    monkeypatch.setattr(offload_disk, "TOUCH_SECONDS", 0.0)
    suite = disk_suite(tmp_path, **small({}))
    engine = suite.engine(layout_of({}, 1))
    (path,) = records(tmp_path)
    path.unlink()
    fill(engine, suite, SEEDS)
    engine.connector.inner._disk._thread.submit(int).result()
    assert records(tmp_path) == [path]
    engine.close()


@pytest.mark.parametrize("shape", ["full", "states alone"])
def test_damaged_files_of_others_are_computed_and_left_alone(tmp_path, small, shape):
    shape = SHAPES[shape]
    suite = disk_suite(tmp_path, **small(shape))
    written(suite, layout_of(shape, 2), 2)
    files = sorted((tmp_path / "disk").rglob("*.kv"))
    for path in files:
        if "/1-" in str(path):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    suite.options["size"] = 0.01
    engine = suite.engine(layout_of(shape, 1))
    assert asked(engine, suite, range(3)) == [0] * 3
    assert counters(engine)["offload_disk_failed_blocks"] > 0
    assert sorted((tmp_path / "disk").rglob("*.kv")) == files
    engine.close()


@pytest.mark.parametrize("other", [{"model": "other"}, {"block_size": 8}, {"windows": (0, 6)}], ids=str)
def test_engines_of_other_models_stay_apart(tmp_path, small, other):
    suite = disk_suite(tmp_path, **small({}))
    written(suite, layout_of({}, 1), 1)
    engine = suite.engine(make_layout(200, ranks=2, **other), ranks=2)
    assert asked(engine, suite) == [0] * 4
    assert "offload_disk_failed_blocks" not in counters(engine)
    engine.close()


@pytest.mark.parametrize("shape", ["full", "states alone"])
def test_heads_and_states_that_are_not_told_are_not_read_by_others(tmp_path, small, shape, monkeypatch):
    tell = FakeMemory.__init__

    def told(memory, *given):
        tell(memory, *given)
        for name, view in memory.views.items():
            form = dataclasses.replace(view.format, head_axis=None)
            memory.views[name] = dataclasses.replace(view, format=form, heads=None, runs=())

    monkeypatch.setattr(FakeMemory, "__init__", told)
    shape = SHAPES[shape]
    suite = disk_suite(tmp_path, **small(shape))
    written(suite, layout_of(shape, 2), 2)
    suite.options["size"] = 0.01
    for ranks in (1, 2):
        engine = suite.engine(layout_of(shape, ranks), ranks=ranks)
        assert asked(engine, suite, range(3)) == [0 if ranks == 1 else 20] * 3
        assert "offload_disk_failed_blocks" not in counters(engine)
        engine.close()


@pytest.mark.parametrize("shape", ["full", "states alone"])
def test_reset_removes_what_others_wrote_and_reads_no_more_of_it(tmp_path, small, shape):
    shape = SHAPES[shape]
    suite = disk_suite(tmp_path, **small(shape))
    written(suite, layout_of(shape, 1), 1)
    engine = suite.engine(layout_of(shape, 2), ranks=2)
    assert engine.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert not list((tmp_path / "disk").rglob("*.kv"))
    written(suite, layout_of(shape, 1), 1)
    assert asked(engine, suite) == [0] * 4
    engine.close()
    suite.options["size"] = 0.01
    engine = suite.engine(layout_of(shape, 2), ranks=2)
    assert asked(engine, suite)[0] == 20
    engine.close()


def test_no_memory_is_taken_for_what_a_record_says(tmp_path, small, caplog):
    suite = disk_suite(tmp_path, **small({}))
    written(suite, layout_of({}, 1), 1)
    (path,) = records(tmp_path)
    forms = DiskForms(BlockFiles(tmp_path / "disk"), path.parent.name, "")
    (worker,) = forms.of(path.name).workers
    rows = msgspec.structs.replace(worker.rows, row_bytes=1 << 40)
    forms.publish(path.name[:32], EngineForms(VERSION, [msgspec.structs.replace(worker, rows=rows)]))
    suite.options["size"] = 0.01
    engine = suite.engine(layout_of({}, 2), ranks=2)
    assert asked(engine, suite, range(2)) == [0] * 2
    assert counters(engine)["offload_disk_failed_blocks"] > 0
    assert not [one for one in caplog.records if one.exc_info]
    engine.close()


LAYER = LayerForm("a", 0, 1, 32, (2, 4), (0, 1), "torch.float32", 0, 0, (0, 2), 2)
RECORD = EngineForms(VERSION, [WorkerForm("0123456789abcdef", RowForm(32, [LAYER]))])


@pytest.mark.parametrize(
    "record",
    [
        EngineForms(VERSION + 1, RECORD.workers),
        EngineForms(VERSION, []),
        EngineForms(VERSION, RECORD.workers * 1025),
        EngineForms(VERSION, [WorkerForm("../../../etc/../x", RECORD.workers[0].rows)]),
        EngineForms(VERSION, [WorkerForm("0123456789abcdef", RowForm(31, [LAYER]))]),
        EngineForms(VERSION, [WorkerForm("0123456789abcdef", RowForm(1 << 50, [LAYER]))]),
        EngineForms(VERSION, [WorkerForm("0123456789abcdef", RowForm(32, [msgspec.structs.replace(LAYER, start=-1)]))]),
    ],
    ids=["version", "none", "many", "path", "small", "large", "layer"],
)
def test_a_record_that_can_be_of_no_engine_is_passed_over(tmp_path, record, monkeypatch):
    assert EngineForms.read(encode(RECORD)) == RECORD
    with pytest.raises(ValueError, match=r"^(a record|a worker|a row|a layer)"):
        EngineForms.read(encode(record))
    forms = DiskForms(BlockFiles(tmp_path), "s" * 32, "")
    name = forms.publish("a" * 32, RECORD)
    assert forms.of(name) == RECORD
    forms.publish("b" * 32, record)
    forms._files.write_record(forms._space, "what else lies there", encode(RECORD))
    assert DiskForms(BlockFiles(tmp_path), "s" * 32, "").all() == {name: RECORD}


def test_records_of_any_bytes_end_no_reader():
    draw = random.Random(0)
    for _ in range(3000):
        data = bytearray(encode(RECORD))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = EngineForms.read(bytes(data[: draw.choice([len(data), draw.randrange(len(data))])]))
        except ValueError:
            continue
        assert all(layer.start >= 0 for form in found.forms for layer in form.layers)


def test_a_long_record_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_forms, "MOST_BYTES", 50)
    monkeypatch.setattr(disk_forms, "decode", None)
    files = BlockFiles(tmp_path)
    forms = DiskForms(files, "s" * 32, "")
    forms.publish("a" * 32, RECORD)
    assert forms.all() == {}
    with pytest.raises(ValueError, match=r"^a record has more bytes"):
        EngineForms.read(bytes(51))


def test_no_link_is_followed_to_a_record(tmp_path):
    files = BlockFiles(tmp_path)
    forms = DiskForms(files, "s" * 32, "")
    name = forms.publish("a" * 32, RECORD)
    path = tmp_path / ROOT / forms._space / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert DiskForms(files, "s" * 32, "").all() == {}


def test_files_of_other_names_hide_no_record(tmp_path):
    files = BlockFiles(tmp_path)
    forms = DiskForms(files, "s" * 32, "")
    name = forms.publish("a" * 32, RECORD)
    for number in range(disk_forms.MOST_RECORDS):
        (tmp_path / ROOT / forms._space / f"{number:03}").touch()
    assert DiskForms(files, "s" * 32, "").all() == {name: RECORD}
