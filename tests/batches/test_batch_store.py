from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from frame.interfaces import RequestError, RouteAnswer
from frame.plugins.batches import files as batch_files, store as batch_runs
from frame.plugins.batches.endpoint import BatchesEndpoint, BatchesOptions
from frame.plugins.batches.files import FileStore
from frame.plugins.batches.store import BatchRecord, BatchStore
from frame.testing import FakeServing, make_setup


def test_open_batches_are_bounded_for_each_owner_and_those_of_an_owner_run_in_order(tmp_path: Path) -> None:
    files = FileStore(tmp_path, 10, 1000)
    store = BatchStore(SimpleNamespace(models=SimpleNamespace(names=["m"])), files, tmp_path, max_open=2, max_lines=5)

    def add(owner: str) -> BatchRecord:
        path = files.new_path()
        path.write_bytes(b"{}")
        return store.add(owner, "/v1/x", files.add(path, owner, "in", "batch").id, "24h", None)

    assert store._due() == []
    first, second = add("one"), add("one")
    with pytest.raises(RequestError, match="2 batches are open"):
        add("one")
    other = add("two")
    assert {each.owner for each in store._due()} == {"one", "two"}
    assert store._due({"one"}) == [other]
    other.ends("completed")
    store._write(other)
    (due,) = store._due()
    assert due in (first, second)  # made in the same second


def test_an_owner_of_many_ended_batches_keeps_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runs, "_MAX_ENDED", 4)
    files = FileStore(tmp_path, 10, 1000)
    store = BatchStore(SimpleNamespace(models=SimpleNamespace(names=["m"])), files, tmp_path, max_open=2, max_lines=5)
    path = files.new_path()
    path.write_bytes(b"{}")
    name = {"one": files.add(path, "one", "in", "batch").id}
    path.write_bytes(b"{}")
    name["two"] = files.add(path, "two", "in", "batch").id
    for owner in ("one", "two", "two", "two", "two", "two"):
        record = store.add(owner, "/v1/x", name[owner], "24h", None)
        record.ends("completed")
        store._write(record)
    assert sorted(record.owner for record in store.records()) == ["one", "two", "two", "two"]


LINE = '{"custom_id": "%s", "url": "/v1/x", "body": {"name": "%s"}}\n'


class Killed(BaseException):
    """Nobody cleans up after it."""


class Answering:
    """Answers each line once, or says that it did so twice."""

    paths = ("/v1/x",)
    max_body_bytes = 1000
    error = None

    def __init__(self) -> None:
        self.models = SimpleNamespace(names=("m",))
        self.engine = self.batches = self
        self.answered: list[str] = []

    def parse(self, body: bytes) -> Any:
        return json.loads(body)

    async def read(self, body: bytes) -> Any:
        return self.parse(body)

    def delay(self, owner: str) -> float:
        return 0

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        self.answered.append(body["name"])
        return RouteAnswer(400 if body["name"] == "bad" else 200, {})


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("deadly", [1, 2, 3, 4, 5])
async def test_a_batch_that_ended_when_the_server_did_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: int, after: bool
) -> None:
    """The process is killed at each of its writes, before or after it."""
    plain_write, num_writes = batch_files.write_json, 0

    def write(path: Path, value: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == deadly and not after:
            raise Killed
        plain_write(path, value)
        if num_writes == deadly:
            raise Killed

    serving, files = Answering(), FileStore(tmp_path, 10, 1000)
    store = BatchStore(serving, files, tmp_path, max_open=2, max_lines=5)
    path = files.new_path()
    path.write_text("".join(LINE % (name, name) for name in ("a", "bad", "c")))
    record = store.add("me", "/v1/x", files.add(path, "me", "in", "batch").id, "24h", None)
    with monkeypatch.context() as patched:
        for module in (batch_files, batch_runs):
            patched.setattr(module, "write_json", write)
        with pytest.raises(Killed):
            await store._answer(record)
    due = store._due()
    assert (not due) == (after and deadly == 5)
    for left in due:
        await store._answer(left)
    done = store.get(record.id, "me")
    assert (done.status, done.num_succeeded, done.num_failed) == ("completed", 2, 1)
    assert serving.answered == ["a", "bad", "c"]
    with files.open(done.output_file_id or "", "me") as rows:
        assert rows.read().count(b"\n") == 2
    with files.open(done.error_file_id or "", "me") as rows:
        assert rows.read().count(b"\n") == 1


class Deleting(Answering):
    """Somebody deletes the input after the first line."""

    def __init__(self, delete: Callable[[], None]) -> None:
        super().__init__()
        self._delete = delete

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        answer = await super().post(path, body, owner)
        self._delete()
        return answer


async def test_an_input_file_may_be_deleted_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_runs, "_POLL_SECONDS", 0.01)
    files = FileStore(tmp_path, 10, 1000)
    inputs = []
    for _ in range(3):
        path = files.new_path()
        path.write_text("".join(LINE % (number, number) for number in range(3)))
        inputs.append(files.add(path, "me", "in", "batch"))
    store = BatchStore(Deleting(lambda: files.delete(inputs[0])), files, tmp_path, max_open=3, max_lines=5)
    during, before, between = [store.add("me", "/v1/x", each.id, "24h", None) for each in inputs]
    files.delete(inputs[1])
    (tmp_path / "files" / f"{inputs[2].id}.jsonl").unlink()  # as between looking it up and opening it
    running = asyncio.create_task(store._run())
    async with asyncio.timeout(30):
        while store._due():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    ended = store.get(during.id, "me")
    assert (ended.status, ended.num_succeeded) == ("completed", 3)
    for lost, message in ((before, "no file"), (between, "it was deleted")):
        ended = store.get(lost.id, "me")
        assert ended.status == "failed"
        assert ended.errors is not None
        assert message in ended.errors["data"][0]["message"]
    assert [record for record in caplog.records if record.name.startswith("frame")] == []


