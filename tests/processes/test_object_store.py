"""Objects in shared memory stay while a reader is to take them, make room in order, and are never mistaken."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from frame.core.interfaces.wire import decode, encode
from frame.links.object_store import (
    ObjectReader,
    ObjectStore,
    StaleObjectError,
    StoredObject,
    StoreFullError,
)

HEADER = 64


@contextlib.contextmanager
def opened(num_bytes: int, num_readers: int) -> Iterator[tuple[ObjectStore, list[ObjectReader]]]:
    store = ObjectStore(num_bytes, num_readers)
    readers = [ObjectReader(os.dup(store.memory), num_readers, reader) for reader in range(num_readers)]
    try:
        yield store, readers
    finally:
        for one in (*readers, store):
            one.close()
            one.close()


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[ObjectStore, list[ObjectReader]]]]:
    with contextlib.ExitStack() as stack:
        yield lambda num_bytes=4096, num_readers=2: stack.enter_context(opened(num_bytes, num_readers))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"abc",
        np.zeros((0, 3), np.float32),
        np.array(5.0),
        np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(4, dtype=">i8"),
        np.array([True, False]),
    ],
    ids=["no bytes", "bytes", "empty", "scalar", "transposed", "big-endian", "bool"],
)
def test_every_reader_gets_what_was_put(make, value):
    store, readers = make()
    stored = decode(encode(store.put("a", value)), StoredObject)
    for reader in readers:
        got = reader.get(stored)
        if isinstance(value, bytes):
            assert got == value
        else:
            np.testing.assert_array_equal(got, value)
            assert got.shape == value.shape
            assert got.flags.writeable
    assert "a" in store
    assert store.holders("a") == []


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.zeros(2, np.complex64)])
def test_other_arrays_are_refused(make, value):
    store, _ = make()
    with pytest.raises(ValueError, match="is not accepted"):
        store.put("a", value)
    assert "a" not in store


def test_other_objects_are_refused(make):
    store, _ = make()
    with pytest.raises(ValueError, match="an object store takes arrays and bytes, not dict"):
        store.put("a", {})


def test_a_key_is_put_once_and_touched_after(make):
    store, readers = make()
    stored = store.put("a", b"x")
    with pytest.raises(ValueError, match="holds 'a' already; touch it"):
        store.put("a", b"y")
    assert store.touch("a") == stored
    with pytest.raises(KeyError):
        store.touch("b")
    readers[0].get(stored)
    readers[0].get(stored)
    readers[1].get(stored)
    assert store.holders("a") == [1]  # which has taken it once, of two times
    readers[1].skip(stored)
    assert store.holders("a") == []


def test_the_oldest_makes_room_and_what_is_held_stays(make):
    store, (reader,) = make(4 * (HEADER + 64), 1)
    kept = {name: store.put(name, name.encode() * 64) for name in "abcd"}
    with pytest.raises(
        StoreFullError, match=r"no room for 64 bytes of 'e': readers \[0\] hold the oldest of its 4 .*'a'"
    ):
        store.put("e", b"e" * 64)
    reader.get(kept["b"])  # not the oldest
    with pytest.raises(StoreFullError):
        store.put("e", b"e" * 64)
    reader.get(kept["a"])
    new = store.put("e", b"e" * 64)
    assert [name in store for name in "abcde"] == [False, True, True, True, True]
    assert new.offset == kept["a"].offset
    with pytest.raises(StaleObjectError, match="is not in the store any more"):
        reader.get(kept["a"])
    for name in "cd":
        assert reader.get(kept[name]) == name.encode() * 64
    assert reader.get(new) == b"e" * 64


def test_what_does_not_fit_before_the_end_begins_at_the_start(make):
    store, (reader,) = make(1024, 1)
    for value in (b"a" * 400, b"b" * 200):
        reader.get(store.put(value[:1].decode(), value))
    stored = store.put("c", b"c" * 300)  # 280 bytes are left at the end
    assert stored.offset == 0
    assert ["a" in store, "b" in store] == [False, True]
    assert reader.get(stored) == b"c" * 300


def test_the_largest_object_fits_and_a_larger_one_never_does(make):
    store, (reader,) = make(1024, 1)
    with pytest.raises(ValueError, match="'a' of 961 bytes is too large for a store of at most 960"):
        store.put("a", bytes(961))
    for key in "ab":
        assert reader.get(store.put(key, bytes(960))) == bytes(960)
    assert "a" not in store


def test_a_borrowed_object_is_held_until_the_end_also_of_an_error(make):
    store, (reader,) = make(1024, 1)
    stored = store.put("a", np.arange(200, dtype=np.int32))

    def fail():
        with reader.borrow(stored) as view:
            assert not view.flags.writeable
            assert store.holders("a") == [0]
            raise KeyError("consumer")

    with pytest.raises(KeyError, match="consumer"):
        fail()
    assert store.holders("a") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 1}, "no object of 12 bytes lies at 1 of 4096"),
        ({"offset": -64}, "no object of 12 bytes lies at -64"),
        ({"offset": 1 << 40}, "no object of 12 bytes lies at"),
        ({"num_bytes": -1, "dtype": ""}, "no object of -1 bytes"),
        ({"shape": (4,)}, r"12 bytes are no <i4 of shape \[4\]"),
        ({"shape": (-1, -3)}, r"12 bytes are no <i4 of shape \[-1, -3\]"),
        ({"dtype": "|O"}, "is not accepted"),
    ],
)
def test_what_no_store_handed_out_is_refused(make, change, message):
    store, readers = make()
    stored = store.put("a", np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        readers[0].get(msgspec.structs.replace(stored, **change))
    assert store.holders("a") == [0, 1]


@pytest.mark.parametrize("change", [{"id": 1}, {"offset": 64}, {"num_bytes": 4, "shape": (1,)}])
def test_another_object_is_never_given_instead(make, change):
    store, readers = make()
    stored = store.put("a", np.arange(3, dtype=np.int32))
    with pytest.raises(StaleObjectError):
        readers[0].get(msgspec.structs.replace(stored, **change))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 12), st.integers(0, 700)),
            st.tuples(st.just("touch"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("take"), st.integers(0, 12), st.integers(0, 1)),
        ),
        max_size=80,
    )
)
def test_any_order_of_use(actions: list[tuple[str, int, int]]) -> None:
    """Against a dictionary: nothing held goes, what goes is the oldest, and what is there is what was put."""
    with opened(2048, 2) as (store, readers):
        known: dict[str, tuple[StoredObject, bytes]] = {}
        owed: Counter[tuple[str, int]] = Counter()
        for place, (action, name, number) in enumerate(actions):
            key = str(name)
            if action == "put" and key not in store:
                value = bytes([place % 251]) * number
                before = [one for one in known if one in store]
                try:
                    stored = store.put(key, value)
                except StoreFullError:
                    stored = None
                left = [one for one in before if one in store]
                assert left == before[len(before) - len(left) :]  # only the oldest went
                assert not any(owed[one, reader] for one in before if one not in store for reader in (0, 1))
                for one in before:
                    if one not in store:
                        with pytest.raises(StaleObjectError):
                            readers[0].get(known.pop(one)[0])
                if stored is not None:
                    known[key] = stored, value
                    owed[key, 0] = owed[key, 1] = 1
            elif action == "touch" and key in store:
                store.touch(key)
                owed[key, 0] += 1
                owed[key, 1] += 1
            elif action == "take" and owed[key, number]:
                owed[key, number] -= 1
                assert readers[number].get(known[key][0]) == known[key][1]
        for key, (stored, value) in known.items():
            assert store.holders(key) == [reader for reader in (0, 1) if owed[key, reader]]
            with readers[0].borrow(stored) as view:
                assert bytes(view) == value


def test_a_reader_in_another_process_takes_objects_and_may_be_killed():
    code = """
