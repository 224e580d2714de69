"""The worker side of the peer connector: keeps copies in host memory for peers, and loads blocks from peers.

A load runs beside the steps: a thread receives blocks into a few host buffers, and each step moves those that have
arrived into the KV memory. A load that fails reports the blocks that did not arrive, and this engine computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from frame.interfaces import ConnectorWorkerSetup

from ..blocks.loading_worker import LoadingWorker
from ..blocks.messages import BlockStep, Move
from ..blocks.wire import PeerError
from ..blocks.worker import batches
from .client import PeerClient
from .messages import PeerStep
from .options import Address, PeerOptions
from .server import HostBlocks, PeerServer


class PeerWorker(LoadingWorker):
    """See the module."""

    title = "peer"
    message = PeerStep

    def __init__(self, setup: ConnectorWorkerSetup, options: PeerOptions) -> None:
        super().__init__(setup, options, max(1, len(options.peers)))
        self._options = options
        self._secret = options.secret()
        self._blocks = HostBlocks(options.max_bytes)
        self._peers: dict[int, PeerClient] = {}
        self._server: PeerServer | None = None
        if options.listen is not None and setup.role != "consumer":
            first = Address.parse(options.listen, setup.data_rank * setup.mesh.engine_size)
            address = Address.parse(str(first), self.rank)
            self._server = PeerServer(address, self._blocks, secret=self._secret, timeout=options.timeout_seconds)

    def load(self, step: BlockStep) -> None:
        if step.blocks_name:
            self._blocks.space = self.space
        sources = step.sources if isinstance(step, PeerStep) else {}
        by_owner: dict[str, list[Move]] = {}
        for move in step.loads:
            by_owner.setdefault(move.owner, []).append(move)
        for owner, moves in by_owner.items():
            self.begin_load(owner, batches(moves), partial(_fetch, self._peer(sources[owner])))
        self.take_arrived()

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

    def close(self) -> None:
        self.stop_loads()
        for peer in self._peers.values():
            peer.close()
        self.end_loads()
        if self._server is not None:
            self._server.close()
        self._blocks.clear()

    def _peer(self, source: int) -> PeerClient:
        if source not in self._peers:
            self._peers[source] = PeerClient(
                Address.parse(self._options.peers[source], self.rank),
                secret=self._secret,
                space=self.space,
                timeout=self._options.timeout_seconds,
                retry=self._options.retry_seconds,
            )
        return self._peers[source]


def _fetch(peer: PeerClient, moves: Sequence[Move], data: np.ndarray) -> list[int]:
    try:
        return peer.fetch([move.key for move in moves], data)
    except PeerError:
        return []
