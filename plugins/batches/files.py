"""Files of clients in a folder of the server, for their owners only, within bounds of number and bytes.

The server chooses the names in the folder; a client's file name is stored as text and never used as a path. Knows no
batch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from frame.interfaces import RequestError
from frame.quoting import quoted

Object = dict[str, Any]

_FILE = re.compile(r"file-[0-9a-f]{32}")
#: An upload's file: a digest of its owner, and a name of its own.
_UPLOAD = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.part")
#: Seconds after which an unfinished record is taken for that of a process that has ended.
_STALE_SECONDS = 60.0


class FileRecord(msgspec.Struct):
    """What is known of a file. `owner` is not shown."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def shown(self) -> Object:
        """As clients see it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "owner"}
        return {"object": "file", "status": "processed", **fields}


def open_private(path: Path, mode: str) -> Any:
    """As `open`; a new file is readable by this user only, whatever the umask is."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_json(path: Path, value: Any) -> None:
    """Replaces a file atomically, so that readers see the old or the new one."""
    beside = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    with open_private(beside, "wb") as file:
        file.write(msgspec.json.encode(value))
    beside.replace(path)


def remove_stale(folder: Path) -> None:
    """Removes unfinished files of processes that have ended; running ones hold a lock on their uploads."""
    for path in folder.glob("*.part"):
        with suppress(OSError), path.open("rb") as file:
            if _UPLOAD.fullmatch(path.name):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
            path.unlink()


class FileStore:
    """The files in `folder`."""

    def __init__(self, folder: Path, max_files: int, max_bytes: int, max_uploads: int = 8) -> None:
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._max_uploads = max_uploads
        with self._locked():
            remove_stale(self._folder)

    @contextmanager
    def incoming(self, size: int, owner: str) -> Iterator[BinaryIO]:
        """A file for an upload of at most `size` bytes, which are reserved by its length until it is handed to `add`.

        A file that is not added is removed. Raises `RequestError` 413 when the owner has no room for it, 429 when too
        many of the owner's uploads run. Processes that use the folder count each other's uploads.
        """
        with self._locked():
            remove_stale(self._folder)
            if sum(1 for _ in self._uploads(owner)) >= self._max_uploads:
                raise RequestError(
                    429, f"{self._max_uploads} uploads of this key are running, the most at once; try again later"
                )
            self._check_room(size, owner)
            path = self._folder / f"{_digest(owner)}-{uuid.uuid4().hex}.part"
            file = open_private(path, "xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)
        try:
            with file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _uploads(self, owner: str | None = None) -> Iterator[Path]:
        """The files of uploads that are under way, of all owners or of one."""
        prefix = "" if owner is None else _digest(owner)
        return (path for path in self._folder.glob(f"{prefix}*.part") if _UPLOAD.fullmatch(path.name))

    def new_path(self) -> Path:
        """A path to write a file to before `add`."""
        return self._folder / f"{uuid.uuid4().hex}.part"

    def _check_room(self, size: int, owner: str) -> None:
        """Raises `RequestError` 413 when an upload of `size` bytes has no room. Results of batches are always stored.

        An API key gets at most half of what other keys leave, so that there is always room for a further key. Without
        keys, the only owner gets all of it.
        """
        files, digest = [(each.owner, each.bytes) for each in self.records()], _digest(owner)
        for path in self._uploads():
            with suppress(FileNotFoundError):  # it was added as a file meanwhile
                files.append((owner if path.name.startswith(digest) else "another", path.stat().st_size))
        own = [num_bytes for name, num_bytes in files if name == owner]
        share = 2 if owner else 1
        max_files = (self._max_files - len(files) + len(own)) // share
        max_bytes = (self._max_bytes - sum(num_bytes for _, num_bytes in files) + sum(own)) // share
        if len(own) >= max_files or sum(own) + size > max_bytes:
            whose = " of this key" if owner else ""
            raise RequestError(
                413, f"there is room for {max_files} files{whose} with {max_bytes} bytes together; delete some"
            )

    def new_id(self) -> str:
        """An id for a file that is added later."""
        return f"file-{uuid.uuid4().hex}"

    def add(
        self,
        path: Path,
        owner: str,
        filename: str,
        purpose: str,
        seconds: int | None = None,
        *,
        name: str | None = None,
    ) -> FileRecord:
        """Stores a written file, as `name` (from `new_id`) if given; adding the same name again changes nothing."""
        now, name = int(time.time()), name or self.new_id()
        size = (path if path.exists() else self._data(name)).stat().st_size
        expires = None if seconds is None else now + seconds
        record = FileRecord(name, owner, filename, purpose, size, now, expires)
        write_json(
            self._folder / f"{record.id}.json", record
        )  # first, so that the bytes are counted even if the process ends here
        if path.exists():
            path.replace(self._data(name))
        return record

    def get(self, name: str, owner: str) -> FileRecord:
        """The record of a file; raises `RequestError` 404 also when it belongs to somebody else."""
        record = self._read(self._folder / f"{name}.json") if _FILE.fullmatch(name) else None
        if record is None or record.owner != owner:
            raise RequestError(404, f"no file {quoted(name)}", code="file_not_found")
        return record

    def open(self, name: str, owner: str) -> BinaryIO:
        """The bytes of a file, readable to the end even if it is deleted meanwhile; raises as `get`."""
        record = self.get(name, owner)
        try:
            return self._data(record.id).open("rb")
        except FileNotFoundError:
            raise RequestError(404, f"no file {quoted(name)}: it was deleted", code="file_not_found") from None

    def delete(self, record: FileRecord) -> None:
        """Deletes a file and its record."""
        (self._folder / f"{record.id}.json").unlink(missing_ok=True)
        self._data(record.id).unlink(missing_ok=True)

    def records(self, owner: str | None = None) -> Iterator[FileRecord]:
        """All files, or those of an owner, oldest first. Deletes files that have expired."""
        found = [record for path in self._folder.glob("file-*.json") if (record := self._read(path)) is not None]
        for record in sorted(found, key=lambda record: (record.created_at, record.id)):
            if owner is None or record.owner == owner:
                yield record

    def _read(self, path: Path) -> FileRecord | None:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
        except (OSError, msgspec.DecodeError):
            return None
        if record.expires_at is not None and record.expires_at <= time.time():
            self.delete(record)
            return None
        return record

    def _data(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"


def _digest(owner: str) -> str:
    """Names an owner in the names of files."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]