import sys
from frame.core.interfaces.wire import decode
from frame.links.object_store import ObjectReader, StoredObject
reader = ObjectReader(int(sys.argv[1]), 1, 0)
for line in sys.stdin:
    print(reader.get(decode(bytes.fromhex(line), StoredObject)).sum(), flush=True)
"""
    store = ObjectStore(1 << 16, 1)
    memory = os.dup(store.memory)
    command = [sys.executable, "-c", code, str(memory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[memory]
    ) as process:
        os.close(memory)
        for number in range(50):  # more than the store holds at a time
            stored = store.put(str(number), np.full(1000, number, np.int64))
            process.stdin.write(encode(stored).hex() + "\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) == 1000 * number
            assert store.holders(str(number)) == []
        process.kill()
    store.put("next", b"x")
    assert store.holders("next") == [0]
    store.close()


@pytest.mark.parametrize(("num_bytes", "num_readers"), [(0, 1), (100, 1), (128, 0)])
def test_a_store_that_cannot_be_is_refused(num_bytes, num_readers):
    with pytest.raises(ValueError, match="an object store has a multiple of 64 bytes and a reader"):
        ObjectStore(num_bytes, num_readers)


def test_nothing_stays_behind():
    before = len(os.listdir("/proc/self/fd"))
    shared = set(os.listdir("/dev/shm"))
    with opened(4096, 3):
        assert set(os.listdir("/dev/shm")) == shared
    with pytest.raises(ValueError, match="there is no reader 1 of 1"):
        ObjectReader(os.dup(2), 1, 1)
    assert len(os.listdir("/proc/self/fd")) == before
