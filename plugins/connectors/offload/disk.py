"""What the disk behind a tier in host memory holds, for the scheduler side, which never waits for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from frame.interfaces import KVLayout

from ..blocks.files import BlockFiles
from .disk_forms import VERSION, DiskForms, EngineForms, blocks_of
from .messages import OTHERS
from .options import OffloadOptions
from .row_forms import space_name

#: How long a request waits for an answer of the disk before its prompt is computed.
LOOKUP_SECONDS = 2.0
#: How often the record of an engine that uses its files is marked as used, too.
TOUCH_SECONDS = 10.0


class NoDisk:
    """There is none."""

    def connect(self, spaces: Sequence[str], marks: Mapping[int, str], blocks_name: str, forms: EngineForms) -> None:
        """`spaces` are where the workers keep their blocks; raises `ValueError` where this side does not see one.

        They begin with `blocks_name`; `forms` says how rows lie there.
        """
        del spaces, marks, blocks_name, forms

    def held(self, request_id: str, keys: Sequence[bytes]) -> Collection[bytes] | None:
        """Those of `keys` that are there, as it was when first asked for this request; None: ask again later."""
        del request_id, keys
        return ()

    def place(self, request_id: str, key: bytes) -> str:
        """The shelf of a `Fetch` of a block that was found for a request which still asks."""
        del request_id, key
        return ""

    def forget(self, request_id: str) -> None:
        """The request asks no more."""

    def clear(self, blocks_name: str, leaving: Collection[bytes]) -> None:
        """Removes all blocks; those that are being written now are to be removed by `remove`."""

    def left(self, key: bytes) -> None:
        """A block was written."""

    def close(self) -> None:
        """Ends its threads."""


class DiskTier(NoDisk):
    """The folder that the options name; blocks of the tier have `parts` files on each worker.

    `kind` is as in `rows_file`. Files of engines of other parallel sizes are read, too, until blocks are removed.
    """

    def __init__(self, options: OffloadOptions, parts: int, layout: KVLayout, kind: str = "") -> None:
        self._files = files_of(options)
        self._forms = DiskForms(self._files, space_name(layout, parts), kind)
        self._own, self._blocks_name, self._name = EngineForms(VERSION, []), "", ""
        self._touched = float("-inf")
        self._alone = False
        self._folder = options.disk
        self._parts = parts
        self._spaces: Sequence[str] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-lookup")
        self._asked: dict[str, tuple[Future[dict[bytes, str]], float]] = {}
        self._unwanted: set[bytes] = set()  # being written when all were to be removed

    def connect(self, spaces: Sequence[str], marks: Mapping[int, str], blocks_name: str, forms: EngineForms) -> None:
        self._spaces = spaces
        for rank, mark in marks.items():
            if not self._files.take_mark(mark):
                raise ValueError(
                    f"the offload connector's folder {self._folder} is another one where the worker of rank {rank} "
                    "runs: name a folder that all machines and containers of the engine share"
                )
        if spaces:
            self._own, self._blocks_name = forms, blocks_name
            self._name = self._forms.publish(blocks_name, forms)

    def held(self, request_id: str, keys: Sequence[bytes]) -> Collection[bytes] | None:
        if request_id not in self._asked:
            future = self._thread.submit(self._look, list(keys))
            self._asked[request_id] = future, time.monotonic() + LOOKUP_SECONDS
        future, latest = self._asked[request_id]
        if future.done():
            return future.result()
        return None if time.monotonic() < latest else ()

    def place(self, request_id: str, key: bytes) -> str:
        asked = self._asked.get(request_id)
        return asked[0].result().get(key, "") if asked is not None and asked[0].done() else ""

    def forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[0].cancel()

    def clear(self, blocks_name: str, leaving: Collection[bytes]) -> None:
        self._asked.clear()
        self._unwanted.update(leaving)
        self._alone = True  # others may write more of what is not wanted
        for name in {blocks_name, *map(blocks_of, self._forms.names())}:
            self._files.clear(name)

    def left(self, key: bytes) -> None:
        if key in self._unwanted:
            self._unwanted.discard(key)
            for space in self._spaces:
                for part in range(self._parts):
                    self._files.remove(space, file_key(key, part, self._parts))
        if self._is_late:
            with suppress(RuntimeError):  # the thread has ended
                self._thread.submit(self._touch)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        """Runs in the thread. Behind a key that is missing none is of use, but those before it may be elsewhere."""
        found = {key: "" for key in keys if self._has(key, self._spaces)}
        if found and self._is_late:
            self._touch()
        if len(found) < len(keys) and not self._alone and self._name:
            for name, spaces in self._forms.readable(self._own.forms, self._name):
                found |= {key: OTHERS + name for key in keys if key not in found and self._has(key, spaces)}
        return found

    def _has(self, key: bytes, spaces: Sequence[str]) -> bool:
        return key not in self._unwanted and all(
            self._files.has(space, file_key(key, part, self._parts)) for space in spaces for part in range(self._parts)
        )

    @property
    def _is_late(self) -> bool:
        """Whether the record of this engine is to be marked as used again: it goes after the files that it is of."""
        return bool(self._name) and time.monotonic() - self._touched > TOUCH_SECONDS

    def _touch(self) -> None:
        """Runs in the thread."""
        self._touched = time.monotonic()
        self._forms.touch(self._blocks_name, self._own)


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
