"""The pool of KV blocks: reference counts, free blocks in the order of their reuse, and what each block holds.

Every operation is O(1) a block. Knows ids and hashes only: no request, no group's kind, no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from frame.kv_events.events import NO_EVENTS, CacheEvents


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block and never handed out.

    Free blocks form a doubly linked ring through block 0. Blocks that hold nothing reusable stand at its head, freed
    blocks with a published hash at its tail: the least recently freed is taken first, and only then loses its hash.
    """

    def __init__(self, num_blocks: int, num_groups: int, events: CacheEvents = NO_EVENTS) -> None:
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._events = events
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), 0]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._references = [0] * num_blocks
        self._published: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._content: list[tuple[int, bytes] | None] = [None] * num_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    @property
    def num_published(self) -> int:
        """Blocks that can be found by a hash."""
        return sum(map(len, self._published))

    def references(self, block: int) -> int:
        """How many holders `block` has."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, one reference each; raises `RuntimeError` when there are fewer."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        blocks, block, following = [], self._next[0], self._next
        for _ in range(count):
            blocks.append(block)
            self._references[block] = 1
            block = following[block]
        following[0], self._previous[block] = block, 0
        self.num_free -= count
        for block in blocks:
            if self._content[block] is not None:
                self.withdraw(block)
        return blocks

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def share(self, block: int) -> None:
        """Adds a holder to a block that was found by its hash; takes it from the free ones if it was free."""
        self.share_all([block])

    def share_all(self, blocks: Iterable[int]) -> None:
        """As `share` of each block."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                self._unlink(block)
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each block (0 is skipped). Pass a request's last block first: tails go first."""
        for block in blocks:
            if block == 0:
                continue
            count = self._references[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._references[block] = count
            if count == 0:
                self._link(block, at_head=self._content[block] is None)

    def publish(self, group: int, block_hash: bytes, block: int) -> bool:
        """Lets `block` be found by its hash; False when another block already is, or this one has a hash."""
        return bool(self.publish_all(group, [block_hash], [block]))

    def publish_all(self, group: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[tuple[bytes, int]]:
        """As `publish` of each block (0 is skipped); returns those that can be found now, with their hashes."""
        published, content, made = self._published[group], self._content, []
        for pair in zip(hashes, blocks, strict=True):
            block_hash, block = pair
            if block and content[block] is None and block_hash not in published:
                published[block_hash] = block
                content[block] = (group, block_hash)
                made.append(pair)
        return made

    def find(self, group: int, block_hash: bytes) -> int:
        """The block of `group` that holds this content, 0 when there is none."""
        return self._published[group].get(block_hash, 0)

    def find_run(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of `group` that hold these contents, up to the first content that none holds."""
        found = list(map(self._published[group].get, hashes))
        run: list[int] = found[: found.index(None)] if None in found else found  # type: ignore[assignment]
        return run

    def withdraw(self, block: int, block_hash: bytes | None = None) -> None:
        """Makes `block` unfindable; with `block_hash` only while it is published under that."""
        content = self._content[block]
        if content is not None and (block_hash is None or content[1] == block_hash):
            del self._published[content[0]][content[1]]
            self._content[block] = None
            self._events.removed(*content)

    def withdraw_all(self) -> None:
        """Empties the prefix cache; holders keep their blocks."""
        for published in self._published:
            published.clear()
        self._content = [None] * self.num_blocks

    def _link(self, block: int, *, at_head: bool) -> None:
        before = 0 if at_head else self._previous[0]
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._next[block], self._previous[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
