"""A prefill engine's side of the push connector: which blocks of which requests are sent, and where. Sees no byte."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from frame.interfaces import KVLayout, RequestView, StepPlan
from frame.quoting import quoted

from ..blocks.remote import ParamsError, port_of, text_of
from ..nixl.messages import MAX_BLOCKS, digest
from ..nixl.options import peers_words
from .messages import Chunk, End, Goal, PushStep, Start, moved_tokens, spans
from .options import PushOptions, SendOptions

logger = logging.getLogger("frame.connectors.push")


@dataclass
class Push:
    """A running request whose prompt is sent; `tables[g]` are its blocks, of which `nexts[g]` is to be sent next.

    `goal` is None while it is not known where they go.
    """

    digest: bytes
    num_tokens: int
    spans: list[tuple[int, int]]
    tables: list[list[int]] = field(default_factory=list)
    nexts: list[int] = field(default_factory=list)
    goal: Goal | None = None


@dataclass
class Kept:
    """The blocks of an ended request; nobody has asked for them yet, and after `deadline` nobody may."""

    digest: bytes
    num_tokens: int
    blocks: list[list[int]]
    deadline: float


class Held(NamedTuple):
    """How many blocks of tokens, and how many copies of states, an ended request keeps."""

    blocks: int
    states: int


class Sends(ABC):
    """See the module."""

    #: whether it may become known where blocks go when the request has begun, or ended
    awaits: ClassVar[bool] = False

    def __init__(self, layout: KVLayout, options: SendOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._options = options
        self._clock = clock
        self._most, *states = (int((count - 1) * options.max_held_share) for count in layout.pools)
        self._most_states = sum(states)
        self._pushes: dict[str, Push] = {}  # of requests that were admitted
        self._slots: dict[int, str] = {}
        self._unsent: set[str] = set()  # running requests of which no more is sent
        self._kept: dict[str, Kept] = {}
        self._held: dict[str, Held] = {}  # of ended requests: how many blocks each keeps
        self._drops: list[str] = []
        self._ends: list[End] = []
        self._refused: list[Goal] = []
        self._warned: set[str] = set()

    @property
    def num_held(self) -> int:
        """Blocks that ended requests keep, one that several share counted for each."""
        return sum(held.blocks + held.states for held in self._held.values())

    @property
    def busy(self) -> bool:
        """Whether something is being sent, or workers are yet to hear of what is not: an idle engine takes no step."""
        return bool(self._pushes or self._held or self._drops or self._refused)

    @abstractmethod
    def place(self, request: RequestView, shown: bytes) -> tuple[str, int] | None:
        """Where the prompt of a request goes, for which the digest `shown` stands; None while that is not known."""

    def found(self, shown: bytes) -> tuple[str, int] | None:
        """Where a prompt goes of which that was not known."""
        del shown
        return None

    def lacks(self, shown: bytes) -> None:
        """Called with a prompt that was computed and of which nothing was sent, nor is kept."""
        del shown

    def allocated(self, request: RequestView) -> None:
        """Called each time a request is admitted."""
        push = self._push(request)
        if push is not None:
            self._pushes[request.request_id] = push
            self._unsent.discard(request.request_id)

    def fill(self, step: PushStep, plan: StepPlan) -> None:
        """Adds to a step's message what is sent from then on."""
        self._give_kept()
        step.drops, self._drops = self._drops, []
        step.ends, self._ends = self._ends, []
        step.refused, self._refused = self._refused, []
        step.held = [name for name in self._held if name not in self._kept]
        if self._slots or self._pushes:
            self._follow(plan)
            self._fill_chunks(step, plan)

    def finished(self, request: RequestView, tables: Sequence[Sequence[int]]) -> bool:
        """Called once a request; whether its blocks stay until workers say that they were sent."""
        name = request.request_id
        begun = self._pushes.pop(name, None)
        failed = name in self._unsent
        self._unsent.discard(name)
        # of other ends it is not known whether the prompt was computed, or nobody waits for it
        push = None if failed or request.finish_reason not in ("stop", "length") else begun or self._push(request)
        if push is not None and self._keep(name, push, tables):
            return True
        if begun is not None and begun.goal is not None:
            self._drops.append(name)
        elif push is not None:
            self._refuse(push)
        return False

    def unsent(self, names: Sequence[str]) -> None:
        """Called with requests whose blocks a worker could not send."""
        self._unsent.update(name for name in names if name in self._pushes)

    def released(self, names: Sequence[str]) -> list[str]:
        """Called with requests whose blocks all workers have sent; further ones, for whose blocks nobody asks."""
        now = self._clock()
        expired = [name for name, kept in self._kept.items() if kept.deadline <= now]
        for name in (*names, *expired):
            self._held.pop(name, None)
            self._kept.pop(name, None)
        return expired

    def forget(self) -> None:
        """Nobody may ask any more for what is kept."""
        for kept in self._kept.values():
            kept.deadline = self._clock()

    def _push(self, request: RequestView) -> Push | None:
        num_tokens = moved_tokens(request, self._layout)
        if request.params.get("do_remote_decode") is not True or num_tokens == 0:
            return None
        shown = digest(request.content, request.token_ids[:num_tokens])
        push = Push(shown, num_tokens, spans(self._layout, num_tokens))
        if (place := self.place(request, shown)) is not None:
            push.goal = Goal(*place, shown, num_tokens)
        return push if push.goal is not None or self.awaits else None

    def _refuse(self, push: Push) -> None:
        """Has who waits for a prompt be told that nothing of it comes."""
        self.lacks(push.digest)
        if push.goal is None and (place := self.found(push.digest)) is not None:
            push.goal = Goal(*place, push.digest, push.num_tokens)
        if push.goal is not None:
            self._refused.append(push.goal)

    def _keep(self, name: str, push: Push, tables: Sequence[Sequence[int]]) -> bool:
        blocks = [
            [int(block) for block in table[first:last]] for table, (first, last) in zip(tables, push.spans, strict=True)
        ]
        needed = [last - first for first, last in push.spans]
        # it may have none any more, or no copy of its state was kept, or not for long enough
        if name in self._held or sum(needed) > MAX_BLOCKS or [sum(map(bool, some)) for some in blocks] != needed:
            return False
        states = sum(group.keeps_states for group in self._layout.groups)
        held = Held(sum(needed) - states, states)
        full = sum(one.blocks for one in self._held.values()) + held.blocks > self._most
        if full or sum(one.states for one in self._held.values()) + held.states > self._most_states:
            self.warn("held", "as much of the KV cache as max_held_share allows is kept; further blocks are not")
            return False
        self._held[name] = held
        if push.goal is not None:
            self._ends.append(End(name, push.goal, blocks))
        else:
            self._kept[name] = Kept(push.digest, push.num_tokens, blocks, self._clock() + self._options.expiry_seconds)
        return True

    def _give_kept(self) -> None:
        """Blocks of ended requests for which somebody has asked now."""
        for name, kept in list(self._kept.items()):
            place = self.found(kept.digest)
            if place is not None and kept.deadline > self._clock():
                del self._kept[name]
                self._ends.append(End(name, Goal(*place, kept.digest, kept.num_tokens), kept.blocks))

    def _follow(self, plan: StepPlan) -> None:
        """Updates which request has which slot and blocks."""
        for slot in plan.removed_slots.tolist():
            self._slots.pop(slot, None)
        for new in plan.added:
            push = self._pushes.get(new.request_id)
            if push is not None:
                push.tables = [blocks.tolist() for blocks in new.block_ids]
                push.nexts = [first for first, _ in push.spans]
                self._slots[new.slot] = new.request_id
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
        added = {new.request_id for new in plan.added}
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
        for slot, num_computed, count in rows:
            name = self._slots.get(slot, "")
            push = self._pushes.get(name)
            if push is None or name in self._unsent:
                continue
            late = push.goal is None
            if push.goal is None and (place := self.found(push.digest)) is not None:
                push.goal = Goal(*place, push.digest, push.num_tokens)
            if push.goal is None:
                continue
            if late or name in added:
                step.starts.append(Start(name, push.goal))
            firsts, blocks = list(push.nexts), []
            for number, (table, (_, most)) in enumerate(zip(push.tables, push.spans, strict=True)):
                group, end = self._layout.groups[number], num_computed + count
                if group.keeps_states:
                    last = int(end == push.num_tokens)
                else:  # behind the prompt also a block that is filled in part
                    last = most if end >= push.num_tokens else min(end // group.block_size, most)
                some = table[push.nexts[number] : last]
                if not all(some):
                    some = []  # it comes at the end, if it is there then
                blocks.append(some)
                push.nexts[number] += len(some)
            if any(blocks):
                step.chunks.append(Chunk(name, firsts, blocks))

    def warn(self, about: str, text: str) -> None:
        """Logs something once."""
        if about not in self._warned and len(self._warned) < 64:
            self._warned.add(about)
            logger.warning("%s", text)


class Pushes(Sends):
    """Blocks go where a request's parameters or the options say. `address` is this machine's."""

    def __init__(self, layout: KVLayout, options: PushOptions, address: str) -> None:
        super().__init__(layout, options)
        self._place = options.place
        self._address = address

    def place(self, request: RequestView, shown: bytes) -> tuple[str, int] | None:
        del shown
        try:
            place = place_of(request.params) or self._place
        except ParamsError as error:
            self.warn(f"params {error.name}", f"kv_transfer_params: {error}; the blocks of such prompts are not sent")
            return None
        if place is None:
            self.warn("params", "kv_transfer_params name no remote_host and remote_port, and the option decode none")
            return None
        if place != self._place and not self._options.allows(place[0], self._address):
            allowed = peers_words("push", self._options.peers, self._address)
            text = f"kv_transfer_params: remote_host {quoted(place[0])} is none of {allowed}; no blocks are sent there"
            self.warn(f"host {place[0]}", text)
            return None
        return place


def place_of(params: Mapping[str, Any]) -> tuple[str, int] | None:
    """Where a request's parameters say that its prompt is decoded; None where they say neither host nor port.

    Raises `ParamsError` where one of both is missing or wrong.
    """
    if params.get("remote_host") is None and params.get("remote_port") is None:
        return None
    return text_of(params, "remote_host"), port_of(params, "remote_port")
