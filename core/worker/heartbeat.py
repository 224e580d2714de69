"""Signs of life of a worker's process, which its engine reads from shared memory: when it ran last, and where it is.

A worker that waits for another in a collective cannot answer, but its heart beats. Knows no step and no device.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable

from ..interfaces.executor import Progress

#: Seconds between two beats, and after the engine's end until a worker that does not notice it is killed.
BEAT_SECONDS, ORPHAN_SECONDS = 0.5, 10.0
#: Monotonic time of the newest beat, and the worker's progress then.
_FORM = struct.Struct("dqqq")
_SIZE = mmap.PAGESIZE


class HeartbeatMemory:
    """The engine's side: memory that it makes, hands to one worker's process as `descriptor`, and reads."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("frame-heartbeat")
        os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)

    def silent_seconds(self) -> float:
        """Seconds since the newest beat; 0 before the first."""
        newest: float = _FORM.unpack_from(self._memory)[0]
        return time.monotonic() - newest if newest else 0.0

    def progress(self) -> Progress:
        """Where the worker was at the newest beat."""
        _, *found = _FORM.unpack_from(self._memory)
        return Progress(*found)

    def close(self) -> None:
        """Frees the memory. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self._memory.close()
            self.descriptor = -1


class Heartbeat:
    """The worker's side: a thread that writes `progress()` until the process ends.

    It also kills the process some seconds after its parent has ended, should it then still wait in a collective.
    """

    def __init__(self, descriptor: int, progress: Callable[[], Progress]) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)
        self._progress = progress
        self._parent = os.getppid()
        self.beat()
        threading.Thread(target=self._run, name="frame-heartbeat", daemon=True).start()

    def beat(self) -> None:
        """Writes where the worker is."""
        _FORM.pack_into(self._memory, 0, time.monotonic(), *self._progress())

    def _run(self) -> None:
        orphaned = 0.0
        while True:
            time.sleep(BEAT_SECONDS)
            self.beat()
            if os.getppid() != self._parent:
                orphaned += BEAT_SECONDS
                if orphaned >= ORPHAN_SECONDS:
                    os.kill(os.getpid(), signal.SIGKILL)
