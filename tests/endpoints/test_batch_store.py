from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from frame.core.interfaces import RequestError
from frame.plugins.endpoints.batch_files import FileStore
from frame.plugins.endpoints.batch_runs import BatchRecord, BatchStore


def test_open_batches_are_bounded_for_each_owner_and_owners_take_turns(tmp_path: Path) -> None:
    files = FileStore(tmp_path, 10, 1000)
    store = BatchStore(SimpleNamespace(model_names=["m"]), files, tmp_path, max_open=2, max_lines=5)

    def add(owner: str) -> BatchRecord:
        path = files.new_path()
        path.write_bytes(b"{}")
        return store.add(owner, "/v1/x", files.add(path, owner, "in", "batch").id, "24h", None)

    assert store._next("") is None
    first, second = add("one"), add("one")
    with pytest.raises(RequestError, match="2 batches are open"):
        add("one")
    other = add("two")
    assert store._next("one") == other
    assert store._next("two") in (first, second)  # made in the same second
    other.ends("completed")
    store._write(other)
    assert store._next("one") in (first, second)
