from __future__ import annotations

import numpy as np
import pytest

from frame.core.engine.cache import kv_cache
from frame.core.engine.cache.hashing import BlockHasher
from frame.core.engine.cache.kv_cache import KVCache, PrefixHit
from frame.core.engine.request import Request
from frame.core.interfaces.kv import CrossKV, FullKV, KVGroup, KVLayout, KVSpec, SlidingKV
from frame.core.interfaces.kv_layout import blocks_needed, max_request_len
from tests.engine.simulation import SPEC, make_layout, make_request

MISS = PrefixHit(0, [[], []])


def make_cache(layout: KVLayout, *, caching: bool = True, connected: bool = False) -> KVCache:
    return KVCache(layout, BlockHasher("sha256", layout), enable_prefix_caching=caching, connected=connected)


def make(cache: KVCache, prompt: list[int], **fields: object) -> Request:
    groups = len(cache.layout.groups)
    return Request(make_request("r", prompt, **fields), sequence=0, max_len=99, num_groups=groups, root=b"root")


def layout_of(*specs: KVSpec, num_blocks: int = 20) -> KVLayout:
    groups = tuple(KVGroup(specs=(spec,), layers=(f"layer{i}",), block_size=4) for i, spec in enumerate(specs))
    return KVLayout(groups=groups, pools=(num_blocks,), block_size=4, grain=4)


def fill(cache: KVCache, prompt: list[int]) -> Request:
    """A request that computed its prompt and ended."""
    request = make(cache, prompt)
    none = PrefixHit(0, [[] for _ in cache.layout.groups])
    assert cache.admit(request, none, 0, len(prompt))
    cache.publish(request, len(prompt))
    return request


@pytest.mark.parametrize(
    ("spec", "num_tokens", "blocks"),
    [
        (FullKV(**SPEC), 17, 5),
        (SlidingKV(**SPEC, window=6), 17, 3),
        (SlidingKV(**SPEC, window=6), 3, 1),
        (SlidingKV(**SPEC, window=1), 17, 1),
    ],
)
def test_blocks_needed_at_once(spec, num_tokens, blocks):
    assert blocks_needed(layout_of(spec), num_tokens) == blocks


