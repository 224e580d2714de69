"""A CUDA platform without a device, and the process that compiles a worker's kernels on it while weights load."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from frame.interfaces import Collectives, Memory, Placement, Platform, Streams
from frame.links.processors import num_processors

from ..platform import CudaPlatform
from .absent_collectives import AbsentCollectives
from .absent_device import AbsentMemory, AbsentStreams, absent_cuda
from .compiler import without_lines
from .forks import ForkedGroup
from .rehearsal import compile_in_forks

logger = logging.getLogger("frame.platforms.cuda")

_MOST_SHARES = 4
#: The process's time limit; the worker compiles the kernels that are missing then.
_SECONDS = 180.0


class AbsentCuda(CudaPlatform):
    """The CUDA platform for steps that run on a stand-in for the device."""

    def _open(self) -> None:
        """There is nothing to open."""

    def streams(self) -> Streams:
        return AbsentStreams()

    def memory(self) -> Memory:
        return AbsentMemory()

    def unconnected_collectives(self, placement: Placement) -> Collectives:
        shares, copies = self.options.peer_memory, self.options.copied_sums
        return AbsentCollectives(placement.rank, self.device, self._ops, shares_memory=shares, copies_sums=copies)


class CompilingAhead:
    """A forked process that runs steps on the device `properties` describe, without it, and compiles what they launch.

    Its kernels go to Triton's cache on disk. It is killed when its parent ends.
    """

    def __init__(self, platform: CudaPlatform, properties: Any, rehearse: Callable[[Platform], None]) -> None:
        absent = AbsentCuda(platform.setup, platform.options)
        freezes = not gc.get_freeze_count()  # an embedding program may have frozen objects, which stay frozen
        if freezes:
            gc.freeze()  # so that the child's collector writes to no page that it shares
        self._group = ForkedGroup(lambda: _compile(absent, properties, rehearse), _SECONDS)
        if freezes:
            gc.unfreeze()
        self._start = time.monotonic()

    def has_ended(self) -> bool:
        """Whether the process has ended; does not wait."""
        return self._group.has_ended()

    def wait(self) -> bool:
        """Waits for the process to end and returns whether it succeeded."""
        start = time.monotonic()
        done = self._group.wait()
        now = time.monotonic()
        logger.info("kernels compiled for %.2f s, %.2f s of them waited for", now - self._start, now - start)
        return done


def num_shares(processors: int) -> int:
    """How many processes run the steps; few, since they take processors from those that compile."""
    return max(1, min(_MOST_SHARES, processors // 4))


def _compile(platform: Platform, properties: Any, rehearse: Callable[[Platform], None]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    try:
        with without_lines(), absent_cuda(platform.local_rank, properties):
            mode = compile_in_forks(partial(rehearse, platform), num_shares(num_processors()))
        if mode.num_failed:  # the worker would take all kernels for compiled, and its start for a known one
            raise RuntimeError(f"{mode.num_failed} kernels were not compiled")
    except Exception as error:
        logger.warning("kernels are compiled once the weights are loaded and not meanwhile: %r", error)
        raise
