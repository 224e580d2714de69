"""A prefill engine's side of the push connector: which blocks of which requests are sent, and where. Sees no byte."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frame.interfaces import KVLayout, RequestView, StepPlan

from .nixl_messages import MAX_BLOCKS, digest
from .nixl_pulls import whole_tokens
from .push_messages import Chunk, End, Goal, PushStep, Start, spans
from .push_options import PushOptions

logger = logging.getLogger("frame.connectors.push")


@dataclass
class Push:
    """A running request whose prompt is sent; `tables[g]` are its blocks, of which `nexts[g]` is to be sent next."""

    goal: Goal
    spans: list[tuple[int, int]]
    tables: list[list[int]] = field(default_factory=list)
    nexts: list[int] = field(default_factory=list)


class Pushes:
    """See the module. `address` is this machine's."""

    def __init__(self, layout: KVLayout, options: PushOptions, address: str) -> None:
        self._layout = layout
        self._options = options
        self._address = address
        self._most = int((layout.pools[0] - 1) * options.max_held_share)
        self._pushes: dict[str, Push] = {}  # of requests that were admitted
        self._slots: dict[int, str] = {}
        self._unsent: set[str] = set()  # running requests of which no more is sent
        self._held: dict[str, int] = {}  # of ended requests: how many blocks each keeps
        self._drops: list[str] = []
        self._ends: list[End] = []
        self._warned: set[str] = set()

    @property
    def num_held(self) -> int:
        """Blocks that ended requests keep, one that several share counted for each."""
        return sum(self._held.values())

    @property
    def busy(self) -> bool:
        """Whether something is being sent."""
        return bool(self._pushes or self._held)

    def allocated(self, request: RequestView) -> None:
        """Called each time a request is admitted."""
        goal = self._goal(request)
        if goal is not None:
            self._pushes[request.request_id] = Push(goal, spans(self._layout, goal.num_tokens))
            self._unsent.discard(request.request_id)

    def fill(self, step: PushStep, plan: StepPlan) -> None:
        """Adds to a step's message what is sent from then on."""
        step.drops, self._drops = self._drops, []
        step.ends, self._ends = self._ends, []
        step.held = list(self._held)
        if self._slots or self._pushes:
            self._follow(step, plan)
            self._fill_chunks(step, plan)

    def finished(self, request: RequestView, tables: Sequence[Sequence[int]]) -> bool:
        """Called once a request; whether its blocks stay until workers say that they were sent."""
        name = request.request_id
        push = self._pushes.pop(name, None)
        failed = name in self._unsent
        self._unsent.discard(name)
        # of other ends it is not known whether the prompt was computed, or nobody waits for it
        goal = self._goal(request) if request.finish_reason in ("stop", "length") and not failed else None
        if goal is not None:
            blocks = [
                [int(block) for block in table[first:last]]
                for table, (first, last) in zip(tables, spans(self._layout, goal.num_tokens), strict=True)
            ]
            count = sum(map(len, blocks))
            whole = all(map(all, blocks)) and count <= MAX_BLOCKS and name not in self._held
            if whole and self.num_held + count <= self._most:
                self._held[name] = count
                self._ends.append(End(name, goal, blocks))
                return True
            if whole:
                self._warn("held", "as much of the KV cache as max_held_share allows is kept; further blocks are not")
        if push is not None:
            self._drops.append(name)
        return False

    def unsent(self, names: Sequence[str]) -> None:
        """Called with requests whose blocks a worker could not send."""
        self._unsent.update(name for name in names if name in self._pushes)

    def released(self, names: Sequence[str]) -> None:
        """Called with requests whose blocks all workers have sent."""
        for name in names:
            self._held.pop(name, None)

    def _goal(self, request: RequestView) -> Goal | None:
        if request.params.get("do_remote_decode") is not True:
            return None
        place = place_of(request.params) or self._options.place
        num_tokens = whole_tokens(request, self._layout)
        if place is None:
            self._warn("params", "kv_transfer_params name no remote_host and remote_port, and the option decode none")
            return None
        if not self._options.allows(place[0], self._address):
            self._warn(f"host {place[0]}", f"{place[0]!r} is none of the hosts of `peers`; no blocks are sent there")
            return None
        if num_tokens == 0:
            return None
        return Goal(*place, digest(request.content, request.token_ids[:num_tokens]), num_tokens)

    def _follow(self, step: PushStep, plan: StepPlan) -> None:
        """Updates which request has which slot and blocks."""
        for slot in plan.removed_slots.tolist():
            self._slots.pop(slot, None)
        for new in plan.added:
            push = self._pushes.get(new.request_id)
            if push is not None:
                push.tables = [blocks.tolist() for blocks in new.block_ids]
                push.nexts = [first for first, _ in push.spans]
                self._slots[new.slot] = new.request_id
                step.starts.append(Start(new.request_id, push.goal))
        for append in plan.appends:
            rows = zip(append.slots.tolist(), append.offsets.tolist(), append.block_ids.tolist(), strict=True)
            for slot, offset, block in rows:
                push = self._pushes.get(self._slots.get(slot, ""))
                if push is not None:
                    table = push.tables[append.group]
                    table.extend([0] * (offset + 1 - len(table)))
                    table[offset] = block

    def _fill_chunks(self, step: PushStep, plan: StepPlan) -> None:
        """What is right once the step's layers have run, found prefixes among it: a row may have them from another."""
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
        for slot, num_computed, count in rows:
            name = self._slots.get(slot, "")
            push = self._pushes.get(name)
            if push is None or name in self._unsent:
                continue
            firsts, blocks = list(push.nexts), []
            for number, (table, (_, most)) in enumerate(zip(push.tables, push.spans, strict=True)):
                last = min((num_computed + count) // self._layout.groups[number].block_size, most)
                some = table[push.nexts[number] : last]
                if not all(some):
                    some = []  # it comes at the end, if it is there then
                blocks.append(some)
                push.nexts[number] += len(some)
            if any(blocks):
                step.chunks.append(Chunk(name, firsts, blocks))

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned and len(self._warned) < 64:
            self._warned.add(about)
            logger.warning("%s", text)


def place_of(params: Mapping[str, Any]) -> tuple[str, int] | None:
    """Where a request's parameters say that its prompt is decoded; None where they do not, or wrongly."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) < 6:
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        return None
    return (host, port) if isinstance(host, str) and 0 < len(host) <= 512 else None