@pytest.mark.parametrize("window", range(1, 14))
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_bound_for_windows_holds_at_every_position(window, block_size):
    layout = make_layout(99, block_size, (window,))
    spec = layout.groups[0].specs[0]
    live = [c // block_size - spec.first_needed(c) // block_size + 1 for c in range(60)]
    assert blocks_needed(layout, 60) == max(live)


def test_the_longest_request_fits_and_the_next_does_not():
    layout = make_layout(9, 4, (None, 6))
    # 5 full blocks and 3 of the window
    assert max_request_len(layout, 1000) == 21
    assert max_request_len(layout, 7) == 7
    assert blocks_needed(layout, 20) == 8
    assert blocks_needed(layout, 21) == 9


def test_blocks_of_encoder_tokens_are_taken_at_once_and_never_shared():
    sizes = {"num_kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    layout = layout_of(FullKV(**sizes), CrossKV(**sizes))
    assert blocks_needed(layout, 8, 17) == 2 + 5
    assert blocks_needed(layout, 8) == 2 + 2
    assert max_request_len(layout, 1000) == 37  # 9 blocks of each, and a token that is never fed back
    cache, prompt = make_cache(layout), list(range(8))
    first, second = (make(cache, [*prompt, 9], encoder_ids=np.arange(17, dtype=np.int32)) for _ in range(2))
    assert cache.num_taken(first, MISS, 0, 9) == 3 + 5
    assert cache.admit(first, MISS, 0, 9)
    cache.publish(first, 9)
    read = first.cache.blocks[1]
    assert len(read) == 5
    assert cache.extend(first, 9, 13)
    assert not cache.add_block(first)
    assert first.cache.blocks[1] is read
    hit = cache.find_hit(second)
    assert (hit.num_tokens, hit.blocks[1]) == (8, [])
    assert cache.admit(second, hit, 8, 9)
    assert not set(second.cache.blocks[1]) & set(read)
    assert cache.pool.num_free == 19 - 4 - 5 - 1 - 5
    third = make(cache, [7], encoder_ids=np.arange(17, dtype=np.int32))
    assert not cache.admit(third, MISS, 0, 1)
    cache.free(first)
    assert cache.admit(third, MISS, 0, 1)
    cache.free(second)
    cache.free(third)
    assert cache.pool.num_free == 19


def test_a_hit_leaves_one_token_to_compute():
    cache = make_cache(make_layout(20))
    first = fill(cache, list(range(8)))
    assert cache.find_hit(make(cache, list(range(8)))).num_tokens == 4
    hit = cache.find_hit(make(cache, [*range(8), 9]))
    assert hit.num_tokens == 8
    assert hit.blocks == first.cache.blocks
    assert cache.find_hit(make(cache, [9, *range(8)])).num_tokens == 0


def test_prompt_logprobs_and_disabled_caching_read_nothing():
    from frame.core.interfaces.sampling import SamplingParams

    cache = make_cache(make_layout(20))
    fill(cache, list(range(8)))
    params = SamplingParams(prompt_logprobs=1)
    assert cache.find_hit(make(cache, [*range(8), 9], params=params)).num_tokens == 0
    off = make_cache(make_layout(20), caching=False)
    fill(off, list(range(8)))
    assert off.find_hit(make(off, [*range(8), 9])).num_tokens == 0
    assert off.pool.num_published == 0


def test_a_windowed_group_needs_only_the_window_before_the_hit():
    cache = make_cache(make_layout(40, 4, (None, 5)))
    request = fill(cache, list(range(16)))
    windowed = request.cache.blocks[1]
    cache.free(request)
    cache.pool.withdraw(windowed[0])
    hit = cache.find_hit(make(cache, list(range(17))))
    assert hit.num_tokens == 16
    assert [bool(block) for block in hit.blocks[1]] == [False, False, False, True]
    cache.pool.withdraw(windowed[3])
    hit = cache.find_hit(make(cache, list(range(17))))
    assert hit.num_tokens == 12
    assert hit.blocks[1] == [0, 0, windowed[2]]
    cache.pool.withdraw(windowed[1])
    cache.pool.withdraw(windowed[2])
    assert cache.find_hit(make(cache, list(range(17)))).num_tokens == 0


def test_groups_shorten_each_other_until_they_agree():
    cache = make_cache(make_layout(60, 1, (3, 4)))
    request = fill(cache, list(range(12)))
    cache.free(request)
    hashes, pool = cache.block_hashes(request, 12), cache.pool
    for group, index in ((0, 10), (1, 9), (0, 7)):
        pool.withdraw(pool.find(group, hashes[index]))
    # group 0 must have the 2 blocks before the hit, group 1 the 3
    assert cache.find_hit(make(cache, list(range(13)))).num_tokens == 7


def test_no_more_is_hashed_than_tells_the_first_missing_block(monkeypatch):
    cache = make_cache(make_layout(40))
    fill(cache, list(range(20)))
    made = {}
    for known in (0, 1, 3, 5):
        request = make(cache, [*range(4 * known), *range(50, 130 - 4 * known)])
        assert cache.find_hit(request).num_tokens == 4 * known
        made[known] = len(request.cache.hashes)
    assert made == {0: 1, 1: 3, 3: 7, 5: 7}
    monkeypatch.setattr(kv_cache, "_HASHES_AT_ONCE", 5)
    assert [cache.hash_some(request, 58) for _ in range(3)] == [True, True, False]
    assert request.cache.hashes == cache.block_hashes(make(cache, list(request.token_ids)), 14)
    plain = make_cache(make_layout(40), caching=False)
    assert not plain.hash_some(make(plain, list(range(20))), 20)


def test_admission_without_room_changes_nothing():
    cache = make_cache(make_layout(6))
    request = fill(cache, list(range(8)))
    cache.free(request)
    other = make(cache, list(range(24)))
    hit = cache.find_hit(other)
    assert hit.num_tokens == 8
    assert not cache.admit(other, hit, 8, 24)
    assert cache.pool.num_free == 5
    assert other.cache.blocks == [[]]
    assert cache.admit(other, hit, 8, 20)
    assert cache.pool.num_free == 0
    assert other.cache.blocks[0][:2] == hit.blocks[0]
    assert cache.capacity(other) == 20


def test_blocks_that_fell_out_of_the_window_are_given_back():
    cache = make_cache(make_layout(10, 4, (5,)))
    request = make(cache, list(range(12)))
    assert cache.admit(request, PrefixHit(0, [[]]), 0, 12)
    assert cache.pool.num_free == 6
    assert cache.extend(request, 12, 13)
    assert [bool(block) for block in request.cache.blocks[0]] == [False, False, True, True]
    assert cache.pool.num_free == 7
    cache.free(request)
    assert cache.pool.num_free == 9


def live(request: Request) -> list[int]:
    """The places of the blocks that the first group still holds."""
    return [place for place, block in enumerate(request.cache.blocks[0]) if block]


@pytest.mark.parametrize(("connected", "kept"), [(True, [5, 6, 7]), (False, [6, 7])])
def test_a_prompt_keeps_the_window_before_its_last_grain(connected, kept):
    cache = make_cache(make_layout(20, 4, (6,)), connected=connected)
    request = make(cache, list(range(31)))
    assert cache.admit(request, PrefixHit(0, [[]]), 0, 30)
    assert cache.extend(request, 30, 31)
    assert live(request) == kept, "an engine that loads the first 28 tokens reads from number 23 on"
    request.token_ids.append(1)
    assert cache.extend(request, 31, 32)
    assert live(request) == [6, 7], "while it generates only its own window is kept"


def test_the_window_before_the_last_grain_is_kept_only_where_there_is_room():
    cache = make_cache(make_layout(20, 4, (5, None), strides=(1, 2)), connected=True)
    request = make(cache, list(range(31)))
    assert cache.admit(request, MISS, 0, 28)
    assert cache.extend(request, 28, 28)
    assert live(request) == [5, 6]
    cache.pool.allocate(cache.pool.num_free)
    assert cache.extend(request, 28, 31)
    assert live(request) == [6, 7]


def test_a_state_group_holds_one_block_and_shares_no_prefix():
    cache = make_cache(make_layout(20, states=2))
    request = make(cache, list(range(9)))
    assert cache.admit(request, MISS, 0, 9)
    assert [len(blocks) for blocks in request.cache.blocks] == [3, 1]
    assert cache.extend(request, 9, 20)
    assert [len(blocks) for blocks in request.cache.blocks] == [5, 1]
    assert cache.publish(request, 9) == []
    cache.free(request)
    assert cache.pool.num_free == 19


def test_a_state_that_did_not_arrive_is_lost_and_no_block_of_tokens_with_its_number():
    cache = make_cache(make_layout(20, states=2, checkpoints=3))
    request = make(cache, list(range(9)))
    assert cache.admit(request, MISS, 0, 9)
    cache.publish(request, 8)
    (state,) = request.cache.blocks[1]
    assert state in request.cache.blocks[0], "pools number their blocks alike"
    hashes = cache.block_hashes(request, 2)
    found = [cache.pool.find(0, one) for one in hashes]
    assert cache.checkpoints.pools[1].publish(1, b"prefix", state)
    bad = {(1, state)}
    cache.lose(bad)
    assert [cache.pool.find(0, one) for one in hashes] == found == request.cache.blocks[0][:2]
    assert not cache.checkpoints.pools[1].find(1, b"prefix")
    assert cache.num_before(request, bad) == 0, "all is computed anew"
    assert cache.num_before(request, {(0, request.cache.blocks[0][1])}) == 4
    assert cache.num_before(request, {(1, state + 1)}) is None


def test_what_a_step_published_can_be_taken_back():
    cache = make_cache(make_layout(20))
    request = make(cache, list(range(9)))
    cache.admit(request, PrefixHit(0, [[]]), 0, 9)
    made = cache.publish(request, 9)
    assert [block for _, block, _ in made] == request.cache.blocks[0][:2]
    assert cache.publish(request, 9) == []
    cache.withdraw(made)
    assert cache.pool.num_published == 0
