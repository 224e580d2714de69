"""A worker's half of taking: copies received blocks from where they came into those of requests, beside the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Mark, SideQueue

from ..blocks.row_words import in_words
from .inbox import Inbox
from .messages import Load, PushStep
from .prompts import Prompt

logger = logging.getLogger("frame.connectors.push")


@dataclass(eq=False)
class Loading:
    """Blocks that are being copied to the device for the request `load.owner`; `mark` is behind that."""

    load: Load
    prompt: Prompt
    begun: float = field(default_factory=time.monotonic)
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class Loadings:
    """See the module. `caches` uint8 [num_blocks, block bytes] are those of layers, of the KV groups `groups`.

    `stage` copies an array to the device. What ended since it was last read is in `received`,
    `failed_blocks` and `counters`.
    """

    def __init__(
        self,
        groups: Sequence[int],
        stage: Callable[[np.ndarray], Tensor],
        *,
        inbox: Inbox,
        queue: SideQueue,
        title: str = "push",
    ) -> None:
        self._groups = groups
        self._ids = stage
        self.inbox = inbox
        self._queue = queue
        self._title = title
        self.caches: Sequence[Tensor] = ()
        self._loadings: list[Loading] = []
        self._told: set[str] = set()  # that were in `received`, and for which the scheduler side may still wait
        self.received: list[str] = []
        self.failed_blocks: list[tuple[int, int]] = []
        self.counters: dict[str, float] = {}

    def begin(self, step: PushStep) -> None:
        """Called before a step's layers run."""
        if step.clear:
            self.inbox.forget()
        for digest in step.forget:
            self.inbox.forget(digest)
        self._answer_lost(step.loading)
        for load in step.loads:
            self._load(load)

    def end(self) -> None:
        """Called when a step's layers have run."""
        for loading in [one for one in self._loadings if one.mark.done()]:
            self._loadings.remove(loading)
            self._wait(loading)
            self.inbox.release(loading.prompt)
            if loading.error is not None:
                self._fail(loading.load)
                continue
            blocks = loading.load.blocks
            self._tell(loading.load.owner)
            self._count("loaded_blocks", sum(map(len, blocks)))
            sizes = zip(self._groups, self.caches, strict=False)
            self._count("loaded_bytes", sum(cache.shape[1] * len(blocks[group]) for group, cache in sizes))
            self._count("load_seconds", time.monotonic() - loading.begun)

    @property
    def pending(self) -> list[str]:
        """The requests whose loads go on, or whose ends are in `received`."""
        return [*self.received, *(loading.load.owner for loading in self._loadings)]

    def stop_writing(self) -> None:
        """The caches go away; nothing is written to them when it returns."""
        for loading in self._loadings:
            self._wait(loading)
        self.caches = ()

    def _load(self, load: Load) -> None:
        prompt = self.inbox.claim(load.digest)
        if prompt is None:
            self._fail(load)
            return
        loading = Loading(load, prompt)
        self._loadings.append(loading)  # first: what raises may have begun it
        try:
            self._queue.run(partial(self._copy, loading))
            loading.mark = self._queue.mark()
        except Exception as error:
            loading.error = error
            raise

    def _copy(self, loading: Loading) -> None:
        try:
            with torch.inference_mode():
                self._copy_layers(loading.load, loading.prompt)
        except Exception as error:
            logger.exception("received blocks could not be copied")
            loading.error = error

    def _copy_layers(self, load: Load, prompt: Prompt) -> None:
        staged: dict[int, Tensor] = {}  # by KV group, whose layers have the same blocks
        for number, cache in enumerate(self.caches):
            group, part, before = self._groups[number], prompt.parts[number], prompt.firsts[number]
            places = load.places[group]
            if not places:
                continue
            first, last = places[0] - before, places[-1] + 1 - before
            if first < 0 or last > len(part) or last - first != len(places):
                raise ValueError("blocks are needed that were not sent")
            if group not in staged:
                staged[group] = self._ids(np.array(load.blocks[group], np.int64))
            blocks, rows = in_words(cache, part[first:last])
            blocks.index_copy_(0, staged[group], rows.to(cache.device, non_blocking=True))

    def _wait(self, loading: Loading) -> None:
        try:
            loading.mark.wait()
        except Exception as error:
            loading.error = loading.error or error

    def _fail(self, load: Load) -> None:
        blocks = [(group, block) for group, some in enumerate(load.blocks) for block in some]
        self.failed_blocks += blocks
        self._count("failed_blocks", len(blocks))
        self._tell(load.owner)

    def _answer_lost(self, waiting: Sequence[str]) -> None:
        """A step that fails is not heard of here: whoever waits for what it should have begun is told so."""
        self._told &= set(waiting)
        known = {loading.load.owner for loading in self._loadings} | self._told
        for owner in waiting:
            if owner not in known:
                self._tell(owner)

    def _tell(self, owner: str) -> None:
        self.received.append(owner)
        self._told.add(owner)

    def _count(self, name: str, value: float) -> None:
        name = f"{self._title}_{name}"
        self.counters[name] = self.counters.get(name, 0.0) + value
