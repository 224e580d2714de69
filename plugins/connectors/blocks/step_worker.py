"""What worker sides of connectors that store prompt blocks know of a step: whose blocks are right, and where bytes lie.

Blocks of a step or a load that failed are never saved, because a wrong block would outlive the engine. Knows of a
request only its id, of a layer only its bytes, and copies nothing.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import CacheView, ConnectorWorker, ConnectorWorkerSetup, decode, encode

from .messages import BlockStep, Move

#: dtype → the dtype in which its values are checked for being finite; torch has no such check for 8-bit floats
CHECKED = {
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e5m2: torch.float16,
}


@dataclass(frozen=True)
class Part:
    """Where bytes of a layer lie in a stored block, which holds `count` blocks of the layer's KV group.

    `cache` is uint8 [num_blocks, (end - start) / count]; of a state it is one of the tensors in the layer's block, from
    its byte `place` on.
    """

    group: int
    cache: Tensor
    dtype: torch.dtype
    count: int
    start: int
    end: int
    layer: str = ""
    place: int = 0


@dataclass(frozen=True)
class Stored:
    """What a stored block holds, part by part: a grain of tokens, or a state, in the layers of this rank."""

    parts: tuple[Part, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of_states(cls, caches: Mapping[str, CacheView]) -> Stored:
        """The tensors of all layers one behind the other, the widest elements first: all can be read where they lie."""
        found = list[tuple[str, int, torch.dtype, int]]()
        for layer, view in caches.items():
            kinds = view.parts or ((view.format.dtype, view.bytes.shape[1]),)
            ends = accumulate(size for _, size in kinds)
            found += [(layer, end - size, dtype, size) for (dtype, size), end in zip(kinds, ends, strict=True)]
        parts, start = list[Part](), 0
        for layer, place, dtype, size in sorted(found, key=lambda one: -one[2].itemsize):
            rows = caches[layer].bytes[:, place : place + size]
            parts.append(Part(caches[layer].group, rows, dtype, 1, start, start + size, layer, place))
            start += size
        return cls(tuple(parts), start)

    @property
    def runs(self) -> list[tuple[torch.dtype, int, int]]:
        """(element type, start, end) of bytes of one type."""
        found = list[tuple[torch.dtype, int, int]]()
        for part in self.parts:
            if found and found[-1][0] == part.dtype:
                found[-1] = part.dtype, found[-1][1], part.end
            else:
                found.append((part.dtype, part.start, part.end))
        return found


class StepWorker(ConnectorWorker):
    """See the module. A stored block holds a grain of tokens in every layer of this rank, or a state; group by group.

    `title` is the prefix of its counters' names; `message` is the type of the scheduler side's message.
    """

    moves_states = True
    title: ClassVar[str]
    message: ClassVar[type[BlockStep]] = BlockStep

    def __init__(self, setup: ConnectorWorkerSetup, options: Any) -> None:
        super().__init__(setup, options)
        self.tokens = Stored()
        self.states = Stored()
        self.formats = ""  # names how blocks lie in memory, once `register` was called
        self.failed: list[tuple[int, int]] = []
        self._step = BlockStep(blocks_name="")
        self.next_number = -1  # of the next message; -1: none came yet, and so no owner is sound
        self._in_step = False
        self._breaks = 0
        self._sound: set[str] = set()  # requests whose blocks hold what their hashes say
        self._counters: dict[str, float] = {}

    @abstractmethod
    def load(self, step: BlockStep) -> None:
        """Starts the loads of a step; they may end in a later step."""

    @abstractmethod
    def save_states(self, moves: Sequence[Move]) -> None:
        """Saves copies of states, whose blocks may be given other content by this step's loads and forward pass.

        Called before `load`; only those are right whose owners are.
        """

    def lost(self, skipped: range, broken: int) -> None:
        """Called when steps had failed: messages `skipped` never came, the one `broken` (-1: none) saved nothing."""

    @property
    def space(self) -> str:
        """The name of this rank's blocks, of which the newest message gave the first part."""
        return f"{self._step.blocks_name}/{self.rank}-{self.formats}"

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches and self.formats:
            self.tokens, self.states = Stored((), self.tokens.num_bytes), Stored((), self.states.num_bytes)
            return
        tokens, states, formats = list[Part](), dict[str, CacheView](), list[Any]()
        for group in self.layout.groups:
            for layer, view in ((layer, caches[layer]) for layer in group.layers if layer in caches):
                formats.append([list(view.format.shape), list(view.format.order), str(view.format.dtype)])
                if group.keeps_states:
                    states[layer] = view
                    formats[-1].append([[str(dtype), size] for dtype, size in view.parts])
                    continue
                count, start = self.layout.grain // group.block_size, tokens[-1].end if tokens else 0
                end = start + count * view.bytes.shape[1]
                tokens.append(Part(view.group, view.bytes, view.format.dtype, count, start, end, layer))
        self.tokens = Stored(tuple(tokens), tokens[-1].end if tokens else 0)
        self.states = Stored.of_states(states)
        self.formats = hashlib.sha256(encode(formats)).hexdigest()[:16]

    def stored(self, moves: Sequence[Move]) -> Stored:
        """What the blocks of `moves` hold, which are all of tokens or all of states."""
        return self.states if moves[0].state else self.tokens

    def handshake(self) -> bytes:
        return self.formats.encode()

    def begin_step(self, message: bytes) -> None:
        step = decode(message, self.message) if message else BlockStep(blocks_name="")
        skipped = range(self.next_number, step.number) if self.next_number >= 0 else range(0)
        if self._in_step or skipped:
            # An earlier step raised, maybe before it came here. Steps planned before the scheduler knew of that build
            # on blocks that it never filled.
            self._breaks += 1
            self._sound.clear()
            self.lost(skipped, self._step.number if self._in_step else -1)
        if not self._in_step:
            self.failed, self._counters = [], {}
        self._in_step = True
        self.next_number = max(self.next_number, step.number + 1) if message else self.next_number
        self._step = step
        if step.known_breaks.get(self.rank, 0) == self._breaks:
            self._sound.update(step.entered)
        if step.states:
            self.save_states(step.states)
        self.load(step)

    def fail(self, moves: Sequence[Move]) -> None:
        """Reports that the blocks of these loads did not arrive."""
        self.failed += [
            (group, block) for move in moves for group, some in enumerate(move.blocks) for block in some if block
        ]
        self.count("failed_blocks", len(moves))

    def count(self, name: str, value: float) -> None:
        """Adds `value` to the counter `title`_`name` of this step."""
        if value:
            name = f"{self.title}_{name}"
            self._counters[name] = self._counters.get(name, 0) + value
