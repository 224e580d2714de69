"""The worker side of the nixl connector: lets other engines read its blocks, and reads theirs into its own.

Reads run beside the steps, in the agent's thread. What did not arrive, or not while the lease lasted, is reported as
failed, and this engine computes it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from frame.interfaces import CacheView, ConnectorWorker, ConnectorWorkerSetup, TransferReport, decode, encode

from .nixl_agent import Agent, Read
from .nixl_messages import AgentFacts, LayerMemory, Load, NixlNote, NixlStep, WorkerFacts, machine
from .nixl_options import NixlOptions


class NixlWorker(ConnectorWorker):
    """See the module."""

    def __init__(self, setup: ConnectorWorkerSetup, options: NixlOptions) -> None:
        super().__init__(setup, options)
        self._config = options.backend_config(setup.address)
        self._queue = setup.streams.side_queue()
        self._agent: Agent | None = None
        self._facts: WorkerFacts | None = None
        self._untold: WorkerFacts | None = None
        self._groups: list[int] = []  # of each layer, as the agent has them
        self._counts: list[int] = []
        self._loads: dict[str, Load] = {}
        self._starts: dict[str, float] = {}
        self._lost: list[str] = []  # owners of loads that cannot begin

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        if not caches and self._facts is not None:
            return
        layers, regions, formats, memory = [], dict[int, int](), [], "DRAM"
        self._groups, self._counts = [], []
        for group in self.layout.groups:
            for view in (caches[layer] for layer in group.layers if layer in caches):
                rows = view.bytes
                memory = "DRAM" if rows.device.type == "cpu" else "VRAM"
                layers.append(
                    LayerMemory(rows.data_ptr(), rows.shape[1], rows.device.index or 0, rows.stride(0), rows.shape[0])
                )
                storage = rows.untyped_storage()
                regions[storage.data_ptr()] = storage.nbytes()  # layers of several groups may share it
                formats.append([list(view.format.shape), list(view.format.order), str(view.format.dtype), view.heads])
                self._groups.append(view.group)
                self._counts.append(rows.shape[0])
        # NIXL knows agents by name, and memory that comes back after sleep lies elsewhere
        name = f"{self.setup.engine_id}:{self.rank}:{secrets.token_hex(8)}"
        self._agent = Agent(name, layers, list(regions.items()), memory=memory, backend_config=self._config)
        format_name = hashlib.sha256(encode(formats)).hexdigest()[:16]
        again = self._facts is not None
        self._facts = WorkerFacts(machine(), format_name, self._agent.facts)
        self._untold = self._facts if again else None

    def handshake(self) -> bytes:
        return encode(self._facts)

    def begin_step(self, message: bytes) -> None:
        if not message or self._agent is None:
            return
        step = decode(message, NixlStep)
        self._agent.await_notices(step.holds)
        for owner, deadline in step.deadlines.items():
            self._agent.extend(owner, deadline)
        for load in step.loads:
            self._loads[load.owner] = load
            self._starts[load.owner] = time.monotonic()
            self._begin(self._agent, load)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        ended, notices = ([], []) if self._agent is None else self._agent.take()
        ended += [(owner, False) for owner in self._lost]
        self._lost = []
        received, failed, failed_blocks, counters = [], [], [], dict[str, float]()
        for owner, arrived in ended:
            load, start = self._loads.pop(owner), self._starts.pop(owner)
            blocks = [(group, block) for group, some in enumerate(load.ours) for block in some]
            received.append(owner)
            if arrived:
                _count(counters, "nixl_loaded_blocks", len(blocks))
                _count(counters, "nixl_loaded_bytes", self._num_bytes(load))
                _count(counters, "nixl_load_seconds", time.monotonic() - start)
            else:
                failed.append(owner)
                failed_blocks += blocks
                _count(counters, "nixl_failed_blocks", len(blocks))
        notes = []
        if notices or failed or self._untold is not None:
            notes.append((self.rank, encode(NixlNote(notices=notices, failed=failed, facts=self._untold))))
            self._untold = None
        return TransferReport(
            received=received,
            failed_blocks=failed_blocks,
            counters=counters,
            notes=notes,
        )

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self._queue.close()

    def _begin(self, agent: Agent, load: Load) -> None:
        peer = load.agents[self.rank] if self.rank < len(load.agents) else None
        if peer is None or not self._fits(peer, load):
            self._lost.append(load.owner)
            return
        self._queue.run(_nothing)
        agent.read(
            Read(
                load.owner,
                peer,
                self._places(load.ours, self._counts),
                self._places(load.theirs, [layer.count for layer in peer.layers]),
                load.notice + bytes([self.rank]),
                load.deadline,
                self._queue.mark(),
            )
        )

    def _fits(self, peer: AgentFacts, load: Load) -> bool:
        """Whether all blocks to be read are there: ids that are none of the peer's blocks name other memory."""
        if len(peer.layers) != len(self._groups):
            return False
        for group, layer in zip(self._groups, peer.layers, strict=True):
            theirs = load.theirs[group]
            if len(theirs) != len(load.ours[group]) or any(not 0 < block < layer.count for block in theirs):
                return False
        return True

    def _places(self, blocks: Sequence[Sequence[int]], counts: Sequence[int]) -> np.ndarray:
        """The numbers in the agent's table of the blocks of each layer."""
        firsts = accumulate(counts, initial=0)
        parts = [
            np.asarray(blocks[group], np.int32) + first for group, first in zip(self._groups, firsts, strict=False)
        ]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def _num_bytes(self, load: Load) -> int:
        layers = self._facts.agent.layers if self._facts is not None else []
        return sum(layer.size * len(load.ours[group]) for group, layer in zip(self._groups, layers, strict=True))


def _count(counters: dict[str, float], name: str, value: float) -> None:
    counters[name] = counters.get(name, 0.0) + value


def _nothing() -> None:
    pass
