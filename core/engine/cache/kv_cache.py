"""Which blocks a request holds in each KV group: hits, growth, windows, publication. Knows no step and no queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from frame.kv_events.events import NO_EVENTS, CacheEvents

from ...interfaces.kv import KVLayout, KVSpec
from ..request import Request
from .blocks import BlockPool
from .checkpoints import Checkpoints, Publication, StateBlock
from .hashing import BlockHasher

#: Hashes that are made in a pause, which must not last.
_HASHES_AT_ONCE = 256


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a request: `blocks[g]` per group, 0 where the window needs none.

    `states` are the blocks of its states. Blocks of tokens alone were found for the first `num_seen`.
    """

    num_tokens: int
    blocks: list[list[int]]
    states: list[StateBlock] = field(default_factory=list)
    num_seen: int = 0

    @property
    def held(self) -> list[int]:
        """All of its blocks."""
        return [block for blocks in self.blocks for block in blocks if block]


@dataclass(frozen=True)
class _Group:
    """A group that keeps tokens: number `index` of the layout. It uses every `stride`-th hash."""

    index: int
    spec: KVSpec
    block_size: int
    stride: int

    def num_missing(self, have: int, num_computed: int, total: int) -> int:
        """Blocks that a request with `have` needs besides, for its tokens up to `total`, of which some are computed."""
        first = self.spec.first_needed(num_computed) // self.block_size
        return max(0, -(-total // self.block_size) - max(have, first))


class KVCache:
    """Gives blocks of tokens and of states to requests. Tables of a request's groups cover the same tokens.

    A group of states has a pool of its own, with a block for every request that may run at once and for copies, and a
    table of one. `connected`: another engine may load the whole grains of a prompt from the blocks that its request has
    when it is computed, so the window before the last of them is kept until then.
    """

    def __init__(
        self,
        layout: KVLayout,
        hasher: BlockHasher,
        *,
        enable_prefix_caching: bool,
        connected: bool = False,
        events: CacheEvents = NO_EVENTS,
    ) -> None:
        self.layout = layout
        self._events = events
        self._connected = connected
        self.block_size = unit = layout.block_size
        self.hasher = hasher
        self.pool = BlockPool(layout.pools[0], len(layout.groups), events)
        self.checkpoints = Checkpoints(layout, enabled=enable_prefix_caching, events=events)
        self._states = self.checkpoints.pools
        self._growing = [
            _Group(index, group.specs[0], group.block_size, group.block_size // unit)
            for index, group in enumerate(layout.groups)
            if not group.keeps_states and not group.keeps_encoded
        ]
        self._encoded = {index: group for index, group in enumerate(layout.groups) if group.keeps_encoded}
        self._windowed = [one for one in self._growing if type(one.spec).first_needed is not KVSpec.first_needed]
        self._whole = [one for one in self._growing if one not in self._windowed]
        # groups that all gain a block at the same time, as long as every other
        self._even = (
            not self._states
            and not self._encoded
            and not self._windowed
            and all(one.stride == 1 for one in self._whole)
        )
        keeps = bool(self._growing) and not self._states
        self.caches_prefixes = enable_prefix_caching and (keeps or self.checkpoints.interval > 0)

    @property
    def whole_groups(self) -> dict[int, int]:
        """The KV groups whose tokens are kept until the request ends, and their block sizes."""
        return {one.index: one.block_size for one in self._whole}

    def capacity(self, request: Request) -> int:
        """Tokens that the blocks it has cover."""
        blocks = request.cache.blocks
        return min((len(blocks[one.index]) * one.block_size for one in self._growing), default=request.max_len)

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest prefix of whole grains that every group has, short of the last token: one is always computed."""
        nothing = PrefixHit(0, [[] for _ in self.layout.groups])
        if not self.caches_prefixes or not request.reads_cache:
            return nothing
        grain = self.layout.grain
        most = (request.num_tokens - 1) // grain * grain
        # where a group keeps all blocks, hashes behind the first that it lacks are not needed, and made some time later
        hashes = self.block_hashes(request, 0 if self._whole else most // self.block_size)
        for group in self._whole:
            index, size, step = group.index, group.block_size, group.stride
            count, found, missing = most // size, 0, False
            while found < count and not missing:
                if (place := found * step + step - 1) >= len(hashes):
                    self.block_hashes(request, min(count * step, 2 * place + 1))
                wanted = hashes[place : count * step : step]
                run = len(self.pool.find_run(index, wanted))
                found, missing = found + run, run < len(wanted)
            most = found * size // grain * grain
        before, seen, states = -1, most, list[StateBlock]()
        while most != before:  # what one window shortens may reach into another
            before = most
            for group in self._windowed:
                most = self._shorten_to_window(group, hashes, most)
            if self._states:
                most, states = self.checkpoints.find(hashes, most)
        blocks: list[list[int]] = [[] for _ in self.layout.groups]
        for group in self._growing if most else ():
            blocks[group.index] = self._hit_blocks(group, hashes, most)
        return PrefixHit(most, blocks, states, seen)

    def _shorten_to_window(self, group: _Group, hashes: list[bytes], most: int) -> int:
        """The most tokens, at most `most`, whose window before the end is cached in the group."""
        find, size, grain = self.pool.find, group.block_size, self.layout.grain
        index = most // size - 1
        while most and index >= group.spec.first_needed(most) // size:
            if not find(group.index, hashes[(index + 1) * group.stride - 1]):
                most = index * size // grain * grain  # any longer hit needs this block
            index -= 1
        return most

    def _hit_blocks(self, group: _Group, hashes: list[bytes], num_tokens: int) -> list[int]:
        first, step = group.spec.first_needed(num_tokens) // group.block_size, group.stride
        ends = hashes[(first + 1) * step - 1 : num_tokens // self.block_size : step]
        return [0] * first + self.pool.find_run(group.index, ends)

    def block_hashes(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` hashes of known tokens; computed once."""
        cache = request.cache
        if len(cache.hashes) < count:
            self.hasher.extend(cache.hashes, cache.root, request.token_ids, count, request.source.embeds)
        return cache.hashes

    def hash_some(self, request: Request, num_tokens: int) -> bool:
        """Makes some of the hashes of its first `num_tokens` tokens that `publish` will need; whether any was left."""
        have, count = len(request.cache.hashes), num_tokens // self.block_size
        if not self.caches_prefixes or have >= count:
            return False
        self.block_hashes(request, min(count, have + _HASHES_AT_ONCE))
        return True

    def admit(self, request: Request, hit: PrefixHit, num_computed: int, total: int, *, reserve: int = 0) -> bool:
        """Gives a request without blocks its hit and new blocks up to `total` tokens; False (no change) without room.

        `num_computed` counts the hit and what a connector will load. `reserve` blocks must stay free.
        """
        needed = self.num_taken(request, hit, num_computed, total)
        states = hit.states if num_computed == hit.num_tokens else []  # else the connector loads the state itself
        if needed + reserve > self.pool.num_free or not self.checkpoints.has_room(states):
            return False
        self.pool.share_all(hit.held)
        request.cache.blocks = [list(blocks) for blocks in hit.blocks]
        for group, block in self.checkpoints.admit(states).items():
            request.cache.blocks[group] = [block]
        request.cache.num_seen = hit.num_seen
        request.cache.first_live = [0] * len(self.layout.groups)
        request.cache.num_published = hit.num_tokens // self.block_size
        self._grow(request, num_computed, total)
        for index, encoded in self._encoded.items():
            request.cache.blocks[index] = self.pool.allocate(encoded.blocks_for(request.num_encoded))
        return True

    def num_taken(self, request: Request, hit: PrefixHit, num_computed: int, total: int) -> int:
        """Free blocks that a request without blocks takes for `total` tokens, of which some are computed by then.

        Those of its encoder tokens, which are never shared, are among them.
        """
        revived = self.pool.num_free_of(hit.held)
        missing = (one.num_missing(len(hit.blocks[one.index]), num_computed, total) for one in self._growing)
        return revived + sum(missing) + sum(one.blocks_for(request.num_encoded) for one in self._encoded.values())

    def extend(self, request: Request, num_computed: int, total: int, *, reserve: int = 0) -> bool:
        """Adds blocks up to `total` tokens after giving back those that no later token needs; False without room."""
        kept = num_computed
        if self._connected and num_computed < request.prompt_len:
            kept = min(num_computed, (request.prompt_len - 1) // self.layout.grain * self.layout.grain)
        self._trim(request, kept)
        blocks = request.cache.blocks
        needed = sum(one.num_missing(len(blocks[one.index]), num_computed, total) for one in self._growing)
        if kept < num_computed and needed + reserve > self.pool.num_free:
            self._trim(request, num_computed)
        if needed + reserve > self.pool.num_free:
            return False
        self._grow(request, num_computed, total)
        return True

    def add_block(self, request: Request) -> bool:
        """As `extend` by one block in each group; False, without a change, where it has no room or more to do."""
        if not self._even or len(self._whole) > self.pool.num_free:
            return False
        for table in request.cache.blocks:
            table += self.pool.allocate(1)
        return True

    def _grow(self, request: Request, num_computed: int, total: int) -> None:
        for group in self._growing:
            table = request.cache.blocks[group.index]
            more = -(-total // group.block_size) - len(table)
            count = group.num_missing(len(table), num_computed, total)
            if more > count:
                table.extend([0] * (more - count))
            if count:
                table.extend(self.pool.allocate(count))

    def _trim(self, request: Request, num_computed: int) -> None:
        if request.transfer.unconfirmed:
            return  # should the load have failed, its blocks must still be in the table to tell whose they are
        for group in self._windowed:
            first = group.spec.first_needed(num_computed) // group.block_size
            start, table = request.cache.first_live[group.index], request.cache.blocks[group.index]
            if start < first:
                end = min(first, len(table))
                self.pool.release(reversed(table[start:end]))
                table[start:end] = [0] * (end - start)
                request.cache.first_live[group.index] = end

    def has_windows(self, request: Request, num_computed: int) -> bool:
        """Whether no block was given back that tokens from number `num_computed` on need."""
        first_live = request.cache.first_live
        return all(
            one.spec.first_needed(num_computed) >= first_live[one.index] * one.block_size for one in self._windowed
        )

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; published ones stay findable until they are reused."""
        self.checkpoints.end(request)
        for group, table in enumerate(request.cache.blocks):
            self._states.get(group, self.pool).release(reversed(table))
            request.cache.blocks[group] = []
        request.cache.first_live = [0] * len(self.layout.groups)
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
        made = list[Publication]()
        for group in self._growing:
            first, last = request.cache.num_published // group.stride, count // group.stride
            ends = hashes[(first + 1) * group.stride - 1 : last * group.stride : group.stride]
            found = self.pool.publish_all(group.index, ends, request.cache.blocks[group.index][first:last])
            made += [(self.pool, block, end) for end, block in found]
            if self._events is not NO_EVENTS:
                lengths = {end: number * group.block_size for number, end in enumerate(ends, first + 1)}
                for end, _ in found:
                    self._events.stored(request, group.index, end, lengths[end])
        request.cache.num_published = count
        return made

    def chunk(self, request: Request, num_computed: int, count: int, hit: PrefixHit | None = None) -> int:
        """How many of the `count` tokens that a step could take of a prompt it takes, so that its state can be kept.

        `hit` is that of a request which is to be admitted.
        """
        seen = request.cache.num_seen if hit is None else hit.num_seen
        return (
            self.checkpoints.end_of_chunk(num_computed, num_computed + count, request.num_tokens, seen) - num_computed
        )

    def note_state(self, request: Request, num_tokens: int) -> None:
        """Called when the request's state stands, behind the steps that were launched, for its first `num_tokens`.

        Not kept where a connector's load into the request may still turn out to have failed.
        """
        interval = self.checkpoints.interval
        if request.transfer.unconfirmed:
            return
        if interval and num_tokens % interval == 0 and num_tokens <= request.num_tokens:
            place = num_tokens // self.block_size
            self.checkpoints.note(request, self.block_hashes(request, place)[place - 1], num_tokens)

    def withdraw(self, publications: list[Publication]) -> None:
        """Takes back what a step published."""
        for pool, block, block_hash in publications:
            pool.withdraw(block, block_hash)

    def withdraw_all(self) -> None:
        """Empties the prefix cache; requests keep their blocks."""
        self.pool.withdraw_all()
        self._events.cleared()
        self.checkpoints.withdraw_all()

    def withdraw_request(self, request: Request, num_tokens: int = 0) -> None:
        """Makes all but the blocks of its first `num_tokens` unfindable: their content is not to be trusted."""
        for group in self._growing:
            for block in request.cache.blocks[group.index][num_tokens // group.block_size :]:
                self.pool.withdraw(block)
        self.checkpoints.withdraw_request(request, num_tokens)

    def lose(self, bad: set[tuple[int, int]]) -> None:
        """Makes blocks, pairs (group, block), unfindable: what they should hold did not arrive."""
        for group, block in bad:
            self._states.get(group, self.pool).withdraw(block)

    def num_before(self, request: Request, bad: set[tuple[int, int]]) -> int | None:
        """Tokens before the first of the request's blocks that is in `bad`, pairs (group, block); None: none is.

        A state stands for all of its tokens.
        """
        blocks = request.cache.blocks
        if any((group, block) in bad for group in self._states for block in blocks[group]):
            return 0
        places = (
            place * group.block_size
            for group in self._growing
            for place, block in enumerate(blocks[group.index])
            if (group.index, block) in bad
        )
        return min(places, default=None)
