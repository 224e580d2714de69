"""The worker side of the nixl connector: lets other engines read its blocks, and reads theirs into its own.

Reads run beside the steps, in the agent's thread. What did not arrive, or not while the lease lasted, is reported as
failed, and this engine computes it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import (
    CacheView,
    ConnectorWorker,
    ConnectorWorkerSetup,
    KVGroup,
    Mark,
    TransferReport,
    decode,
    encode,
)

from ..blocks.mapped_memory import sharing_of
from .agent import Agent
from .direct import Direct
from .maps import LayerRows, Piece, Side, of_rank, readers, rows
from .messages import Fit, LayerMemory, Load, NixlNote, NixlStep, Notice, WorkerFacts, machine
from .mirror import Mirror
from .options import NixlOptions
from .reads import Read
from .shapes import BlockShape, Facts, GroupShape, LayerShape, RankShape, divided

logger = logging.getLogger("frame.connectors.nixl")

#: Devices whose memory NIXL reaches.
_REACHED = ("cpu", "cuda")
#: Other engines whose facts are kept.
_MAX_FITS = 64


@dataclass(eq=False)
class Loading:
    """A load that has begun: of its `reads` so many go on, and all others `arrived`, or one did not.

    One that is `given_up` was reported as failed, and its reads may still write to its blocks.
    `put` is passed once what arrived in host memory is on the device.
    """

    load: Load
    start: float
    reads: int
    arrived: bool = True
    given_up: bool = False
    put: Mark = field(default_factory=Mark)


class NixlWorker(ConnectorWorker):
    """See the module."""

    moves_states = True

    def __init__(self, setup: ConnectorWorkerSetup, options: NixlOptions) -> None:
        super().__init__(setup, options)
        self._rank = self.rank % setup.mesh.engine_size  # among the workers of this engine, of which others know
        self._options = options
        self._direct = 0, 0.0  # of the reads past NIXL of this agent, what was reported
        self._queue = setup.streams.side_queue()
        self._agent: Agent | None = None
        self._facts: WorkerFacts | None = None
        self._untold: WorkerFacts | None = None
        self._loads: dict[int, Loading] = {}  # by number
        self._places: dict[str, int] = {}  # where the layers' memory lies
        self._lost: list[tuple[int, bool]] = []  # reads that cannot begin
        self._fits: dict[bytes, Fit] = {}  # of engines that blocks were read of
        self._mirror: Mirror | None = None
        self._putting: list[Loading] = []  # from host memory to the device
        self._giving: dict[str, Mark] = {}  # requests whose blocks go to host memory

    def register(self, caches: Mapping[str, CacheView]) -> None:
        places = {name: view.bytes.data_ptr() for name, view in caches.items()}
        if self._agent is not None and places == self._places:
            return  # it was to go, and another read or another part of the worker did not let it
        if self._agent is not None and not caches and (goes_on := self._agent.end_reads()) is not None:
            raise RuntimeError(f"{goes_on}: try again later")
        self._end_agent()
        self._places = places
        self._mirror = None
        if not caches and self._facts is not None:
            return
        layers, regions, memory = [], dict[int, Tensor](), "DRAM"
        views = [(name, caches[name]) for group in self.layout.groups for name in group.layers if name in caches]
        if self._options.host_buffer or any(view.bytes.device.type not in _REACHED for _, view in views):
            self._mirror = Mirror(dict(views), self.setup.memory.pinned, self._queue)
        told = list[tuple[str, CacheView]]()
        for name, view in views:
            blocks = view.bytes if self._mirror is None else self._mirror.layers[name]
            memory = "DRAM" if blocks.device.type == "cpu" else "VRAM"
            for part, one in divided(name, view, blocks):
                count, size = one.bytes.shape
                device = blocks.device.index or 0
                layers.append(LayerMemory(one.bytes.data_ptr(), size, device, blocks.stride(0), count))
                told.append((part, one))
            storage = blocks.untyped_storage()
            regions[storage.data_ptr()] = blocks  # layers of several groups may share it
        # NIXL knows agents by name, and memory that comes back after sleep lies elsewhere
        name = f"{self.setup.engine_id}:{self.rank}:{secrets.token_hex(8)}"
        sizes = [(address, blocks.untyped_storage().nbytes()) for address, blocks in regions.items()]
        direct = partial(self._share, list(regions.values()))
        config = self._options.backend_config(self.setup.address)
        self._agent = Agent(
            name,
            layers,
            sizes,
            memory=memory,
            backend_config=config,
            direct=direct,
            stall_seconds=self._options.stall_seconds,
        )
        again = self._facts is not None
        buffered = self._mirror is not None
        self._facts = WorkerFacts(machine(), RankShape.of(told), self._agent.facts, buffered)
        self._untold = self._facts if again else None

    def _share(self, regions: Sequence[Tensor]) -> Direct | None:
        """How others of this machine reach the memory of this worker's device; None where they do not."""
        device = regions[0].device if regions else torch.device("cpu")
        sharing = sharing_of(device) if self._options.direct else None
        return None if sharing is None else Direct(sharing, machine(), regions)

    def handshake(self) -> bytes:
        return encode(self._facts)

    def begin_step(self, message: bytes) -> None:
        if not message or self._agent is None:
            return
        step = decode(message, NixlStep)
        self._agent.await_notices(step.holds)
        for number, deadline in step.deadlines.items():
            self._agent.extend(number, deadline)
        if self._mirror is not None:
            for owner, blocks in step.given.items():
                self._giving[owner] = self._mirror.fetch(blocks)
        for load in step.loads:
            self._begin(self._agent, load)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        ended, notices = ([], []) if self._agent is None else self._agent.take()
        ended += self._lost
        self._lost = []
        received, failed, failed_blocks, counters = [], [], [], dict[str, float]()
        given_up = self._give_up()
        lost = [loading for loading in given_up if not self._is_old(loading)]
        for loading in self._ended(ended):
            owner = loading.load.owner
            if self._is_old(loading):
                continue
            counts = [len(blocks) - blocks.count(0) for blocks in loading.load.ours]
            received.append(owner)
            if loading.arrived:
                _count(counters, "nixl_loaded_blocks", sum(counts))
                _count(counters, "nixl_loaded_bytes", self._num_bytes(counts))
                if self._rank == 0:  # the others read at the same time
                    _count(counters, "nixl_load_seconds", time.monotonic() - loading.start)
            elif not loading.given_up:
                failed.append(owner)
                lost.append(loading)
        for loading in lost:
            blocks = [(group, block) for group, some in enumerate(loading.load.ours) for block in some if block]
            failed_blocks += blocks
            _count(counters, "nixl_failed_blocks", len(blocks))
        if self._agent is not None:
            before, self._direct = self._direct, self._agent.direct
            for name, now, then in zip(("reads", "seconds"), self._direct, before, strict=True):
                _count(counters, f"nixl_direct_{name}", now - then)
        given = [owner for owner, mark in list(self._giving.items()) if mark.done() and self._passed(owner, mark)]
        notes = []
        if notices or failed or given or self._untold is not None:
            note = NixlNote(notices=notices, failed=failed, given=given, facts=self._untold)
            notes.append((self._rank, encode(note)))
            self._untold = None
        return TransferReport(
            received=received,
            given_up=[one.load.owner for one in self._loads.values() if one.given_up and not self._is_old(one)],
            failed_blocks=failed_blocks,
            counters=counters,
            notes=notes,
        )

    def pending_loads(self) -> list[str]:
        return [loading.load.owner for loading in self._pending()]

    def close(self) -> None:
        self._end_agent()
        self._queue.close()

    def _end_agent(self) -> None:
        """Ends all reads, and the copies to and from host memory."""
        if self._agent is not None:
            if self._agent.close():
                self.setup.streams.synchronize()
            self._agent, self._direct = None, (0, 0.0)
            self._loads.clear()  # their reads have ended with the agent, which tells nobody any more
            self._lost.clear()
        for mark in (*self._giving.values(), *(loading.put for loading in self._putting)):
            with suppress(Exception):
                mark.wait()

    def _pending(self) -> list[Loading]:
        return [*self._loads.values(), *self._putting]

    def _is_old(self, loading: Loading) -> bool:
        """Whether a later request has its id: then its blocks were given back long ago, and nobody is told of it."""
        number, owner = loading.load.number, loading.load.owner
        return any(one.load.owner == owner and one.load.number > number for one in self._pending())

    def _give_up(self) -> list[Loading]:
        """Loads for which nobody waits from now on."""
        numbers = [] if self._agent is None else self._agent.take_given_up()
        found = [loading for number in numbers if (loading := self._loads.get(number)) and not loading.given_up]
        for loading in found:
            loading.given_up, loading.arrived = True, False
        return found

    def _ended(self, reads: Sequence[tuple[int, bool]]) -> list[Loading]:
        """Loads that are over, of which these reads have ended now."""
        ended = []
        for number, arrived in reads:
            loading = self._loads[number]
            loading.reads -= 1
            loading.arrived &= arrived
            if loading.reads > 0:
                continue
            del self._loads[number]
            if self._mirror is not None and loading.arrived:
                loading.put = self._mirror.put(loading.load.ours)
                self._putting.append(loading)
            else:
                ended.append(loading)
        over = [loading for loading in self._putting if loading.put.done()]
        self._putting = [loading for loading in self._putting if loading not in over]
        for loading in over:
            try:
                loading.put.wait()
            except Exception:
                logger.exception("blocks could not be copied from host memory")
                loading.arrived = False
        return ended + over

    def _passed(self, owner: str, mark: Mark) -> bool:
        """Whether a request's blocks are in host memory; what is not is never read."""
        del self._giving[owner]
        try:
            mark.wait()
        except Exception:
            logger.exception("blocks could not be copied to host memory")
            return False
        return True

    def _begin(self, agent: Agent, load: Load) -> None:
        fit = self._fit(load.fit)
        from_ranks = readers(fit.pieces)
        mine = from_ranks[self._rank]
        loading = Loading(load, time.monotonic(), max(1, len(mine)))
        if not mine or not _covers(load, fit.theirs, mine):
            self._loads[load.number] = loading
            self._lost += [(load.number, not mine)] * max(1, len(mine))
            return
        self._queue.run(_nothing)
        mark = self._queue.mark()
        self._loads[load.number] = loading
        first, count = sum(map(len, from_ranks[: self._rank])), sum(map(len, from_ranks))
        for number, rank in enumerate(mine, first):
            notice = Notice(load.ticket, number, count).packed()
            wanted = partial(self._rows, load, fit, rank)
            agent.read(Read(load.number, load.agents[rank], wanted, notice, load.deadline, mark))

    def _fit(self, data: bytes) -> Fit:
        if data not in self._fits:
            if len(self._fits) >= _MAX_FITS:
                self._fits.clear()
            self._fits[data] = decode(data, Fit)
        return self._fits[data]

    def _rows(self, load: Load, fit: Fit, rank: int) -> list[LayerRows]:
        """What to read from that rank of the other engine."""
        own, peer, facts = self._facts, load.agents[rank], fit.theirs
        if own is None:
            raise ValueError("this worker has no memory")
        tables = [np.array(blocks, np.int64) for blocks in load.ours]
        theirs = [np.array(blocks, np.int64) for blocks in load.blocks]
        alike = dict[tuple[int, ...], list[Piece]]()
        for piece in of_rank(fit.pieces[self._rank], rank):
            layers = own.shape.layers[piece.ours], facts.ranks[rank][piece.theirs]
            memories = own.agent.layers[piece.ours], peer.layers[piece.theirs]
            kinds = (
                (layer.group, layer.block, layer.first, memory.stride)
                for layer, memory in zip(layers, memories, strict=True)
            )
            alike.setdefault((piece.first, piece.last, *chain(*kinds)), []).append(piece)
        parts = []
        for (first, last, *_), found in alike.items():
            here, there = own.shape.layers[found[0].ours], facts.ranks[rank][found[0].theirs]
            one, another = (
                _side(here, own.agent.layers[found[0].ours], own.shape.blocks, self.layout.groups),
                _side(there, peer.layers[found[0].theirs], facts.blocks, facts.groups),
            )
            # a state, which has one block, stands for all of them
            start = load.stop - one.block_size if self.layout.groups[here.group].keeps_states else load.start
            tokens = range(start, load.stop)
            pieces = rows(one, another, (first, last), tokens, tables[here.group], theirs[there.group])
            places = [(own.agent.layers[piece.ours].address, peer.layers[piece.theirs].address) for piece in found]
            parts.append(LayerRows(np.array(places, np.int64), pieces))
        return parts

    def _num_bytes(self, counts: Sequence[int]) -> int:
        """Bytes of so many blocks of each group."""
        if self._facts is None:
            return 0
        layers = zip(self._facts.shape.layers, self._facts.agent.layers, strict=True)
        return sum(memory.size * counts[layer.group] for layer, memory in layers)


def _covers(load: Load, theirs: Facts, ranks: Sequence[int]) -> bool:
    """Whether all blocks to be read are there: ids that are none of the peer's blocks name other memory."""
    for blocks, group in zip(load.blocks, theirs.groups, strict=True):
        if len(blocks) != len(group.places(load.start, load.stop)) or min(blocks) < 0:
            return False
    most = [max(blocks) for blocks in load.blocks]
    for rank in ranks:
        layers = load.agents[rank].layers
        if len(layers) != len(theirs.ranks[rank]):
            return False
        for shape, memory in zip(theirs.ranks[rank], layers, strict=True):
            whole = memory.size == theirs.blocks[shape.block].num_bytes <= memory.stride
            if not whole or most[shape.group] >= memory.count:
                return False
    return True


def _side(
    layer: LayerShape, memory: LayerMemory, blocks: Sequence[BlockShape], groups: Sequence[KVGroup | GroupShape]
) -> Side:
    """How a layer's blocks lie, from its address on."""
    return Side(blocks[layer.block], groups[layer.group].block_size, layer.first, 0, memory.stride)


def _count(counters: dict[str, float], name: str, value: float) -> None:
    if value:
        counters[name] = counters.get(name, 0.0) + value


def _nothing() -> None:
    pass
