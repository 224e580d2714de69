"""Which blocks a tier holds, by key, and in which of its slots. Knows no memory, no layer and no worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from frame.interfaces import TierPolicy


@dataclass
class TierBlock:
    """One block: `begun` of its parts were given to be written by `owner`, of which `pending` are not yet."""

    slot: int
    owner: str
    begun: int = 0
    pending: int = 0
    spoiled: bool = False


class TierIndex:
    """`num_blocks` slots of `parts` rows each; a part holds a grain of tokens.

    A block is found once all its parts are written. It may be evicted once its owner's prompt is written, so that the
    end of a prompt never pushes out its beginning.
    """

    def __init__(self, num_blocks: int, parts: int, policy: TierPolicy) -> None:
        self._num_blocks = num_blocks
        self._parts = parts
        self._policy = policy
        self._blocks: dict[bytes, TierBlock] = {}
        self._fresh: dict[str, list[bytes]] = {}  # by owner: keys of its prompt that the policy does not know yet
        self._writing = Counter[str]()  # by owner: parts that are not written yet
        self._readers = Counter[bytes]()
        self._free: list[int] = []
        self._num_slots = 0  # that were ever taken

    @property
    def num_used(self) -> int:
        """Slots that are taken."""
        return self._num_slots - len(self._free)

    @property
    def is_read(self) -> bool:
        """Whether blocks are in use, so that `clear` would refuse."""
        return bool(self._readers)

    def writes(self, owner: str) -> bool:
        """Whether parts of this request's prompt are not written yet."""
        return owner in self._writing

    def has(self, key: bytes) -> bool:
        """Whether the whole block is there."""
        block = self._blocks.get(key)
        return block is not None and block.begun == self._parts and not (block.pending or block.spoiled)

    def use(self, keys: list[bytes]) -> None:
        """These blocks, of one prompt, will be read: they stay until `release`."""
        self._policy.touch(keys)
        self._readers.update(keys)

    def release(self, keys: list[bytes]) -> None:
        """What `use` named was read."""
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def row(self, key: bytes, part: int) -> int:
        """Where a part of a block in use lies."""
        return self._blocks[key].slot * self._parts + part

    def begin(self, key: bytes, part: int, owner: str) -> int | None:
        """The row that a part is to be written to.

        None where it is there or being written, where no slot is free and none may be freed, and where the block's
        first parts are missing.
        """
        block = self._blocks.get(key)
        if block is None:
            slot = self._take(key) if part == 0 else None
            if slot is None:
                return None
            block = self._blocks[key] = TierBlock(slot, owner)
            self._fresh.setdefault(owner, []).append(key)
        elif block.owner != owner or block.begun != part or block.spoiled:
            return None
        block.begun += 1
        block.pending += 1
        self._writing[owner] += 1
        return block.slot * self._parts + part

    def end(self, key: bytes, owner: str, *, good: bool) -> None:
        """A part was written, or not: then the block is given up."""
        block = self._blocks[key]
        block.pending -= 1
        block.spoiled |= not good
        self._writing[owner] -= 1
        if not self._writing[owner]:
            del self._writing[owner]
        if block.spoiled and not block.pending:
            self._drop(key)

    def settle(self, running: Collection[str]) -> None:
        """Makes blocks evictable whose owners write no more and are not among `running`, and drops unfinished ones."""
        for owner in [one for one in self._fresh if one not in running and one not in self._writing]:
            keys = [key for key in dict.fromkeys(self._fresh.pop(owner)) if self._is_of(key, owner)]
            self._policy.insert([key for key in keys if self.has(key)])
            for key in keys:
                if not self.has(key):
                    self._drop(key)

    def clear(self) -> bool:
        """Drops all blocks, those being written once they are; False, and nothing is changed, while some are read."""
        if self._readers:
            return False
        for key, block in list(self._blocks.items()):
            block.spoiled = True
            if not block.pending:
                self._drop(key)
        return True

    def _is_of(self, key: bytes, owner: str) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.owner == owner

    def _take(self, key: bytes) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_slots < self._num_blocks:
            self._num_slots += 1
            return self._num_slots - 1
        victim = self._policy.evict(key, self._readers)
        return None if victim is None else self._blocks.pop(victim).slot

    def _drop(self, key: bytes) -> None:
        self._policy.remove(key)
        self._free.append(self._blocks.pop(key).slot)
