"""The worker side of the push connector: sends blocks layer by layer while prompts are computed, and takes them.

After a layer has run, the blocks that the step filled are copied elsewhere beside the next layers, and threads send
them: the step waits for no other engine. Received ones wait beside the KV cache until a request gets them. Between GPUs
of one machine all that is memory of these (see `push_direct`), else of the host.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import (
    CacheView,
    ConnectorWorker,
    ConnectorWorkerSetup,
    GroupBatch,
    LayerHooks,
    TransferReport,
    decode,
    encode,
)

from ..blocks.host_arena import HostArena
from ..blocks.host_slab import check_room
from ..blocks.mapped_memory import sharing_of
from ..nixl.messages import machine
from .buffer import DeviceBuffer
from .carrier import Carrier, Stream
from .direct import DirectCarrier
from .facts import Facts
from .inbox import MAX_CALLERS, Inbox
from .lanes import Lanes
from .loading import Loadings
from .messages import Hello, PushNote, PushStep
from .options import PushOptions, SendOptions
from .prompts import Row
from .sending import Sendings

logger = logging.getLogger("frame.connectors.push")

#: For this part of the time for which an ended request keeps its blocks these wait for room at the other engine.
_WAITING_SHARE = 0.5


class PushHooks(LayerHooks):
    """Has what a layer has just written be sent."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # of layers
        self.sendings: Sendings | None = None

    def after(self, layer: str, batch: GroupBatch) -> None:
        del batch
        if self.sendings is not None and layer in self.numbers:
            self.sendings.layer_done(self.numbers[layer])


