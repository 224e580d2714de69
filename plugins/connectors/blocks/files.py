"""KV blocks as files, one each: written whole or not at all, checked when read, removed least recently used first.

A file is a header (magic, whose block it is, size, checksum) and the block's bytes; records about blocks are files of
the same form. Several processes may use one folder. Knows no request, no layer and no tensor.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import shutil
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from .quota import Quota

logger = logging.getLogger("frame.connectors.disk")

#: frame uses only this subfolder of the user's folder.
ROOT = "frame-kv-1"
INCOMING = "incoming"
MAGIC = b"frameKV1"
HEADER = struct.Struct("<8s16sQ16s")
STALE_SECONDS = 3600.0


class BlockFiles:
    """The blocks below `folder`. `space` is a relative path that separates models, layouts and ranks.

    `owner` and `setting` are the connector's name and its setting of `max_bytes`, for what is said to the user. Raises
    `ValueError` when the folder cannot be used or other users could write to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        fsync: bool = False,
        owner: str = "disk",
        setting: str = "max_bytes",
    ) -> None:
        self._root = folder / ROOT
        self._incoming = self._root / INCOMING
        self._fsync = fsync
        self._remedy = f"; set --plugin.{owner}.{setting}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
            _check_private(self._root, owner)
            self._incoming.mkdir(mode=0o700, exist_ok=True)
            self._remove_stale()
        except OSError as error:
            raise ValueError(_unusable(folder, owner, error.strerror)) from None
        self._quota = Quota(self._root, max_bytes)
        self._complained = False

    @property
    def used_bytes(self) -> int | None:
        """Bytes of the folder's files as they were counted last, for a limit on them; None where they were not."""
        return self._quota.used

    def has(self, space: str, key: bytes) -> bool:
        """Whether the block was published; it may still turn out to be damaged or be removed before it is read."""
        return os.path.exists(self._path(space, key))

    def holds(self, space: str, key: bytes, num_bytes: int) -> bool:
        """Whether the block was published and has so many bytes."""
        try:
            return os.stat(self._path(space, key)).st_size == HEADER.size + num_bytes
        except OSError:
            return False

    def touch(self, space: str, key: bytes) -> bool:
        """Marks the block as used now; False when it is not there."""
        return _used(self._path(space, key))

    def read(self, space: str, key: bytes, out: np.ndarray, *, remove: bool = True) -> bool:
        """Fills `out` (uint8, the block's size); False, `out` then being unspecified, when there is no sound block.

        A damaged file is removed, so that the block can be written again, unless another's is not to be.
        """
        path = self._path(space, key)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
                sound = _read_checked(file.fileno(), _owner(space, key), out)
            if sound:
                os.utime(path)
            elif remove:
                logger.warning("the block file %s is damaged and was removed", path)
                os.unlink(path)
        except OSError:
            return False
        return sound

    def write(self, space: str, key: bytes, data: np.ndarray) -> bool:
        """Publishes a block (uint8, contiguous); False when it could not be stored, which is logged once."""
        return self._publish(self._path(space, key), _owner(space, key), data)

    def record(self, space: str, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a record, at most so many; None where there is none that is sound."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(self._root / space / name, flags), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size - HEADER.size
                if not 0 <= size <= max_bytes:
                    return None
                data = np.empty(size, np.uint8)
                return data.tobytes() if _read_checked(file.fileno(), _owner(space, name.encode()), data) else None
        except OSError:
            return None

    def write_record(self, space: str, name: str, data: bytes) -> bool:
        """Publishes a record in the place of an earlier one; False as `write`."""
        path = f"{self._root}/{space}/{name}"
        return self._publish(path, _owner(space, name.encode()), np.frombuffer(data, np.uint8))

    def touch_record(self, space: str, name: str) -> bool:
        """As `touch`."""
        return _used(self._root / space / name)

    def record_names(self, space: str) -> tuple[list[str], int]:
        """The names of all records of `space`, and a number that changes where they or their content do."""
        try:
            changed = os.stat(self._root / space).st_mtime_ns
            return sorted(os.listdir(self._root / space)), changed
        except OSError:
            return [], 0

    def _publish(self, path: str, owner: bytes, data: np.ndarray) -> bool:
        size = HEADER.size + data.nbytes
        if not self._quota.make_room(size):
            return False
        temporary = self._incoming / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._write_whole(temporary, HEADER.pack(MAGIC, owner, data.nbytes, _checksum(data)), data)
            os.replace(temporary, path)
        except OSError as error:
            self._complain(error)
            with suppress(OSError):
                temporary.unlink()
            return False
        self._quota.add(size)
        return True

    def remove(self, space: str, key: bytes) -> None:
        """Removes the block where it is there."""
        with suppress(OSError):
            os.unlink(self._path(space, key))

    def clear(self, space: str) -> None:
        """Removes every block of `space`."""
        shutil.rmtree(self._root / space, ignore_errors=True)

    def leave_mark(self) -> str:
        """Creates an empty file and returns its name, by which another process checks that it sees the same folder."""
        name = f"mark-{secrets.token_hex(16)}"
        try:
            os.close(os.open(self._incoming / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            self._complain(error)
        return name

    def take_mark(self, name: str) -> bool:
        """Removes the mark; False when it is not in this folder."""
        try:
            os.unlink(self._incoming / os.path.basename(name))
        except OSError:
            return False
        return True

    def _path(self, space: str, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{space}/{name[:2]}/{name}.kv"

    def _write_whole(self, path: Path, header: bytes, data: np.ndarray) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(header), data.data.cast("B")):
                while part:
                    part = part[file.write(part) :]
            if self._fsync:
                os.fsync(file.fileno())

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            remedy = self._remedy if error.errno == errno.ENOSPC else ""
            logger.warning("blocks cannot be kept below %s: %s%s", self._root, error, remedy)
        self._complained = True

    def _remove_stale(self) -> None:
        """Removes the unfinished files of processes that ended during a write."""
        for entry in os.listdir(self._incoming):
            path = self._incoming / entry
            with suppress(FileNotFoundError):  # its writer finished it in the meantime
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def _used(path: Path | str) -> bool:
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def check_folder(folder: Path, owner: str) -> None:
    """Raises `ValueError` where blocks cannot be kept in `folder`, which may be missing; makes nothing."""
    if os.path.lexists(folder / ROOT):
        _check_private(folder / ROOT, owner)
        return
    found = folder
    while not os.path.lexists(found):
        found = found.parent
    if not found.is_dir():
        raise ValueError(_unusable(folder, owner, os.strerror(errno.ENOTDIR)))
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(_unusable(folder, owner, os.strerror(errno.EACCES)))


def _unusable(folder: Path, owner: str, reason: str | None) -> str:
    return f"the folder of the {owner} connector, {folder}, cannot be used: {reason}"


def _check_private(root: Path, owner: str) -> None:
    found = os.lstat(root)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ValueError(
            f"the folder of the {owner} connector, {root}, has owner {found.st_uid} and mode {mode:o}: others could "
            "read prompts in it or plant blocks; it must be a folder of this user with mode 700"
        )


def _read_checked(descriptor: int, owner: bytes, out: np.ndarray) -> bool:
    found = os.fstat(descriptor)
    # the folder was checked at the start; whoever may write to the one above can have put another there since
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_size != HEADER.size + out.nbytes:
        return False
    header = os.read(descriptor, HEADER.size)
    if len(header) != HEADER.size:
        return False
    magic, found, size, checksum = HEADER.unpack(header)
    if (magic, found, size) != (MAGIC, owner, out.nbytes):
        return False
    rest = out.data.cast("B")
    while rest:
        count = os.readv(descriptor, [rest])
        if count == 0:
            return False
        rest = rest[count:]
    return bool(_checksum(out) == checksum)


def _owner(space: str, key: bytes) -> bytes:
    """Ties a file to its place, so that one that was renamed or copied elsewhere is not taken for another block."""
    return hashlib.blake2b(space.encode() + b"\0" + key, digest_size=16).digest()


def _checksum(data: np.ndarray) -> bytes:
    return hashlib.blake2b(data.data.cast("B"), digest_size=16).digest()
