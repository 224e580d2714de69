"""Groups of unequal blocks in one pool: hits as a plain search finds them, no block lost, none kept behind a window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings, strategies as st

from frame.core.engine.cache.hashing import BlockHasher
from frame.core.engine.cache.kv_cache import KVCache, PrefixHit
from frame.core.engine.request import Request
from tests.engine.simulation import make_layout, make_request

LAYOUTS = st.builds(
    make_layout,
    num_blocks=st.integers(6, 60),
    block_size=st.sampled_from([1, 2, 4]),
    windows=st.just((None, 5, None, 12)),
    strides=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4),
)
#: (what happens, to which request, how far)
STEPS = st.lists(st.tuples(st.sampled_from(["enter", "enter", "grow", "grow", "grow", "leave"]), st.integers(0, 99)))


@dataclass
class Held:
    request: Request
    num_computed: int


@dataclass
class Life:
    """Requests over one cache; `content` says which tokens, from the first on, each block of a group ends."""

    cache: KVCache
    held: list[Held] = field(default_factory=list)
    content: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def tokens(self, number: int) -> list[int]:
        return [7, 8, number % 2, *[number % 3] * (number % 40)]

    def enter(self, number: int) -> None:
        cache, tokens = self.cache, self.tokens(number)
        root = cache.hasher.root()
        groups = len(cache.layout.groups)
        request = Request(make_request("r", tokens, 60), sequence=0, max_len=99, num_groups=groups, root=root)
        hit = cache.find_hit(request)
        self.check_hit(request, hit)
        if cache.admit(request, hit, hit.num_tokens, len(tokens)):
            self.held.append(Held(request, len(tokens)))
            self.fill(request, hit.num_tokens, len(tokens))

    def grow(self, number: int) -> None:
        if not self.held:
            return
        one = self.held[number % len(self.held)]
        total = one.num_computed + 1 + number % 7
        one.request.token_ids.extend([number % 3] * (total - one.num_computed))
        if self.cache.extend(one.request, one.num_computed, total):
            self.check_windows(one)
            self.fill(one.request, one.num_computed, total)
            one.num_computed = total
        else:
            del one.request.token_ids[one.num_computed :]

    def leave(self, number: int) -> None:
        if self.held:
            self.cache.free(self.held.pop(number % len(self.held)).request)

    def fill(self, request: Request, start: int, total: int) -> None:
        """What a step stores; then its full blocks are published."""
        for index, group in enumerate(self.cache.layout.groups):
            for place in range(start // group.block_size, -(-total // group.block_size)):
                block = request.cache.blocks[index][place]
                if block:
                    end = (place + 1) * group.block_size
                    self.content[block] = index, tuple(request.token_ids[:end])
        assert self.cache.capacity(request) >= total
        self.cache.publish(request, total)

    def check_hit(self, request: Request, hit: PrefixHit) -> None:
        """The most grains of which each group has all blocks that a later token reads, and these hold its tokens."""
        layout, pool = self.cache.layout, self.cache.pool
        hashes = self.cache.block_hashes(request, request.num_tokens // layout.block_size)

        def blocks(index: int, num_tokens: int) -> list[int]:
            group = layout.groups[index]
            first, step = group.specs[0].first_needed(num_tokens), group.block_size // layout.block_size
            return [
                pool.find(index, hashes[(place + 1) * step - 1])
                for place in range(first // group.block_size, num_tokens // group.block_size)
            ]

        groups = range(len(layout.groups))
        lengths = range(0, request.num_tokens, layout.grain)
        assert hit.num_tokens == max(one for one in lengths if all(all(blocks(group, one)) for group in groups))
        for index, table in enumerate(hit.blocks):
            if hit.num_tokens:
                found = blocks(index, hit.num_tokens)
                assert table == [0] * (len(table) - len(found)) + found
                assert len(table) * layout.groups[index].block_size == hit.num_tokens
            for place, block in enumerate(table):
                end = (place + 1) * layout.groups[index].block_size
                assert not block or self.content[block] == (index, tuple(request.token_ids[:end]))

    def check_windows(self, one: Held) -> None:
        for group, table in zip(self.cache.layout.groups, one.request.cache.blocks, strict=True):
            first = group.specs[0].first_needed(one.num_computed) // group.block_size
            assert not any(table[:first])
            assert all(table[first:])

    def check_pool(self) -> None:
        """Each reference is an entry of a table; what nobody holds is free."""
        pool = self.cache.pool
        held = Counter(block for one in self.held for table in one.request.cache.blocks for block in table if block)
        assert all(pool.references(block) == held[block] for block in range(1, pool.num_blocks))
        assert pool.num_free == pool.num_blocks - 1 - len(held)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(LAYOUTS, STEPS)
def test_requests_that_enter_grow_and_end_leave_the_cache_consistent(layout, steps):
    life = Life(KVCache(layout, BlockHasher("sha256", layout), enable_prefix_caching=True))
    for what, number in steps:
        getattr(life, what)(number)
        life.check_pool()
    for number in range(6):
        life.enter(number)
    while life.held:
        life.leave(0)
    life.check_pool()
    assert life.cache.pool.usage == 0
