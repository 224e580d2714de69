"""The scheduler side of the peer connector: asks other engines which blocks of a prompt they hold.

Each worker of a peer is asked for the blocks that the worker of the same rank here would load; a block counts when all
of them hold it. Threads ask, so that the engine's loop goes on. A request waits `lookup_seconds` for the answers and is
computed by this engine without them; blocks that a peer holds are loaded while other requests run.
Sees no block's bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from frame.interfaces import ConnectorSetup, RequestView

from ..blocks.messages import BlockStep
from ..blocks.scheduler import BlockScheduler
from ..blocks.wire import PeerError
from .client import PeerClient
from .messages import PeerStep
from .options import Address, PeerOptions

logger = logging.getLogger("frame.connectors.peer")


@dataclass
class Question:
    """The answers about one prompt, by peer and rank: 1 or 0 for each of `keys`, "" when that worker did not answer."""

    keys: list[bytes]
    answers: list[list[Future[bytes]]]
    deadline: float
    source: int = -1  # the peer that was found to hold most

    @property
    def open(self) -> bool:
        """Whether an answer is missing and the deadline has not passed."""
        return time.monotonic() < self.deadline and not all(one.done() for answers in self.answers for one in answers)

    def held(self, answers: Sequence[Future[bytes]]) -> set[bytes]:
        """The keys that all ranks of a peer hold, whose `answers` these are."""
        if not all(one.done() and not one.cancelled() for one in answers):
            return set()
        found = zip(self.keys, *(one.result() for one in answers), strict=False)
        return {key for key, *held in found if all(held)}


class PeerScheduler(BlockScheduler):
    """See the module."""

    title = "peer"

    def __init__(self, setup: ConnectorSetup, options: PeerOptions) -> None:
        super().__init__(setup, options)
        self._options = options
        self._lookup_seconds = options.lookup_seconds
        secret = options.secret()
        ranks = range(setup.mesh.engine_size)
        self._peers = [
            [
                PeerClient(
                    Address.parse(text, rank),
                    secret=secret,
                    space="",
                    timeout=min(options.timeout_seconds, options.lookup_seconds),
                    retry=options.retry_seconds,
                )
                for rank in ranks
            ]
            for text in options.peers
        ]
        self._threads = ThreadPoolExecutor(max(1, len(self._peers) * len(ranks)), thread_name_prefix="peer-lookup")
        self._questions: dict[str, Question] = {}
        self._sources: dict[str, int] = {}  # of the loads that this step begins

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        super().connect(handshakes)
        for peer in self._peers:
            for worker, space in zip(peer, self.spaces, strict=True):
                worker.space = space
        options, kept = self._options, "no blocks are kept for peers"
        if options.listen is not None and self.setup.role != "consumer":
            kept = (
                f"each worker keeps {options.max_bytes / (1 << 30):.3g} GiB of them for peers, from {options.listen} on"
            )
        logger.info(
            "peer connector: blocks of %d tokens; peers that are asked: %d; %s",
            self.layout.grain,
            len(self._peers),
            kept,
        )

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        question = self._questions.get(request.request_id)
        if question is None:
            if first >= last or all(map(_rests, self._peers)):
                return 0, False
            question = self._ask(request, last)
        if question.open:
            return None, False
        question.source, count = max(
            (
                (source, self.longest(request, first, last, question.held(answers).__contains__))
                for source, answers in enumerate(question.answers)
            ),
            key=lambda found: found[1],
        )
        return count, count > 0

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        super().allocated(request, block_ids, num_external)
        question = self._questions.pop(request.request_id, None)
        if question is not None and num_external:
            self._sources[request.request_id] = question.source

    def message(self, step: BlockStep) -> PeerStep:
        sources, self._sources = self._sources, {}
        return PeerStep(
            blocks_name=step.blocks_name,
            number=step.number,
            loads=step.loads,
            saves=step.saves,
            states=step.states,
            entered=step.entered,
            known_breaks=step.known_breaks,
            sources=sources,
        )

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._questions.pop(request.request_id, None)
        return super().finished(request, block_ids)

    def reset(self) -> bool:
        """False where there are peers: this engine cannot drop the blocks that they hold."""
        return not self._peers

    def close(self) -> None:
        for peer in self._peers:
            for worker in peer:
                worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self, request: RequestView, last: int) -> Question:
        keys = self.keys(request.block_hashes[:last])
        answers = [[self._threads.submit(_held, worker, keys) for worker in peer] for peer in self._peers]
        question = self._questions[request.request_id] = Question(
            keys, answers, time.monotonic() + self._lookup_seconds
        )
        return question


def _rests(peer: Sequence[PeerClient]) -> bool:
    """Whether one of its workers failed a moment ago: then the others' blocks are of no use."""
    return any(worker.resting for worker in peer)


def _held(worker: PeerClient, keys: Sequence[bytes]) -> bytes:
    if worker.resting:
        return b""
    try:
        return worker.held(keys)
    except PeerError:
        return b""