class PushWorker(ConnectorWorker):
    """See the module. `title` is the connector's name."""

    moves_states = True
    title: ClassVar[str] = "push"
    hooks: PushHooks

    def __init__(self, setup: ConnectorWorkerSetup, options: SendOptions) -> None:
        super().__init__(setup, options)
        self._rank = self.rank % setup.mesh.engine_size  # among the workers of this engine, of which others know
        self._options = options
        self._secret = options.secret()
        self._send_queue, self._late_queue, self._load_queue = (setup.streams.side_queue() for _ in range(3))
        self.hooks = PushHooks()
        self._hello = Hello(machine(), "", 0)
        self._carrier: Carrier = Stream()
        self._lanes: Lanes | None = None
        self._sendings: Sendings | None = None
        self._inbox: Inbox | None = None
        self._loadings: Loadings | None = None

    def open_carrier(self, arenas: Sequence[HostArena]) -> tuple[Carrier, str]:
        """What sends bytes from and to that memory; and the session by which senders write to it, "" for none."""
        del arenas
        return Stream(), ""

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches:
            if self._sendings is not None:
                self._sendings.stop_reading()
            if self._loadings is not None:
                self._loadings.stop_writing()
            return
        numbers, memory, rows, formats = self.hooks.numbers, list[Tensor](), [], list[Any]()
        for group in self.layout.groups:
            for layer, view in ((layer, caches[layer]) for layer in group.layers if layer in caches):
                numbers[layer] = len(memory)
                memory.append(view.bytes)
                rows.append(Row(view.group, view.bytes.shape[1]))
                formats.append([list(view.format.shape), list(view.format.order), str(view.format.dtype), view.heads])
                if group.keeps_states:
                    formats[-1].append([[str(dtype), size] for dtype, size in view.parts])
        if not self._hello.formats:
            device = memory[0].device if memory else torch.device("cpu")
            self._open(hashlib.sha256(encode([self.title, formats])).hexdigest()[:16], rows, device)
        for user in (self._sendings, self._loadings):
            if user is not None:
                user.caches = memory

    def handshake(self) -> bytes:
        return encode(self._hello)

    def begin_step(self, message: bytes) -> None:
        step = decode(message, PushStep) if message else PushStep()
        if self._sendings is not None:
            self._sendings.begin(step)
        if self._loadings is not None:
            self._loadings.begin(step)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        report, note = TransferReport(counters={}, gauges={}), PushNote()
        if self._sendings is not None and self._lanes is not None:
            self._sendings.end()
            report.sent, self._sendings.sent = self._sendings.sent, []
            outcome = self._lanes.take()
            note.unsent, self._sendings.unsent = self._sendings.unsent + outcome.unsent, []
            self._count(report, "sent_bytes", outcome.num_bytes)
            if self._carrier.may_write:
                self._count(report, "direct_bytes", outcome.direct_bytes)
                self._count(report, "direct_seconds", outcome.direct_seconds)
            self._count(report, "unsent_prompts", len(note.unsent))
        if self._loadings is not None:
            self._end_loads(self._loadings, report, note)
        if note.arrivals or note.unsent:
            report.notes = [(self._rank, encode(note))]
        return report

    def pending_loads(self) -> list[str]:
        return [] if self._loadings is None else self._loadings.pending

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()
        if self._loadings is not None:
            self._loadings.stop_writing()
        if self._lanes is not None:
            self._lanes.close()
        self._carrier.close()
        self._send_queue.close()
        self._late_queue.close()
        self._load_queue.close()

    def _end_loads(self, loadings: Loadings, report: TransferReport, note: PushNote) -> None:
        loadings.end()
        report.received, loadings.received = loadings.received, []
        report.failed_blocks, loadings.failed_blocks = loadings.failed_blocks, []
        report.counters |= loadings.counters
        loadings.counters = {}
        counts = loadings.inbox.take()
        note.arrivals = counts.events
        self._count(report, "received_bytes", counts.num_bytes)
        report.gauges[f"{self.title}_buffer_used_bytes"] = float(loadings.inbox.arena.used_bytes)
        if loadings.inbox.buffer is not None:
            used = loadings.inbox.buffer.arena.used_bytes
            report.gauges[f"{self.title}_device_buffer_used_bytes"] = float(used)

    def _open(self, formats: str, rows: list[Row], device: torch.device) -> None:
        if self._secret is not None:
            role, options, pinned = self.setup.role, self._options, self.setup.memory.pinned
            wanted = [options.send_buffer_bytes * (role != "consumer"), options.buffer_bytes * (role != "producer")]
            check_room(sum(wanted), "lower buffer_bytes and send_buffer_bytes")
            sends = [HostArena(options.send_buffer_bytes, pinned)] if role != "consumer" else []
            takes = [HostArena(options.buffer_bytes, pinned)] if role != "producer" else []
            largest = max((row.num_bytes for row in rows), default=0)
            if sends and sends[0].num_bytes < largest:
                raise ValueError(
                    f"send_buffer_bytes of the {self.title} connector must hold the largest block of a layer, which "
                    f"has {largest} bytes, got {options.send_buffer_bytes}, of which {sends[0].num_bytes} are used"
                )
            self._carrier, session = self.open_carrier([*sends, *takes])
            buffer = self._open_direct(device)
            facts, groups = Facts.of(self.layout, self.setup.mesh, formats), [row.group for row in rows]
            for arena in sends:
                self._open_sendings(arena, self._secret, facts, groups)
            for arena in takes:
                self._inbox = Inbox(
                    self.layout,
                    rows,
                    arena,
                    self.setup.address,
                    secret=self._secret,
                    facts=facts,
                    rank=self._rank,
                    expiry=options.expiry_seconds,
                    session=session,
                    buffer=buffer,
                    name=self.title,
                )
                stage = self.setup.streams.stage
                self._loadings = Loadings(groups, stage, inbox=self._inbox, queue=self._load_queue, title=self.title)
        self._hello = Hello(machine(), formats, 0 if self._inbox is None else self._inbox.port)

    def _open_direct(self, device: torch.device) -> DeviceBuffer | None:
        """Prepares that blocks go from device to device; returns where they are taken, None where they are not."""
        options, role = self._options, self.setup.role
        if not isinstance(options, PushOptions) or not options.direct:
            return None
        try:
            sharing = sharing_of(device)
            if sharing is None:
                return None
            if role != "consumer":
                self._carrier = DirectCarrier(sharing, machine())
            return DeviceBuffer(sharing, machine(), options.device_bytes, MAX_CALLERS) if role != "producer" else None
        except (RuntimeError, ValueError) as error:
            logger.info("blocks between this device and others of the machine cross host memory: %s", error)
            return None

    def _open_sendings(self, arena: HostArena, secret: bytes, facts: Facts, groups: list[int]) -> None:
        options = self._options
        self._lanes = Lanes(
            self._carrier,
            secret,
            facts,
            self._rank,
            timeout=options.timeout_seconds,
            retry=options.retry_seconds,
            patience=options.expiry_seconds * _WAITING_SHARE,
            checksums=options.checksums,
        )
        self._sendings = self.hooks.sendings = Sendings(
            self.layout,
            groups,
            self.setup.streams.stage,
            arena=arena,
            lanes=self._lanes,
            queue=self._send_queue,
            late=self._late_queue,
            expiry=options.expiry_seconds,
        )

    def _count(self, report: TransferReport, name: str, value: float) -> None:
        if value:
            name = f"{self.title}_{name}"
            report.counters[name] = report.counters.get(name, 0.0) + value
