"""What the disk behind a tier in host memory holds, for the scheduler side, which never waits for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..blocks.files import BlockFiles
from .messages import OffloadOptions

#: How long a request waits for an answer of the disk before its prompt is computed.
LOOKUP_SECONDS = 2.0


class NoDisk:
    """There is none."""

    def connect(self, spaces: Sequence[str], marks: Mapping[int, str]) -> None:
        """`spaces` are where the workers keep their blocks; raises `ValueError` where this side does not see one."""
        del spaces, marks

    def held(self, request_id: str, keys: Sequence[bytes]) -> Collection[bytes] | None:
        """Those of `keys` that are there, as it was when first asked for this request; None: ask again later."""
        del request_id, keys
        return ()

    def forget(self, request_id: str) -> None:
        """The request asks no more."""

    def clear(self, blocks_name: str, leaving: Collection[bytes]) -> None:
        """Removes all blocks; those that are being written now are to be removed by `remove`."""

    def left(self, key: bytes) -> None:
        """A block was written."""

    def close(self) -> None:
        """Ends its threads."""


class DiskTier(NoDisk):
    """The folder that the options name; blocks of the tier have `parts` files on each worker."""

    def __init__(self, options: OffloadOptions, parts: int) -> None:
        self._files = files_of(options)
        self._folder = options.disk
        self._parts = parts
        self._spaces: Sequence[str] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-lookup")
        self._asked: dict[str, tuple[Future[set[bytes]], float]] = {}
        self._unwanted: set[bytes] = set()  # being written when all were to be removed

    def connect(self, spaces: Sequence[str], marks: Mapping[int, str]) -> None:
        self._spaces = spaces
        for rank, mark in marks.items():
            if not self._files.take_mark(mark):
                raise ValueError(
                    f"the offload connector's folder {self._folder} is another one where the worker of rank {rank} "
                    "runs: name a folder that all machines and containers of the engine share"
                )

    def held(self, request_id: str, keys: Sequence[bytes]) -> Collection[bytes] | None:
        if request_id not in self._asked:
            future = self._thread.submit(self._look, list(keys))
            self._asked[request_id] = future, time.monotonic() + LOOKUP_SECONDS
        future, latest = self._asked[request_id]
        if future.done():
            return future.result()
        return None if time.monotonic() < latest else ()

    def forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[0].cancel()

    def clear(self, blocks_name: str, leaving: Collection[bytes]) -> None:
        self._asked.clear()
        self._unwanted.update(leaving)
        self._files.clear(blocks_name)

    def left(self, key: bytes) -> None:
        if key in self._unwanted:
            self._unwanted.discard(key)
            for space in self._spaces:
                for part in range(self._parts):
                    self._files.remove(space, file_key(key, part, self._parts))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self, keys: Sequence[bytes]) -> set[bytes]:
        """Runs in the thread. Behind a key that is missing none is of use, but those before it may be elsewhere."""
        return {
            key
            for key in keys
            if key not in self._unwanted
            and all(
                self._files.has(space, file_key(key, part, self._parts))
                for space in self._spaces
                for part in range(self._parts)
            )
        }


def files_of(options: OffloadOptions) -> BlockFiles:
    """The files below the folder of the options, which there must be."""
    if options.disk is None:
        raise ValueError("the offload connector has no disk_folder")
    return BlockFiles(options.disk, max_bytes=options.disk_bytes, owner="offload", setting="disk_size")


def file_key(key: bytes, part: int, parts: int) -> bytes:
    """What a part of a block of the tier is called on the disk; where it is all, as the `disk` connector calls it.

    Blocks of several sizes may end at the same token, and so have the same key.
    """
    return key if parts == 1 else key + part.to_bytes(4, "little") + parts.to_bytes(4, "little")