class Waiting(Answering):
    """Lines named "long" wait until `go`; counts how many run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.num_running = 0

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        if body["name"] == "long":
            self.num_running += 1
            await self.go.wait()
            self.num_running -= 1
        return await super().post(path, body, owner)


async def test_a_long_batch_of_one_owner_keeps_nobody_elses_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "_WIDTH", 4)
    serving, files = Waiting(), FileStore(tmp_path, 10, 100_000)
    store = BatchStore(serving, files, tmp_path, max_open=3, max_lines=50)

    def add(owner: str, name: str, count: int) -> BatchRecord:
        path = files.new_path()
        path.write_text("".join(LINE % (number, name) for number in range(count)))
        return store.add(owner, "/v1/x", files.add(path, owner, "in", "batch").id, "24h", None)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    running = asyncio.create_task(store._run())
    long = add("one", "long", 20)
    next_long = add("one", "short", 1)
    await until(lambda: serving.num_running == 4)
    short = add("two", "short", 3)
    await until(lambda: store.get(short.id, "two").status == "completed")
    assert store.get(next_long.id, "one").status == "validating"
    other = add("two", "long", 20)
    await until(lambda: serving.num_running == 6)  # the lines of the first that run already, and half of four
    serving.go.set()
    await until(lambda: not store._due())
    assert [store.get(each.id, each.owner).num_succeeded for each in (long, next_long, other)] == [20, 1, 20]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("turns", range(5))
async def test_a_store_that_is_cancelled_while_a_batch_wakes_it_stops(tmp_path: Path, turns: int) -> None:
    store = BatchStore(Answering(), FileStore(tmp_path, 10, 1000), tmp_path, max_open=2, max_lines=5)
    running = asyncio.create_task(store._run())
    while not store._woken._waiters:  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
    store._woken.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=1)
    running.cancel()
    assert done, "the store went on after it was cancelled"


async def test_a_batch_whose_results_cannot_be_written_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "_RETRY_SECONDS", 0.01)
    serving, files = Answering(), FileStore(tmp_path, 10, 1000)
    store = BatchStore(serving, files, tmp_path, max_open=2, max_lines=5)
    path = files.new_path()
    path.write_text("".join(LINE % (name, name) for name in ("a", "b")))
    record = store.add("me", "/v1/x", files.add(path, "me", "in", "batch").id, "24h", None)
    plain_end, full = store._end, [True]

    def end(*arguments: Any) -> None:
        if full.pop() if full else False:
            raise OSError(28, "No space left on device")
        plain_end(*arguments)

    monkeypatch.setattr(store, "_end", end)
    running = asyncio.create_task(store._run())
    async with asyncio.timeout(30):
        while store._due():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert store.get(record.id, "me").status == "completed"
    assert sorted(serving.answered) == ["a", "b"]


async def test_a_batch_that_fails_long_after_its_time_ends_so_that_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(batch_runs, "_GRACE_SECONDS", -batch_runs._WINDOW_SECONDS - 60)  # as if that had passed
    files = FileStore(tmp_path, 10, 1000)
    store = BatchStore(Answering(), files, tmp_path, max_open=2, max_lines=5)

    def add() -> BatchRecord:
        path = files.new_path()
        path.write_text(LINE % ("a", "a"))
        return store.add("me", "/v1/x", files.add(path, "me", "in", "batch").id, "24h", None)

    broken, sound = add(), add()
    plain_end = store._end

    def end(record: BatchRecord, *paths: Path) -> None:
        if record.id == broken.id:
            raise OSError(28, "No space left on device")
        plain_end(record, *paths)

    monkeypatch.setattr(store, "_end", end)
    running = asyncio.create_task(store._run())
    async with asyncio.timeout(30):
        while store._due():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [store.get(each.id, "me").status for each in (broken, sound)] == ["failed", "completed"]


async def test_a_batch_that_was_cancelled_or_half_done_does_not_need_its_input_file_any_more(tmp_path: Path) -> None:
    files = FileStore(tmp_path, 10, 1000)
    store = BatchStore(Answering(), files, tmp_path, max_open=3, max_lines=5)

    def add() -> BatchRecord:
        path = files.new_path()
        path.write_text("".join(LINE % (number, number) for number in range(3)))
        return store.add("me", "/v1/x", files.add(path, "me", "in", "batch").id, "24h", None)

    cancelled, half_done, half_cancelled = add(), add(), add()
    for record in (half_done, half_cancelled):  # by a server that ended
        (tmp_path / "batches" / f"{record.id}.output.jsonl").write_text('{"id": "0"}\n')
    for record in (cancelled, half_done, half_cancelled):
        files.delete(files.get(record.input_file_id, "me"))
    store.cancel(cancelled)
    store.cancel(half_cancelled)
    for record in (cancelled, half_done, half_cancelled):
        await store._answer(record)
    ended = [store.get(record.id, "me") for record in (cancelled, half_done, half_cancelled)]
    assert [each.status for each in ended] == ["cancelled", "failed", "cancelled"]
    assert [each.num_succeeded for each in ended] == [0, 1, 1]
    assert [each.output_file_id is not None for each in ended] == [False, True, True]
    assert "no file" in (ended[1].errors or {})["data"][0]["message"]
    assert sorted(path.suffix for path in (tmp_path / "batches").iterdir()) == [".json"] * 3


def test_uploads_are_reserved_bounded_and_cleaned_up(tmp_path: Path) -> None:
    """Also those of other processes, for which two stores stand here."""
    files, others = (FileStore(tmp_path, 10, 1000, max_uploads=2) for _ in range(2))
    with files.incoming(400, ""), others.incoming(400, ""):
        with pytest.raises(RequestError, match="2 uploads of this key are running") as caught:
            files.incoming(10, "").__enter__()
        assert caught.value.status == 429
        FileStore(tmp_path, 10, 1000)  # one that starts meanwhile takes nothing away
        assert len(list((tmp_path / "files").glob("*.part"))) == 2
    with others.incoming(900, "") as file:
        with pytest.raises(RequestError, match="there is room for"):
            files.incoming(200, "").__enter__()
        file.write(b"{}")
        file.truncate(2)
        file.flush()
        record = others.add(Path(file.name), "me", "in", "batch")
    assert record.bytes == 2
    assert list((tmp_path / "files").glob("*.part")) == []
    with files.incoming(998, ""):
        pass
    with pytest.raises(RequestError, match="there is room for"):
        files.incoming(999, "").__enter__()


def test_uploads_of_one_key_leave_place_and_room_for_those_of_others(tmp_path: Path) -> None:
    files = FileStore(tmp_path, 16, 1000, max_uploads=2)
    with files.incoming(10, "one"), files.incoming(10, "one"):
        with pytest.raises(RequestError, match="2 uploads of this key are running"):
            files.incoming(10, "one").__enter__()
        with files.incoming(10, "two"):
            pass
    with files.incoming(500, "one"), pytest.raises(RequestError, match="8 files of this key with 500 bytes"):
        files.incoming(1, "one").__enter__()
    for number, (owner, most) in enumerate((("one", 500), ("two", 250), ("three", 125))):
        with pytest.raises(RequestError, match=f"files of this key with {most} bytes"):
            files.incoming(most + 1, owner).__enter__()
        with files.incoming(most, owner) as file:
            files.add(Path(file.name), owner, "in", "batch")
        assert len(list(files.records())) == number + 1


def test_a_file_counts_towards_the_room_whenever_its_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileStore(tmp_path, 10, 1000)
    path = files.new_path()
    path.write_bytes(b"x" * 900)

    def killed(self: Path, target: Path) -> Path:
        if target.suffix == ".jsonl":
            raise Killed
        return self.rename(target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        files.add(path, "me", "in", "batch")
    path.unlink(missing_ok=True)  # as the next start does with what nobody writes any more
    assert not list((tmp_path / "files").glob("*.jsonl"))
    (record,) = files.records("me")
    files.delete(record)


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    FileStore(tmp_path, 10, 1000)
    left = tmp_path / "files" / f"{'0' * 16}-{'0' * 32}.part"
    record = tmp_path / "files" / "file-1.abcd.part"
    for path in (left, record):
        path.write_bytes(b"x" * 900)
    os.utime(record, (1, 1))
    files = FileStore(tmp_path, 10, 1000)
    assert not left.exists()
    assert not record.exists()
    with files.incoming(900, ""):
        pass


def test_files_are_this_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = FileStore(tmp_path, 10, 1000)
        with files.incoming(10, "") as file:
            files.add(Path(file.name), "me", "in", "batch")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "files").iterdir()} == {0o600}


async def test_a_batch_needs_a_file_for_batches_and_sound_lines(tmp_path: Path) -> None:
    serving, files = Answering(), FileStore(tmp_path, 10, 1000)
    store = BatchStore(serving, files, tmp_path, max_open=2, max_lines=5)
    names = []
    for purpose in ("batch", "batch_output"):
        path = files.new_path()
        path.write_text(LINE % ("a", "a") + '{"custom_id": "b", "url": "/v1/y"}\n')
        names.append(files.add(path, "me", "in", purpose).id)
    with pytest.raises(RequestError, match="must be of purpose batch, got batch_output"):
        store.add("me", "/v1/x", names[1], "24h", None)
    record = store.add("me", "/v1/x", names[0], "24h", None)
    await store._answer(record)
    done = store.get(record.id, "me")
    assert (done.status, done.output_file_id, serving.answered) == ("failed", None, [])
    assert done.errors is not None
    assert done.errors["data"][0]["line"] == 2


@pytest.mark.parametrize("route", ["/v1/files", "/v1/batches"])
async def test_many_records_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    threads = []

    def records(self: Any, owner: str | None = None) -> Any:
        threads.append(threading.current_thread())
        yield from ()

    for store in (FileStore, BatchStore):
        monkeypatch.setattr(store, "records", records)
    setup = make_setup("endpoint", serving=FakeServing())
    endpoint = BatchesEndpoint(setup, BatchesOptions(folder=tmp_path))
    found = [each.endpoint for each in endpoint.router().routes if each.path == route and "GET" in each.methods]
    await found[0](Request({"type": "http", "headers": []}))
    await asyncio.sleep(0.1)
    assert threads
    assert threading.main_thread() not in threads


def test_a_folder_that_cannot_be_used_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    setup = make_setup("endpoint", serving=FakeServing())
    with pytest.raises(ValueError, match=r"^the folder of batches, .*taken, cannot be used: Not a directory$"):
        BatchesEndpoint(setup, BatchesOptions(folder=tmp_path / "taken"))
