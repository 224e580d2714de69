"""Objects in the shared memory of an LMCache server, each with a header that says whose it is and what it holds.

The server gives an object's place again after its locks have expired, and other programs write there, too. So an object
is copied first, and the copy is checked; and the file is read and written, not mapped, because a file that became
shorter would end a process that has it mapped. Knows no protocol and no block.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from pathlib import Path

import numpy as np

MAGIC = b"frameLM1"
HEADER = struct.Struct("<8s16sQ16s")
FOLDER = Path("/dev/shm")  # noqa: S108 where POSIX shared memory has its names
_ROW_BYTES = 4096
#: The server gives its files names of this form.
NAME = re.compile(r"/?(lmcache_l1_pool_[A-Za-z0-9_.-]{1,200})")


class SharedPool:
    """The file of shared memory that a server named. Raises `ValueError` where it must not be used.

    Its owner must be this user or root: what others own, others may have written.
    """

    def __init__(self, name: str, size: int, folder: Path = FOLDER) -> None:
        found = NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"it has no shared memory, or none of a known form: {name!r:.80}")
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(folder / found[1], flags)
        except OSError as error:
            raise ValueError(f"its shared memory {found[1]} cannot be opened: {error.strerror}") from None
        status = os.fstat(self._file)
        self.identity = (status.st_dev, status.st_ino)
        self.size = size
        mode = stat.S_IMODE(status.st_mode)
        wrong = ""
        if not stat.S_ISREG(status.st_mode) or not 0 < size <= status.st_size:
            wrong = f"is not a file of {size} bytes"
        elif status.st_uid not in (os.geteuid(), 0) or mode & 0o002:
            wrong = f"has owner {status.st_uid} and mode {mode:o}: others can write to it"
        if wrong:
            self.close()
            raise ValueError(f"its shared memory {found[1]} {wrong}")

    def fits(self, offset: int, length: int) -> bool:
        """Whether these bytes lie in the file."""
        return 0 <= offset <= self.size - length

    def write(self, offset: int, owner: bytes, data: np.ndarray) -> bool:
        """Writes an object: `data` uint8, of `owner`, which is any bytes; False when it could not be written."""
        payload = data.data.cast("B")
        header = HEADER.pack(MAGIC, _digest(owner), len(payload), checksum(data))
        try:
            return os.pwritev(self._file, [header, payload], offset) == len(header) + len(payload)
        except OSError:
            return False

    def read(self, offset: int, owner: bytes, out: np.ndarray) -> bool:
        """Fills `out` (uint8); False, `out` then being unspecified, when no sound object of `owner` lies there."""
        header, payload = bytearray(HEADER.size), out.data.cast("B")
        try:
            if os.preadv(self._file, [header, payload], offset) != len(header) + len(payload):
                return False
        except OSError:
            return False
        return bytes(header) == HEADER.pack(MAGIC, _digest(owner), len(payload), checksum(out))

    def close(self) -> None:
        """Ends the use of the file; a second call changes nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def object_bytes(payload: int) -> int:
    """The bytes of an object that holds `payload` bytes."""
    return HEADER.size + payload


def checksum(data: np.ndarray) -> bytes:
    """A digest of `data` (uint8) at the speed of memory: of the sums over rows and over columns of its words.

    It guards against accidents. Who may write to the memory may write another checksum, whatever it is.
    """
    table = data[: len(data) // _ROW_BYTES * _ROW_BYTES].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(table.sum(0).tobytes(), digest_size=16)
    digest.update(table.sum(1).tobytes())
    digest.update(data[table.nbytes :].tobytes())
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
