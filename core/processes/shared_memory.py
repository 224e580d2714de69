"""Anonymous shared memory, and the fence that orders accesses to it. Knows nothing of what is in it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable

#: What may not happen to the memory any more: who shrinks it would end every process that maps it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(name: str, num_bytes: int) -> int:
    """An open file of zeros in memory, which has no name in any folder and ends with its last user.

    Only what is written takes memory. It is the caller's to close; `name` shows in /proc.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_fence() -> Callable[[], None]:
    """What is called between two accesses to shared memory: no processor and no compiler lets them swap.

    CPython has no fence, but a lock: taking it is a load-acquire, releasing it a store-release. One pair is not enough
    on ARM, since accesses from both sides may move into it. Of two pairs in a row, what stands before the first release
    stays before it, what stands after the second acquire stays after it, and an acquire never passes an earlier release
    (ARMv8 keeps those in order). On x86 either is a locked instruction, which is a fence by itself. The lock is this
    process's own: nobody is waited for.
    """
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()
        acquire()
        release()

    return fence
