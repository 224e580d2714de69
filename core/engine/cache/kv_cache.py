"""Which blocks a request holds in each KV group: hits, growth, windows, publication. Knows no step and no queue."""

from __future__ import annotations

from dataclasses import dataclass

from ...interfaces.kv import CrossKV, KVLayout, KVSpec, StateKV
from ..request import Request
from .blocks import BlockPool
from .hashing import BlockHasher

#: (block, its hash): what a step made findable and must take back when it fails.
Publication = tuple[int, bytes]


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a request: `blocks[g]` per group, 0 where the window needs none."""

    num_tokens: int
    blocks: list[list[int]]


class KVCache:
    """Gives blocks of one pool to requests. Groups of a request have tables of equal length (state groups: one)."""

    def __init__(self, layout: KVLayout, hasher: BlockHasher, *, enable_prefix_caching: bool) -> None:
        for group in layout.groups:
            if isinstance(group.spec, CrossKV):
                raise ValueError("the scheduler has no cross-attention KV groups; layers " + ", ".join(group.layers))
            if group.block_size != layout.block_size:
                raise ValueError(f"KV groups differ in block size: {group.block_size} and {layout.block_size}")
        self.layout = layout
        self.block_size = layout.block_size
        self.hasher = hasher
        self.pool = BlockPool(layout.num_blocks, len(layout.groups))
        specs = [group.spec for group in layout.groups]
        self._specs = specs
        self._states = [g for g, spec in enumerate(specs) if isinstance(spec, StateKV)]
        self._growing = [g for g, spec in enumerate(specs) if not isinstance(spec, StateKV)]
        self._windowed = [g for g in self._growing if type(specs[g]).first_needed is not KVSpec.first_needed]
        self._whole = [g for g in self._growing if g not in self._windowed]
        # one state block is overwritten in place, so it cannot stand for a prefix
        self.caches_prefixes = enable_prefix_caching and bool(self._growing) and not self._states

    @property
    def holds_states(self) -> bool:
        """Whether some layers keep a running state, so that no prefix can be taken over from elsewhere."""
        return bool(self._states)

    @property
    def whole_groups(self) -> list[int]:
        """KV groups whose tokens are kept until the request ends."""
        return self._whole

    def capacity(self, request: Request) -> int:
        """Tokens that the blocks it has cover."""
        return len(request.cache.blocks[self._growing[0]]) * self.block_size if self._growing else request.max_len

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest prefix that every group has, short of the last token: one token is always computed."""
        nothing = PrefixHit(0, [[] for _ in self._specs])
        if not self.caches_prefixes or not request.reads_cache:
            return nothing
        length = (request.num_tokens - 1) // self.block_size
        hashes = self.block_hashes(request, length)
        for group in self._whole:
            find = self.pool.find
            length = next((i for i in range(length) if not find(group, hashes[i])), length)
        length = self._shorten_to_windows(hashes, length)
        if length == 0:
            return nothing
        return PrefixHit(length * self.block_size, [self._hit_blocks(g, hashes, length) for g in self._growing])

    def _shorten_to_windows(self, hashes: list[bytes], length: int) -> int:
        """The most blocks, at most `length`, whose window before the end is cached in every windowed group."""
        before = -1
        while length != before:
            before = length
            for group in self._windowed:
                length = self._shorten_to_window(group, hashes, length)
        return length

    def _shorten_to_window(self, group: int, hashes: list[bytes], length: int) -> int:
        find, spec, size = self.pool.find, self._specs[group], self.block_size
        index = length - 1
        while length and index >= spec.first_needed(length * size) // size:
            if not find(group, hashes[index]):
                length = index  # any longer hit needs this block
            index -= 1
        return length

    def _hit_blocks(self, group: int, hashes: list[bytes], length: int) -> list[int]:
        first = self._specs[group].first_needed(length * self.block_size) // self.block_size
        return [0] * first + [self.pool.find(group, hashes[i]) for i in range(first, length)]

    def block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of at least the first `num_blocks` full blocks of known tokens; computed once."""
        cache = request.cache
        if len(cache.hashes) < num_blocks:
            self.hasher.extend(cache.hashes, cache.root, request.token_ids, num_blocks)
        return cache.hashes

    def admit(self, request: Request, hit: PrefixHit, num_computed: int, total: int, *, reserve: int = 0) -> bool:
        """Gives a request without blocks its hit and new blocks up to `total` tokens; False (no change) without room.

        `num_computed` counts the hit and what a connector will load. `reserve` blocks must stay free.
        """
        pool = self.pool
        held = [block for blocks in hit.blocks for block in blocks if block]
        revived = sum(1 for block in held if pool.references(block) == 0)
        needed = sum(self._missing(g, len(hit.blocks[g]), num_computed, total) for g in self._growing)
        if needed + revived + len(self._states) + reserve > pool.num_free:
            return False
        for block in held:
            pool.share(block)
        request.cache.blocks = [list(blocks) for blocks in hit.blocks]
        for group in self._states:
            request.cache.blocks[group] = pool.allocate(1)
        request.cache.first_live = [0] * len(self._specs)
        request.cache.num_published = hit.num_tokens // self.block_size
        self._grow(request, num_computed, total)
        return True

    def extend(self, request: Request, num_computed: int, total: int, *, reserve: int = 0) -> bool:
        """Adds blocks up to `total` tokens after giving back those that no later token needs; False without room."""
        if self._windowed:
            self._trim(request, num_computed)
            needed = sum(self._missing(g, len(request.cache.blocks[g]), num_computed, total) for g in self._growing)
        else:
            needed = len(self._whole) * -(-total // self.block_size) - sum(
                len(request.cache.blocks[g]) for g in self._whole
            )
        if needed + reserve > self.pool.num_free:
            return False
        self._grow(request, num_computed, total)
        return True

    def add_block(self, request: Request) -> bool:
        """As `extend` by one block in each group; False (no change) without room, or where that is not all of it."""
        if len(self._whole) < len(self._specs) or len(self._whole) > self.pool.num_free:
            return False
        for group in self._whole:
            request.cache.blocks[group] += self.pool.allocate(1)
        return True

    def _missing(self, group: int, have: int, num_computed: int, total: int) -> int:
        first = self._specs[group].first_needed(num_computed) // self.block_size
        return max(0, -(-total // self.block_size) - max(have, first))

    def _grow(self, request: Request, num_computed: int, total: int) -> None:
        for group in self._growing:
            table = request.cache.blocks[group]
            more = count = -(-total // self.block_size) - len(table)
            if group in self._windowed:
                count = self._missing(group, len(table), num_computed, total)
                table.extend([0] * (more - count))
            if count > 0:
                table.extend(self.pool.allocate(count))

    def _trim(self, request: Request, num_computed: int) -> None:
        if request.transfer.unconfirmed:
            return  # should the load have failed, its blocks must still be in the table to tell whose they are
        for group in self._windowed:
            first = self._specs[group].first_needed(num_computed) // self.block_size
            start, table = request.cache.first_live[group], request.cache.blocks[group]
            if start < first:
                end = min(first, len(table))
                self.pool.release(reversed(table[start:end]))
                table[start:end] = [0] * (end - start)
                request.cache.first_live[group] = end

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; published ones stay findable until they are reused."""
        for group, table in enumerate(request.cache.blocks):
            self.pool.release(reversed(table))
            request.cache.blocks[group] = []
        request.cache.first_live = [0] * len(self._specs)
        request.cache.num_published = 0
        request.transfer.forget()

    def publish_planned(self, request: Request, num_computed: int, count: int) -> list[Publication]:
        """As `publish`, with `count` tokens that a step will store: others in that step may read them.

        But not of one token, which attention stores while it attends.
        """
        return self.publish(request, min(num_computed + count - (count == 1), request.num_tokens))

    def publish(self, request: Request, num_tokens: int) -> list[Publication]:
        """Lets the full blocks of its first `num_tokens` tokens (all known, computed or scheduled) be found.

        Not before a connector's load into the request is known to have succeeded.
        """
        count = num_tokens // self.block_size
        if not self.caches_prefixes or count <= request.cache.num_published or request.transfer.unconfirmed:
            return []
        hashes = self.block_hashes(request, count)
        made = []
        for index in range(request.cache.num_published, count):
            for group in self._growing:
                block = request.cache.blocks[group][index]
                if block and self.pool.publish(group, hashes[index], block):
                    made.append((block, hashes[index]))
        request.cache.num_published = count
        return made

    def withdraw(self, publications: list[Publication]) -> None:
        """Takes back what a step published."""
        for block, block_hash in publications:
            self.pool.withdraw(block, block_hash)

    def withdraw_request(self, request: Request, first: int = 0) -> None:
        """Makes the blocks of a request from index `first` on unfindable: their content is not to be trusted."""
        for table in request.cache.blocks:
            for block in table[first:]:
                self.pool.withdraw(block)
