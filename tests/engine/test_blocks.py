from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings, strategies as st

from frame.core.engine.cache.blocks import BlockPool


def test_blocks_are_handed_out_once_and_never_the_null_block():
    pool = BlockPool(5, 1)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1, 1)


def test_published_blocks_are_reused_last_and_oldest_first():
    pool = BlockPool(5, 1)
    blocks = pool.allocate(4)
    for block in (1, 3):
        assert pool.publish(0, bytes([block]), block)
    pool.release(reversed(blocks))  # order of release: 4, 3, 2, 1
    assert pool.allocate(2) == [2, 4]
    assert pool.find(0, b"\x03") == 3
    assert pool.allocate(1) == [3]  # released before 1
    assert pool.find(0, b"\x03") == 0
    assert pool.find(0, b"\x01") == 1


def test_a_found_block_leaves_the_free_ones():
    pool = BlockPool(3, 1)
    first, _second = pool.allocate(2)
    pool.publish(0, b"h", first)
    pool.release([first])
    pool.share(first)
    assert pool.num_free == 0
    pool.share(first)
    pool.release([first])
    assert pool.num_free == 0
    pool.release([first, 0])
    assert pool.num_free == 1
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([first])


def test_a_run_of_blocks_is_found_up_to_the_first_that_is_missing():
    pool = BlockPool(5, 2)
    one, two, three, four = pool.allocate(4)
    pool.publish_all(0, [b"a", b"b", b"d"], [one, two, four])
    pool.publish(1, b"c", three)
    assert pool.find_run(0, [b"a", b"b"]) == [one, two]
    assert pool.find_run(0, [b"a", b"b", b"c", b"d"]) == [one, two]
    assert pool.find_run(0, [b"c", b"d"]) == []
    assert pool.find_run(0, []) == []


def test_blocks_are_shared_together_as_each_is():
    pool = BlockPool(4, 1)
    one, two, three = pool.allocate(3)
    pool.publish_all(0, [b"a", b"b"], [one, two])
    pool.release([two, one])
    assert pool.num_free_of([one, two, three]) == 2
    pool.share_all([one, three, two, one])
    assert [pool.references(block) for block in (one, two, three)] == [2, 1, 2]
    assert pool.num_free == pool.num_free_of([one, two, three]) == 0


def test_content_is_published_once_and_per_group():
    pool = BlockPool(4, 2)
    one, two, three = pool.allocate(3)
    assert pool.publish(0, b"h", one)
    assert not pool.publish(0, b"h", two)
    assert pool.publish(1, b"h", three)
    assert not pool.publish(0, b"other", one)
    assert (pool.find(0, b"h"), pool.find(1, b"h"), pool.num_published) == (one, three, 2)
    pool.withdraw(one, b"something else")
    assert pool.find(0, b"h") == one
    pool.withdraw(one)
    assert pool.find(0, b"h") == 0
    pool.withdraw_all()
    assert pool.num_published == 0


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish", "withdraw"]), st.integers(0, 9))))
def test_the_pool_behaves_like_an_ordered_dictionary(script):
    pool = BlockPool(8, 1)
    free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, 8))
    references: dict[int, int] = dict.fromkeys(range(1, 8), 0)
    content: dict[int, bytes] = {}
    for operation, number in script:
        block = number % 7 + 1
        if operation == "take" and number <= len(free):
            wanted = list(free)[:number]
            assert pool.allocate(number) == wanted
            for taken in wanted:
                del free[taken]
                references[taken] = 1
                content.pop(taken, None)
        elif operation == "share" and block in content:
            pool.share(block)
            free.pop(block, None)
            references[block] += 1
        elif operation == "drop" and references[block]:
            pool.release([block])
            references[block] -= 1
            if not references[block]:
                free[block] = None
                free.move_to_end(block, last=block in content)
        elif operation == "publish" and references[block]:
            key = bytes([number])
            expected = key not in content.values() and block not in content
            assert pool.publish(0, key, block) == expected
            if expected:
                content[block] = key
        elif operation == "withdraw":
            pool.withdraw(block)
            content.pop(block, None)
        assert pool.num_free == len(free)
        assert all(pool.references(b) == n for b, n in references.items())
        assert all(pool.find(0, key) == b for b, key in content.items())


def test_a_run_of_blocks_is_published_as_one_by_one():
    pool = BlockPool(8, 1)
    blocks = pool.allocate(5)
    assert pool.publish(0, b"b", blocks[4])
    hashes = [b"a", b"b", b"c", b"d", b"c"]
    assert pool.publish_all(0, hashes, [blocks[0], blocks[1], 0, blocks[0], blocks[3]]) == [
        (b"a", blocks[0]),
        (b"c", blocks[3]),
    ]
    assert [pool.find(0, one) for one in (b"a", b"b", b"c", b"d")] == [blocks[0], blocks[4], blocks[3], 0]
    pool.release(blocks)
    assert pool.allocate(7) == [*(blocks[place] for place in (2, 1)), 6, 7, *(blocks[place] for place in (0, 3, 4))]
    assert pool.num_published == 0
