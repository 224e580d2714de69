"""The CUDA platform of a worker that has no device yet, and the process that compiles kernels on it meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from frame.core.interfaces.platform import Memory, Platform, Streams

from .absent_device import AbsentMemory, AbsentStreams, absent_cuda
from .cuda import CudaPlatform
from .forks import fork
from .processors import num_processors
from .rehearsal import compile_in_forks, without_lines

logger = logging.getLogger("frame.platforms.cuda")

_POLL_SECONDS = 0.005
_MOST_SHARES = 4
#: What the process may take: kernels that have not been compiled by then are compiled by the worker.
_SECONDS = 180.0


class AbsentCuda(CudaPlatform):
    """The platform as steps see it, on a device that is not there."""

    def _open(self) -> None:
        """There is nothing to open."""

    def streams(self) -> Streams:
        return AbsentStreams()

    def memory(self) -> Memory:
        return AbsentMemory()


class CompilingAhead:
    """A forked process that runs steps on the device `properties` describe, without it, and compiles what they launch.

    It leaves kernels in Triton's cache on disk, works while its parent loads weights, and ends with it.
    """

    def __init__(self, platform: CudaPlatform, properties: Any, rehearse: Callable[[Platform], None]) -> None:
        absent = AbsentCuda(config=platform.config, options=platform.options, local_rank=platform.local_rank)
        freezes = not gc.get_freeze_count()  # what an embedding program has frozen stays so
        if freezes:
            gc.freeze()  # the child collects no garbage, and pages stay shared
        self._child = [fork(lambda: _compile(absent, properties, rehearse))]
        if freezes:
            gc.unfreeze()
        with suppress(OSError):  # as the child does: whichever is first
            os.setpgid(self._child[0], self._child[0])
        self._start = time.monotonic()
        self._end = self._start + _SECONDS
        weakref.finalize(self, _stop, self._child)

    def wait(self) -> bool:
        """Returns when the process has ended; whether it did all it was to do."""
        start = time.monotonic()
        done = self._reaped()
        now = time.monotonic()
        logger.info("kernels compiled for %.2f s, %.2f s of them waited for", now - self._start, now - start)
        return done

    def _reaped(self) -> bool:
        while self._child:
            found, status = os.waitpid(self._child[0], os.WNOHANG)
            if found:
                self._child.clear()
                return status == 0
            if time.monotonic() > self._end:
                _stop(self._child)
            else:
                time.sleep(_POLL_SECONDS)
        return False


def num_shares(processors: int) -> int:
    """Processes that run the same steps; they take processors from the compilers, so there are few."""
    return max(1, min(_MOST_SHARES, processors // 4))


def _stop(child: list[int]) -> None:
    """Kills the process and those it has forked."""
    if child:
        os.killpg(child[0], signal.SIGKILL)
        os.waitpid(child.pop(), 0)


def _compile(platform: Platform, properties: Any, rehearse: Callable[[Platform], None]) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    try:
        with without_lines(), absent_cuda(platform.local_rank, properties):
            compile_in_forks(partial(rehearse, platform), num_shares(num_processors()))
    except Exception as error:
        logger.warning("kernels are compiled once the weights are loaded and not meanwhile: %r", error)
        raise
