"""The worker side of the peer connector: keeps copies in host memory for peers, and loads blocks from peers.

A load runs beside the steps: a thread receives blocks into a few host buffers, and each step moves those that have
arrived into the KV memory. A load that fails reports the blocks that did not arrive, and this engine computes them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

import numpy as np

from frame.interfaces import ConnectorWorkerSetup, TransferReport

from .block_messages import BlockStep, Move
from .block_worker import BlockWorker, batches
from .peer_client import PeerClient
from .peer_messages import PeerStep
from .peer_options import Address, PeerOptions
from .peer_server import HostBlocks, PeerServer
from .peer_wire import PeerError

#: Received parts of one load that may wait for a step.
_PARTS = 4
_POLL_SECONDS = 0.1


@dataclass
class Load:
    """One request's load: parts (moves, their bytes, the rows that arrived), at last None."""

    owner: str
    parts: Queue[tuple[Sequence[Move], np.ndarray, list[int]] | None] = field(default_factory=lambda: Queue(_PARTS))
    stopped: threading.Event = field(default_factory=threading.Event)

    def give(self, part: tuple[Sequence[Move], np.ndarray, list[int]] | None) -> None:
        """Waits for room in the queue; returns without adding once the load was stopped."""
        while not self.stopped.is_set():
            try:
                self.parts.put(part, timeout=_POLL_SECONDS)
            except Full:
                continue
            return


class PeerWorker(BlockWorker):
    """See the module."""

    title = "peer"
    message = PeerStep

    def __init__(self, setup: ConnectorWorkerSetup, options: PeerOptions) -> None:
        super().__init__(setup, options)
        self._options = options
        self._secret = options.secret()
        self._blocks = HostBlocks(options.max_bytes)
        self._peers: dict[int, PeerClient] = {}
        self._loads: list[Load] = []
        self._ended: list[str] = []
        self._gone: set[str] = set()  # requests that ended while they were loaded
        self._threads = ThreadPoolExecutor(max(1, len(options.peers)), thread_name_prefix="peer-load")
        self._server: PeerServer | None = None
        if options.listen is not None and setup.role != "consumer":
            address = Address.parse(options.listen, self.rank)
            self._server = PeerServer(address, self._blocks, secret=self._secret, timeout=options.timeout_seconds)

    def load(self, step: BlockStep) -> None:
        if step.blocks_name:
            self._blocks.space = self.space
        sources = step.sources if isinstance(step, PeerStep) else {}
        by_owner: dict[str, list[Move]] = {}
        for move in step.loads:
            by_owner.setdefault(move.owner, []).append(move)
        for owner, moves in by_owner.items():
            load = Load(owner)
            self._loads.append(load)
            self._threads.submit(self._receive, load, self._peer(sources[owner]), moves)
        for load in list(self._loads):
            self._take(load)

    def keeps(self, key: bytes) -> bool:
        return self._server is None or self._blocks.touch(key)

    def keep(self, key: bytes, data: np.ndarray) -> bool:
        kept = self._blocks.put(key, data)
        self.count("save_bytes", kept * data.nbytes)
        return kept

    def gauges(self) -> dict[str, float]:
        if self._server is None:
            return {}
        return {"peer_used_bytes": float(self._blocks.used_bytes), "peer_size_bytes": float(self._options.max_bytes)}

    def loaded(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self._gone.update(load.owner for load in self._loads if load.owner in finished)
        return super().end_step(finished)

    def close(self) -> None:
        for load in self._loads:
            load.stopped.set()
        for peer in self._peers.values():
            peer.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._server is not None:
            self._server.close()
        self._blocks.clear()

    def _peer(self, source: int) -> PeerClient:
        if source not in self._peers:
            self._peers[source] = PeerClient(
                Address.parse(self._options.peers[source], self.place),
                secret=self._secret,
                space=self.space,
                timeout=self._options.timeout_seconds,
                retry=self._options.retry_seconds,
            )
        return self._peers[source]

    def _receive(self, load: Load, peer: PeerClient, moves: Sequence[Move]) -> None:
        """Runs in a thread: fetches batch by batch, and asks for no further batch once a block is missing."""
        whole = True
        for part in batches(moves):
            data = self.rows_for(part)
            rows: list[int] = []
            if whole and load.owner not in self._gone and not load.stopped.is_set():
                try:
                    rows = peer.fetch([move.key for move in part], data)
                except PeerError:
                    rows = []
            whole = whole and len(rows) == len(part)
            load.give((part, data, rows))
        load.give(None)

    def _take(self, load: Load) -> None:
        """Moves what has arrived into the KV memory."""
        try:
            while (part := load.parts.get_nowait()) is not None:
                self.put(*part)
        except Empty:
            return
        self._loads.remove(load)
        self._gone.discard(load.owner)
        self._ended.append(load.owner)
