"""Work whose result lies in Triton's cache: one process does it, while others that have the same to do wait.

The workers of an engine meet the same kernels at the same time. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from triton import knobs


def in_turn(key: str, work: Callable[[], object]) -> None:
    """Calls `work` once no other process is in it with the same key and the same cache; at once where none can wait.

    It then finds in the cache what another process has left there. The lock is a file in the cache, which goes with it.
    """
    name = f"frame-turn-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with ExitStack() as undo:
        with suppress(OSError):  # a cache that cannot be written to, or a file system without locks
            folder = Path(knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / name
            file = undo.enter_context(place.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            # who waits for the file that is removed here, and who makes the next one, both find what was left
            undo.callback(place.unlink, missing_ok=True)
        work()
