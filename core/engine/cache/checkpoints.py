"""States of requests and copies of them that stand for prefixes: which block holds which, and what is to be copied.

A request's own state is overwritten in place, so a prefix is found again only where a copy of the state was kept: at
multiples of the group's block size, where a chunk of a prompt ended. Knows ids and hashes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frame.kv_events.events import NO_EVENTS, CacheEvents

from ...interfaces.kv import KVLayout
from ...interfaces.step import BlockCopy
from ..request import Request
from .blocks import BlockPool

#: (pool, block, its hash): what a step made findable and must take back when it fails.
Publication = tuple[BlockPool, int, bytes]
#: (KV group, block).
StateBlock = tuple[int, int]


class Checkpoints:
    """The blocks of the state groups. A copy is made by the plan behind the one whose step leaves the state.

    `interval` is the number of tokens of which a copy's prefix is a multiple; 0 where no prefix is kept.
    """

    def __init__(self, layout: KVLayout, *, enabled: bool, events: CacheEvents = NO_EVENTS) -> None:
        groups = [(index, group) for index, group in enumerate(layout.groups) if group.keeps_states]
        self._events, num_groups = events, len(layout.groups)
        self.pools = {index: BlockPool(layout.pools[group.pool], num_groups, events) for index, group in groups}
        self.interval = max((group.block_size for _, group in groups), default=0) if enabled else 0
        self._unit = layout.block_size
        self._due: list[tuple[Request, list[StateBlock], bytes, int]] = []
        self._copies: list[BlockCopy] = []
        self._made: list[Publication] = []

    def find(self, hashes: Sequence[bytes], most: int) -> tuple[int, list[StateBlock]]:
        """The longest prefix of up to `most` tokens of which every group has a state, and these."""
        for length in range(most // self.interval * self.interval, 0, -self.interval):
            block_hash = hashes[length // self._unit - 1]
            found = [(group, pool.find(group, block_hash)) for group, pool in self.pools.items()]
            if all(block for _, block in found):
                return length, found
        return 0, []

    def has_room(self, hit: Sequence[StateBlock]) -> bool:
        """Whether a request may get a state in each group, if those of its hit are to be read first."""
        free = dict.fromkeys(self.pools, 0)
        for group, block in hit:
            free[group] = int(self.pools[group].references(block) == 0)
        return all(pool.num_free > free[group] for group, pool in self.pools.items())

    def admit(self, hit: Sequence[StateBlock]) -> dict[int, int]:
        """Takes a block for a request's state in each group, which the next plan makes a copy of its hit."""
        for group, block in hit:
            self.pools[group].share(block)
        taken = {group: pool.allocate(1)[0] for group, pool in self.pools.items()}
        for group, block in hit:
            self._copies.append(_copy(group, block, taken[group]))
            self.pools[group].release([block])
        return taken

    def end_of_chunk(self, start: int, end: int, known: int, seen: int) -> int:
        """Where a chunk of tokens start .. end of `known` ones is to end, so that its state can be kept.

        That is the last multiple of the interval before the last token, or the prefix that was `seen`: other requests
        share it, but no state of it was kept.
        """
        if not self.interval:
            return end
        last = (known - 1) // self.interval * self.interval
        for border in (seen, last):
            if start < border < end:
                return border
        whole = end // self.interval * self.interval
        return whole if start < whole and end < known else end

    def note(self, request: Request, block_hash: bytes, num_tokens: int) -> None:
        """A step was launched behind which the request's state stands for the prefix with this hash and length."""
        blocks = [(group, request.cache.blocks[group][0]) for group in self.pools]
        if not all(self.pools[group].find(group, block_hash) for group in self.pools):
            self._due.append((request, blocks, block_hash, num_tokens))

    def save(self) -> None:
        """Called before a plan takes blocks: it is to keep the states that the step before leaves."""
        for request, blocks, block_hash, num_tokens in self._due:
            for group, block in blocks:
                pool = self.pools[group]
                if not pool.num_free:
                    continue
                (copy,) = pool.allocate(1)
                if pool.publish(group, block_hash, copy):
                    self._copies.append(_copy(group, block, copy))
                    self._made.append((pool, copy, block_hash))
                    self._events.stored(request, group, block_hash, num_tokens)
                pool.release([copy])
        self._due.clear()

    def end(self, request: Request) -> None:
        """Called before a request gives its blocks back: its state itself is kept where a copy of it is due."""
        for owner, blocks, block_hash, num_tokens in self._due:
            for group, block in blocks if owner is request else ():
                if self.pools[group].publish(group, block_hash, block):
                    self._made.append((self.pools[group], block, block_hash))
                    self._events.stored(request, group, block_hash, num_tokens)
        self._due = [one for one in self._due if one[0] is not request]

    def leave(self, request: Request) -> None:
        """Called when no step writes to an ended request's state any more: the last of its blocks stays, a copy."""
        self.end(request)
        for group, pool in self.pools.items():
            table = request.cache.blocks[group]
            pool.release(table[:-1])
            del table[:-1]

    def take(self) -> tuple[list[BlockCopy], list[Publication]]:
        """The copies of the plan that is launched, in order, and what they make findable."""
        taken = self._copies, self._made
        self._copies, self._made = [], []
        return taken

    def drop(self) -> None:
        """Called when a step failed: what it left, and no plan has copied yet, is not kept."""
        self._due.clear()
        for pool, block, block_hash in self._made:
            pool.withdraw(block, block_hash)
        self._copies, self._made = [], []

    def withdraw_request(self, request: Request, num_tokens: int) -> None:
        """Makes the states of all but the request's first `num_tokens` unfindable."""
        self._due = [one for one in self._due if one[0] is not request]
        for block_hash in request.cache.hashes[num_tokens // self._unit :]:
            for group, pool in self.pools.items():
                if block := pool.find(group, block_hash):
                    pool.withdraw(block)

    def withdraw_all(self) -> None:
        """Empties the prefix cache."""
        self._due.clear()
        for pool in self.pools.values():
            pool.withdraw_all()


def _copy(group: int, source: int, target: int) -> BlockCopy:
    return BlockCopy(group=group, sources=np.array([source], np.int32), targets=np.array([target], np.int32))
