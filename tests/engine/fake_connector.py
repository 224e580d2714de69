"""A KV connector over a dictionary: block hash → fingerprints. Loads may be late, fail, and saves may hold blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frame.core.interfaces.connector import ConnectorScheduler, RequestView
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.step import StepPlan, TransferReport
from frame.interfaces import LayerHooks
from frame.testing import make_setup
from frame.testing.fake_cache import BAD, prefixes_of
from frame.testing.fake_worker import FakeWorker


class Load(msgspec.Struct):
    """The grains of a request from number `first` on, in blocks [group][i]; `prints[i]` are their prefixes."""

    request_id: str
    first: int
    blocks: list[list[int]]
    prints: list[list[int]]
    later: bool


@dataclass
class FakeTransferWorker:
    """Does loads at once (late ones: two steps later) and lets sends take two steps."""

    connector: FakeConnector
    layout: KVLayout
    failing: set[int]  # load numbers whose last block does not arrive
    loads: int = 0
    waiting: list[tuple[int, Load]] = field(default_factory=list)
    sending: dict[str, int] = field(default_factory=dict)
    step: int = 0
    failed: list[tuple[int, int]] = field(default_factory=list)
    received: list[str] = field(default_factory=list)

    hooks = LayerHooks()
    moves_states = True

    def register(self, caches: object) -> None:
        pass

    def handshake(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def begin_step(self, message: bytes) -> None:
        self.step += 1
        for load in msgspec.msgpack.decode(message, type=list[Load]) if message else ():
            if load.later:
                self.waiting.append((self.step + 2, load))
            else:
                self._do(load)
        for due, load in list(self.waiting):
            if due <= self.step:
                self.waiting.remove((due, load))
                self._do(load)
                self.received.append(load.request_id)

    def pending_loads(self) -> None:
        pass

    def _do(self, load: Load) -> None:
        fails = self.loads in self.failing
        # of every other load that fails the state alone does not arrive
        keeps = fails and self.loads % 2 == 0 and any(group.keeps_states for group in self.layout.groups)
        self.loads += 1
        grain = self.layout.grain
        for index, (table, group) in enumerate(zip(load.blocks, self.layout.groups, strict=True)):
            size = group.block_size
            if group.keeps_states:
                position, prefix = (load.first + len(load.prints)) * grain - 1, load.prints[-1][-1]
                if fails:
                    self.failed.append((index, table[0]))
                self.connector.worker.put(index, table[0], position, BAD if fails else prefix)
                continue
            for i, prints in enumerate(load.prints):
                bad = fails and not keeps and i == len(load.prints) - 1
                for position, prefix in enumerate(prints, (load.first + i) * grain):
                    block = table[position // size]
                    if bad and block and position % size == 0:
                        self.failed.append((index, block))
                    if block:
                        self.connector.worker.put(index, block, position, BAD if bad else prefix)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        sent = [name for name, due in self.sending.items() if due <= self.step]
        for name in sent:
            del self.sending[name]
            self.connector.check_held(name)
        for name in finished:
            self.sending[name] = self.step + 2
        report = TransferReport(sent=sent, received=self.received, failed_blocks=self.failed)
        self.received, self.failed = [], []
        return report


class FakeConnector(ConnectorScheduler):
    def __init__(
        self,
        *,
        layout: KVLayout,
        later: bool = False,
        hold: bool = False,
        failing: Sequence[int] = (),
        shy: int = 0,
        ends: bool = False,
        by_tokens: bool = False,
    ) -> None:
        super().__init__(make_setup("connector", layout=layout))
        self.reads_hashes = not by_tokens
        self.store: dict[bytes, list[int]] = {}
        self.ends = ends and not any(group.keeps_states for group in layout.groups)
        self.stored_ends: dict[tuple[int, ...], list[int]] = {}  # by tokens: what is behind their last grain
        self.later, self.hold, self.failing, self.shy = later, hold, set(failing), shy
        self.ended: list[str] = []
        self.told: list[tuple[str, int]] = []  # requests that got blocks, and how many tokens are to be loaded
        self.views: dict[str, RequestView] = {}
        self.held: dict[str, tuple[int, int, int, int]] = {}  # group, block, tokens, what it holds
        self.states_named: list[bool] = []  # whether the copies that are named of ended requests are right
        self.expired: list[str] = []  # ids whose blocks are given back with the next report
        self.messages: list[Load] = []
        self.worker: FakeWorker

    def worker_side(self, layout: KVLayout) -> FakeTransferWorker:
        self.transfer = FakeTransferWorker(self, layout, self.failing)
        return self.transfer

    def hashes(self, request: RequestView) -> Sequence[bytes]:
        """What the grains of a prompt are stored by."""
        if self.reads_hashes:
            return request.block_hashes
        assert not request.block_hashes
        ends = range(self.layout.grain, request.prompt_len + 1, self.layout.grain)
        return [request.content + array("i", request.token_ids[:end]).tobytes() for end in ends]

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        if self.shy:
            self.shy -= 1
            return None, False
        size = self.layout.grain
        count = 0
        for block_hash in self.hashes(request)[num_computed // size :]:
            if block_hash not in self.store:
                break
            count += size
        end = len(request.token_ids) - 1
        if count and num_computed + count == end // size * size and tuple(request.token_ids[:end]) in self.stored_ends:
            count = end - num_computed
        return count, self.later and count > 0

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        self.told.append((request.request_id, num_external))
        self.views[request.request_id] = request
        if not num_external:
            return
        grain, group = self.layout.grain, self.layout.groups[0]
        end = len(request.token_ids) - 1 if num_external % grain else len(block_ids[0]) * group.block_size
        first, last = (end - num_external) // grain, end // grain
        prints = [self.store[block_hash] for block_hash in self.hashes(request)[first:last]]
        if num_external % grain:
            prints.append(self.stored_ends[tuple(request.token_ids[:end])])
        tables = [list(table) for table in block_ids]
        self.messages.append(Load(request.request_id, first, tables, prints, self.later))

    def update(self, report: TransferReport) -> list[str]:
        expired, self.expired = self.expired, []
        return expired

    def build_message(self, plan: StepPlan) -> bytes:
        message = msgspec.msgpack.encode(self.messages) if self.messages else b""
        self.messages = []
        return message

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        assert request.request_id not in self.ended, "finished() came twice"
        self.ended.append(request.request_id)
        self.views[request.request_id] = request
        self.check_states(request, block_ids)
        size, table = self.layout.groups[0].block_size, block_ids[0]
        for index, block_hash in enumerate(self.hashes(request)):
            places = range(index * self.layout.grain, (index + 1) * self.layout.grain)
            if places[-1] // size >= len(table) or not all(table[place // size] for place in places):
                break
            prints = prefixes_of(list(request.token_ids))[places[0] : places[-1] + 1]
            # a request may end before its blocks were filled
            if [self.worker.prefix_at(0, table[place // size], place) for place in places] != prints:
                break
            self.store[block_hash] = prints
        if self.ends:
            self.store_ends(request, table)
        return self.hold, {"remote": request.request_id} if self.hold else None

    def store_ends(self, request: RequestView, table: Sequence[int]) -> None:
        """Keeps what is behind the last grain of a prompt, and of each that it begins with, where that is there."""
        grain, size = self.layout.grain, self.layout.groups[0].block_size
        tokens = list(request.token_ids)
        prints = prefixes_of(tokens)
        for end in range(1, request.prompt_len):
            places = range(end // grain * grain, end)
            if places and places[-1] // size < len(table) and all(table[place // size] for place in places):
                found = [self.worker.prefix_at(0, table[place // size], place) for place in places]
                if found == prints[places[0] : end]:
                    self.stored_ends[tuple(tokens[:end])] = found

    def check_states(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> None:
        """What is named of a state is its copy behind the prompt's last grain before its last token."""
        place = (request.prompt_len - 1) // self.layout.grain * self.layout.grain
        for group, table in zip(self.layout.groups, block_ids, strict=True):
            if group.keeps_states and request.finish_reason in ("stop", "length") and any(table):
                index = self.layout.groups.index(group)
                self.held[request.request_id] = index, table[0], place, prefixes_of(list(request.token_ids))[place - 1]
                self.check_held(request.request_id)
                if not self.hold:
                    del self.held[request.request_id]

    def check_held(self, request_id: str) -> None:
        """Notes whether the copy that was named of an ended request is right still."""
        if request_id in self.held:
            group, block, place, prefix = self.held[request_id]
            self.states_named.append(self.worker.prefix_at(group, block, place - 1) == prefix)
