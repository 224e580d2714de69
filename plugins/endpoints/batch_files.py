"""Files of clients in a folder of the server, for their owners only, within bounds of number and bytes.

Names in the folder are made here; a client's file name is kept as text and is never a path. Knows no batch.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from frame.interfaces import RequestError

Object = dict[str, Any]

_FILE = re.compile(r"file-[0-9a-f]{32}")


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


def write_json(path: Path, value: Any) -> None:
    """Replaces a file at once, so that readers see the old or the new one."""
    beside = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    beside.write_bytes(msgspec.json.encode(value))
    beside.replace(path)


class FileStore:
    """The files in `folder`."""

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._max_files = max_files
        self._max_bytes = max_bytes

    def new_path(self) -> Path:
        """Where the bytes of a file may be written before `add`."""
        return self._folder / f"{uuid.uuid4().hex}.part"

    def check_room(self, size: int) -> None:
        """Raises `RequestError` 413 when a file of `size` bytes has no room. Results are taken in regardless."""
        records = list(self.records())
        if len(records) >= self._max_files or sum(each.bytes for each in records) + size > self._max_bytes:
            raise RequestError(
                413, f"there is room for {self._max_files} files of {self._max_bytes} bytes together; delete some"
            )

    def new_id(self) -> str:
        """For a file that is to come."""
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
        """Takes a written file in, under an id from `new_id` if need be; doing that again changes nothing."""
        now, name = int(time.time()), name or self.new_id()
        if path.exists():
            path.replace(self._data(name))
        expires = None if seconds is None else now + seconds
        record = FileRecord(name, owner, filename, purpose, self._data(name).stat().st_size, now, expires)
        write_json(self._folder / f"{record.id}.json", record)
        return record

    def get(self, name: str, owner: str) -> FileRecord:
        """The record of a file; raises `RequestError` 404 also when it belongs to somebody else."""
        record = self._read(self._folder / f"{name}.json") if _FILE.fullmatch(name) else None
        if record is None or record.owner != owner:
            raise RequestError(404, f"no file {name[:80]!r}", code="file_not_found")
        return record

    def open(self, name: str, owner: str) -> BinaryIO:
        """The bytes of a file, which stay there for the reader when it is deleted; raises as `get`."""
        record = self.get(name, owner)
        try:
            return self._data(record.id).open("rb")
        except FileNotFoundError:
            raise RequestError(404, f"no file {name!r}: it was deleted", code="file_not_found") from None

    def delete(self, record: FileRecord) -> None:
        """Forgets a file."""
        (self._folder / f"{record.id}.json").unlink(missing_ok=True)
        self._data(record.id).unlink(missing_ok=True)

    def records(self, owner: str | None = None) -> Iterator[FileRecord]:
        """All files, or an owner's, oldest first. What has expired is deleted."""
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
