"""Which blocks a tier holds, by key, and in which of its slots. Knows no memory, no layer and no worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass

from frame.interfaces import TierPolicy


@dataclass
class TierBlock:
    """One block: `begun` of its parts were given to be written by `owner`, of which `pending` are not yet.

    A block without an owner comes from elsewhere, or was there before: then it is `unsure` until it was checked.
    `leaving`: it is being written to what lies behind the tier, and goes then, unless it is used before.
    """

    slot: int
    owner: str
    begun: int = 0
    pending: int = 0
    spoiled: bool = False
    unsure: bool = False
    leaving: bool = False


class Ledger:
    """Told what the slots of a tier hold. This one forgets it."""

    def begin(self, slot: int, key: bytes) -> None:
        """The slot is about to be written."""

    def publish(self, slot: int) -> None:
        """The slot is written."""

    def free(self, slot: int) -> None:
        """The slot holds nothing."""

    def touch(self, slots: Iterable[int]) -> None:
        """These slots are used now."""

    def generation(self, slot: int) -> int:
        """How many times the slot was begun, by all engines that had it."""
        del slot
        return 0

    def close(self) -> None:
        """Nothing is told any more."""


class TierIndex:
    """`num_blocks` slots of `parts` rows each; a part holds a grain of tokens.

    A block is found once all its parts are written. It may be evicted once its owner's prompt is written, so that the
    end of a prompt never pushes out its beginning. `dropped` counts those that went without `leave`. `make_policy` gets
    the keys that its policy holds, as they are at any time.
    """

    def __init__(
        self,
        num_blocks: int,
        parts: int,
        make_policy: Callable[[Set[bytes]], TierPolicy],
        ledger: Ledger | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._parts = parts
        self._ledger = ledger or Ledger()
        self.dropped = 0
        self._blocks: dict[bytes, TierBlock] = {}
        self._settled: set[bytes] = set()  # keys that the policy knows
        self._policy = make_policy(self._settled)
        self._leaving: set[bytes] = set()  # keys that are read for what lies behind, whether they still leave or not
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

    def adopt(self, found: Iterable[tuple[int, bytes]]) -> None:
        """Takes over blocks that slots hold already, those used longest ago first; none may be there yet."""
        blocks = {key: TierBlock(slot, "", self._parts, unsure=True) for slot, key in found}
        taken = {block.slot for block in blocks.values()}
        self._blocks = blocks
        self._num_slots = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._num_slots) if slot not in taken]
        for key in blocks:
            self._settle([key])

    def writes(self, owner: str) -> bool:
        """Whether parts of this request's prompt are not written yet."""
        return owner in self._writing

    def knows(self, key: bytes) -> bool:
        """Whether the block is there, or a part of it, or being written."""
        return key in self._blocks

    def has(self, key: bytes) -> bool:
        """Whether the whole block is there."""
        block = self._blocks.get(key)
        return block is not None and block.begun == self._parts and not (block.pending or block.spoiled)

    def coming(self, key: bytes) -> bool:
        """Whether the block is being brought, or checked."""
        block = self._blocks.get(key)
        return block is not None and block.pending > 0 and not block.owner

    def unsure(self, key: bytes) -> bool:
        """Whether the block must be brought, which checks it, before it is read."""
        return self._blocks[key].unsure

    def room(self, keys: Collection[bytes]) -> int:
        """How many blocks could be brought without pushing out any of `keys` or what is being read."""
        kept = sum(key in self._settled for key in {*keys, *self._readers})
        return self._num_blocks - self.num_used + len(self._settled) - kept

    def use(self, keys: list[bytes]) -> None:
        """These blocks, of one prompt, will be read: they stay until `release`."""
        self._policy.touch(keys)
        self._readers.update(keys)
        for key in keys:
            self._blocks[key].leaving = False
        self._ledger.touch(self._blocks[key].slot for key in reversed(keys))

    def release(self, keys: list[bytes]) -> None:
        """What `use` named was read."""
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                if self._blocks[key].spoiled:
                    self._drop(key)

    def row(self, key: bytes | None, part: int) -> int:
        """Where a part of a block in use lies; -1 where the block got no room."""
        block = self._blocks.get(key) if key is not None else None
        return -1 if block is None else block.slot * self._parts + part

    def generation(self, row: int) -> int:
        """See `Ledger.generation`."""
        return self._ledger.generation(row // self._parts)

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
        if self.has(key):
            self._ledger.publish(block.slot)
        elif block.spoiled:
            self._drop(key)

    def bring(self, key: bytes) -> int | None:
        """The first row that a block from elsewhere is to be written to, or of one that is there, to be checked.

        None where no slot is free and none may be freed. It is found after `brought`.
        """
        block = self._blocks.get(key)
        if block is None:
            slot = self._take(key)
            if slot is None:
                return None
            block = self._blocks[key] = TierBlock(slot, "", self._parts)
        block.pending += 1
        return block.slot * self._parts

    def brought(self, key: bytes, *, good: bool) -> None:
        """A block that `bring` named is there and sound, or not: then it goes once it is read no more."""
        block = self._blocks[key]
        block.pending -= 1
        block.spoiled |= not good
        if block.spoiled:
            self._drop(key)
        elif not block.unsure:
            self._settle([key])
            self._ledger.publish(block.slot)
        block.unsure = False

    def leave(self, num_free: int) -> list[bytes]:
        """Keys of blocks that are to be written elsewhere, so that so many slots get free; they stay until `left`."""
        keys = []
        while self._num_blocks - self.num_used + len(self._leaving) < num_free:
            key = self._policy.evict(b"", self._readers)
            if key is None:
                break
            self._settled.discard(key)
            self._leaving.add(key)
            self._blocks[key].leaving = True
            keys.append(key)
        return keys

    def left(self, key: bytes) -> None:
        """A block that `leave` named is elsewhere, or never will be; it stays where it was used meanwhile."""
        self._leaving.remove(key)
        block = self._blocks[key]
        if block.leaving or block.spoiled:
            self._drop(key)
        else:
            self._settle([key])

    def settle(self, running: Collection[str]) -> None:
        """Makes blocks evictable whose owners write no more and are not among `running`, and drops unfinished ones."""
        for owner in [one for one in self._fresh if one not in running and one not in self._writing]:
            keys = [key for key in dict.fromkeys(self._fresh.pop(owner)) if self._is_of(key, owner)]
            self._settle([key for key in keys if self.has(key)])
            for key in keys:
                if not self.has(key):
                    self._drop(key)

    def clear(self) -> bool:
        """Drops all blocks, those being written once they are; False, and nothing is changed, while some are read."""
        if self._readers:
            return False
        for key, block in list(self._blocks.items()):
            block.spoiled = True
            self._ledger.free(block.slot)
            self._drop(key)
        return True

    def close(self) -> None:
        """Ends the ledger."""
        self._ledger.close()

    def _is_of(self, key: bytes, owner: str) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.owner == owner

    def _settle(self, keys: list[bytes]) -> None:
        self._policy.insert(keys)
        self._settled.update(keys)
        self._ledger.touch(self._blocks[key].slot for key in reversed(keys))

    def _take(self, key: bytes) -> int | None:
        slot = self._free_slot()
        if slot is None:
            victim = self._policy.evict(key, self._readers)
            if victim is None:
                return None
            self.dropped += 1
            self._settled.discard(victim)
            slot = self._blocks.pop(victim).slot
        self._ledger.begin(slot, key)
        return slot

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_slots < self._num_blocks:
            self._num_slots += 1
            return self._num_slots - 1
        return None

    def _drop(self, key: bytes) -> None:
        """Drops a block, once nothing of it is written or read any more."""
        block = self._blocks[key]
        if block.pending or key in self._readers or key in self._leaving:
            return
        self._policy.remove(key)
        self._settled.discard(key)
        self._ledger.free(block.slot)
        self._free.append(block.slot)
        del self._blocks[key]
