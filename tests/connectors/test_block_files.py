"""Block files: whole or not there, tied to their place, within the limit."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from frame.plugins.connectors.blocks.files import HEADER, INCOMING, ROOT, BlockFiles

KEY = bytes(range(32))
SIZE = 200
SPACE = "model/0"


def make_block(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def read(files: BlockFiles, key: bytes = KEY, space: str = SPACE) -> np.ndarray | None:
    out = np.zeros(SIZE, np.uint8)
    return out if files.read(space, key, out) else None


def path_of(folder, key=KEY, space=SPACE):
    return folder / ROOT / space / key.hex()[:2] / f"{key.hex()}.kv"


@pytest.fixture
def files(tmp_path):
    return BlockFiles(tmp_path)


def test_what_is_written_is_read_by_another_process_of_the_same_user(files, tmp_path):
    assert not files.has(SPACE, KEY)
    assert files.write(SPACE, KEY, make_block())
    other = BlockFiles(tmp_path)
    assert other.has(SPACE, KEY)
    np.testing.assert_array_equal(read(other), make_block())
    assert not other.has("other/0", KEY)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(length=st.integers(0, HEADER.size + SIZE - 1))
def test_truncated_anywhere_is_a_miss_and_is_removed(files, tmp_path, length):
    files.write(SPACE, KEY, make_block())
    path = path_of(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert read(files) is None
    assert not files.has(SPACE, KEY)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, HEADER.size + SIZE - 1), change=st.integers(1, 255))
def test_any_changed_byte_is_a_miss(files, tmp_path, at, change):
    files.write(SPACE, KEY, make_block())
    path = path_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= change
    path.write_bytes(bytes(data))
    assert read(files) is None


def test_longer_file_and_other_size_are_misses(files, tmp_path):
    files.write(SPACE, KEY, make_block())
    path_of(tmp_path).write_bytes(path_of(tmp_path).read_bytes() + b"\0")
    assert read(files) is None
    files.write(SPACE, KEY, make_block()[:-1])
    assert read(files) is None


def test_file_moved_to_another_key_or_space_is_a_miss(files, tmp_path):
    files.write(SPACE, KEY, make_block())
    other = bytes(32)
    for key, space in ((other, SPACE), (KEY, "another/1")):
        target = path_of(tmp_path, key, space)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path_of(tmp_path).read_bytes())
        assert read(files, key, space) is None


def test_a_write_that_fails_leaves_nothing(files, tmp_path, monkeypatch, caplog):
    write = files._write_whole

    def fail(*args):
        write(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_whole", fail)
    assert not files.write(SPACE, KEY, make_block())
    assert not files.write(SPACE, KEY, make_block())
    assert not files.has(SPACE, KEY)
    assert list((tmp_path / ROOT / INCOMING).iterdir()) == []
    (said,) = [record for record in caplog.records if str(tmp_path) in record.getMessage()]
    assert said.getMessage().endswith("No space left on device; set --plugin.disk.max_bytes")


def test_a_block_that_cannot_be_published_leaves_nothing(files, tmp_path):
    path_of(tmp_path).mkdir(parents=True)
    assert not files.write(SPACE, KEY, make_block())
    assert list((tmp_path / ROOT / INCOMING).iterdir()) == []


def test_leftovers_of_dead_processes_are_removed_at_the_start(files, tmp_path):
    old, new = (tmp_path / ROOT / INCOMING / name for name in ("1-dead", "2-alive"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    BlockFiles(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_the_limit_holds_and_the_least_used_go_first(tmp_path):
    limit = 10 * (SIZE + HEADER.size)
    files = BlockFiles(tmp_path, max_bytes=limit)
    keys = [bytes([i]) * 32 for i in range(30)]
    for i, key in enumerate(keys):
        assert files.write(SPACE, key, make_block(i))
        os.utime(path_of(tmp_path, key), (1000 + i, 1000 + i))
        if i == 5:
            read(files, keys[0])  # used a moment ago
        held = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        assert held <= limit
    assert files.has(SPACE, keys[0])
    assert files.has(SPACE, keys[29])
    assert not files.has(SPACE, keys[1])


def test_a_block_above_the_limit_is_not_stored(tmp_path):
    files = BlockFiles(tmp_path, max_bytes=SIZE)
    assert not files.write(SPACE, KEY, make_block())


def test_files_beside_ours_are_left_alone(tmp_path):
    mine = tmp_path / "thesis.txt"
    mine.write_text("x" * 10000)
    files = BlockFiles(tmp_path, max_bytes=2 * (SIZE + HEADER.size))
    for i in range(5):
        files.write(SPACE, bytes([i]) * 32, make_block(i))
    files.clear("model")
    assert mine.exists()
    assert not files.has(SPACE, bytes([4]) * 32)


def test_folder_is_closed_to_others(files, tmp_path):
    assert (tmp_path / ROOT).stat().st_mode & 0o777 == 0o700
    files.write(SPACE, KEY, make_block())
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600
    (tmp_path / ROOT).chmod(0o777)
    with pytest.raises(ValueError, match="mode 777: others could read"):
        BlockFiles(tmp_path)


def test_a_file_of_another_user_is_a_miss(files, monkeypatch):
    """Whoever may write to the folder above can put another in the place of the one that was checked at the start."""
    files.write("s", KEY, block := make_block())
    files.write_record("s", "r", b"record")
    other = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other)
        assert not files.read("s", KEY, np.zeros_like(block), remove=False)
        assert files.record("s", "r", 100) is None
    assert files.read("s", KEY, np.zeros_like(block))
    assert files.record("s", "r", 100) == b"record"


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"the folder of the disk connector, .*taken, cannot be used"):
        BlockFiles(tmp_path / "taken")


def test_readers_see_whole_blocks_while_several_write(tmp_path):
    """Every writer of a key writes the same bytes; a reader gets them or a miss, whatever the others do."""
    writers = [BlockFiles(tmp_path, max_bytes=6 * (SIZE + HEADER.size)) for _ in range(3)]
    keys = [bytes([i]) * 32 for i in range(8)]
    wrong, stop = [], threading.Event()

    def write(files):
        while not stop.is_set():
            for i, key in enumerate(keys):
                files.write(SPACE, key, make_block(i))

    threads = [threading.Thread(target=write, args=(files,)) for files in writers]
    for thread in threads:
        thread.start()
    reader, hits = BlockFiles(tmp_path), 0
    end, last = time.monotonic() + 1.0, time.monotonic() + 60.0
    try:
        while time.monotonic() < (end if hits else last):
            for i, key in enumerate(keys):
                found = read(reader, key)
                if found is not None:
                    hits += 1
                    if not np.array_equal(found, make_block(i)):
                        wrong.append(i)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert hits > 0


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_a_miss_and_nobody_waits(files, tmp_path, kind):
    files.write(SPACE, KEY, make_block())
    path = path_of(tmp_path)
    path.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    assert read(files) is None
    assert path.exists() == (kind == "folder")
