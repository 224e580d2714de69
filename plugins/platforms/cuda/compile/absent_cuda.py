"""The CUDA platform of a worker that has no device yet, and the process that compiles kernels on it meanwhile."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from frame.interfaces import Memory, Platform, Streams

from ...processors import num_processors
from ..platform import CudaPlatform
from .absent_device import AbsentMemory, AbsentStreams, absent_cuda
from .compiler import without_lines
from .forks import ForkedGroup
from .rehearsal import compile_in_forks

logger = logging.getLogger("frame.platforms.cuda")

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
        absent = AbsentCuda(platform.setup, platform.options)
        freezes = not gc.get_freeze_count()  # what an embedding program has frozen stays so
        if freezes:
            gc.freeze()  # the child collects no garbage, and pages stay shared
        self._group = ForkedGroup(lambda: _compile(absent, properties, rehearse), _SECONDS)
        if freezes:
            gc.unfreeze()
        self._start = time.monotonic()

    def wait(self) -> bool:
        """Returns when the process has ended; whether it did all it was to do."""
        start = time.monotonic()
        done = self._group.wait()
        now = time.monotonic()
        logger.info("kernels compiled for %.2f s, %.2f s of them waited for", now - self._start, now - start)
        return done


def num_shares(processors: int) -> int:
    """Processes that run the same steps; they take processors from the compilers, so there are few."""
    return max(1, min(_MOST_SHARES, processors // 4))


def _compile(platform: Platform, properties: Any, rehearse: Callable[[Platform], None]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    try:
        with without_lines(), absent_cuda(platform.local_rank, properties):
            compile_in_forks(partial(rehearse, platform), num_shares(num_processors()))
    except Exception as error:
        logger.warning("kernels are compiled once the weights are loaded and not meanwhile: %r", error)
        raise
