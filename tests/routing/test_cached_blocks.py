"""The index of blocks against a model of it that keeps everything, and its bounds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from frame.interfaces import KVCleared, KVRemoved, KVStored
from frame.plugins.routing.cached_blocks import LEAST_KEPT, MOST_KEPT, CachedBlocks, KnownTokens, Prompt, _keys
from frame.plugins.routing.prefix_index import Bits, PrefixIndex

URLS = ("http://a", "http://b")
SIZE = 2


def stored(
    tokens: Sequence[int],
    names: Sequence[int | bytes],
    parent: int | bytes | None = None,
    size: int = SIZE,
    *,
    adapter: str | None = None,
    extra: Sequence[tuple[str, ...]] = (),
    medium: str = "GPU",
) -> KVStored:
    return KVStored(names, parent, array("I", tokens), size, adapter, extra, medium)


def prompt(*tokens: int, salt: object = None, model: object = None) -> Prompt:
    return Prompt(array("I", tokens), salt, model)


def test_a_chain_is_known_as_far_as_it_has_no_gap() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([1, 2, 3, 4], [10, 11]))
    blocks.change("a", 0, stored([5, 6], [12], parent=11))
    asked = prompt(1, 2, 3, 4, 5, 6, 7)
    assert blocks.cached(asked, ["a", "b"]) == {"a": 6}
    assert blocks.cached(prompt(1, 2, 3, 4, 5, 6), ["a"]) == {"a": 4}, "the last token is computed"
    assert blocks.cached(prompt(1, 2, 3, 9, 5, 6, 7), ["a"]) == {"a": 2}
    blocks.change("a", 0, KVRemoved([11], "GPU"))
    assert blocks.cached(asked, ["a"]) == {"a": 2}
    blocks.change("a", 0, KVCleared())
    assert (blocks.cached(asked, ["a"]), blocks.tell(["a"]), len(blocks)) == ({}, False, 0)


def test_blocks_behind_unknown_ones_are_left_out() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([3, 4], [11], parent=10))
    assert len(blocks) == 0


def test_equal_names_of_two_servers_say_nothing_together() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([1, 2], [10]))
    blocks.change("b", 0, stored([3, 4], [10]))
    assert blocks.cached(prompt(1, 2, 0), ["a", "b"]) == {"a": 2, "b": 0}


def test_salts_adapters_and_other_keys_part_equal_tokens() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([1, 2], [1]))
    blocks.change("b", 0, stored([1, 2, 3, 4], [1, 2], extra=[("salt",), ()]))
    blocks.change("c", 0, stored([1, 2], [1], adapter="poet"))
    blocks.change("d", 0, stored([1, 2], [1], extra=[("image",)]))
    everywhere = ["a", "b", "c", "d"]
    assert blocks.cached(prompt(1, 2, 3, 4, 5), everywhere) == {"a": 2, "b": 0, "c": 0, "d": 0}
    assert blocks.cached(prompt(1, 2, 3, 4, 5, salt="salt"), everywhere) == {"a": 0, "b": 4, "c": 0, "d": 0}
    assert blocks.cached(prompt(1, 2, 3, model="poet"), everywhere) == {"a": 2, "b": 0, "c": 2, "d": 0}
    assert blocks.cached(prompt(1, 2, 3, salt=["odd"], model={}), everywhere)["a"] == 2


def test_ranks_and_block_sizes_of_their_own() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([1, 2], [1]))
    blocks.change("a", 1, stored([1, 2, 3, 4], [1, 2]))
    blocks.change("b", 0, stored([1, 2, 3, 4], [b"x"], size=4))
    blocks.change("b", 0, stored([1, 2], [b"y"]))  # of another size
    assert blocks.cached(prompt(*range(1, 9)), ["a", "b"]) == {"a": 4, "b": 4}
    blocks.change("a", 1, KVCleared())
    assert blocks.cached(prompt(*range(1, 9)), ["a", "b"]) == {"a": 2, "b": 4}


def test_a_block_is_there_while_any_medium_has_it() -> None:
    blocks = CachedBlocks(1000)
    blocks.change("a", 0, stored([1, 2], [1]))
    blocks.change("a", 0, stored([], [1, 99], size=0, medium="CPU"))
    blocks.change("a", 0, KVRemoved([1], "GPU"))
    assert blocks.cached(prompt(1, 2, 3), ["a"]) == {"a": 2}
    blocks.change("a", 0, KVRemoved([1], "CPU"))
    assert len(blocks) == 0


def test_hostile_servers_are_bounded_and_leave_others_their_share() -> None:
    blocks = CachedBlocks(100)
    blocks.change("good", 0, stored([1, 2], [1]))
    for start in range(0, 10_000, 100):
        blocks.change("bad", 0, stored(range(200), [start + place for place in range(100)], medium=str(start)))
        blocks.change("bad", 0, stored([], range(100), size=0, medium=f"copy {start}"))
    assert sum(rank.num_blocks for rank in blocks._ranks.values()) <= 100
    for number in range(10_000):
        blocks.change("bad", 0, stored([], [], adapter=f"adapter {number}", medium="0"))
    assert len(blocks._ranks["bad", 0].media) <= 8
    assert len(blocks._ranks["bad", 0].adapters) <= 4096
    blocks.change("good", 0, stored([3, 4], [2], parent=1))
    assert blocks.cached(prompt(1, 2, 3, 4, 5), ["good"]) == {"good": 4}


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(URLS),
        st.one_of(
            st.tuples(st.just("store"), st.lists(st.integers(0, 1), min_size=SIZE, max_size=6)),
            st.tuples(st.just("remove"), st.lists(st.integers(0, 1), min_size=SIZE, max_size=6)),
            st.tuples(st.just("clear"), st.just([])),
        ),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(CHANGES, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=5))
def test_it_knows_what_a_model_knows(changes: list[tuple[str, tuple[str, list[int]]]], asked: list[list[int]]) -> None:
    blocks, model = CachedBlocks(10_000), {url: set[tuple[int, ...]]() for url in URLS}
    for url, (kind, tokens) in changes:
        whole = [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        # a name stands for all tokens so far, as in engines
        names = [int("1" + "".join(map(str, one))) for one in whole]
        if kind == "store":
            blocks.change(url, 0, stored(tokens[: len(whole) * SIZE], names))
            model[url] |= set(whole)
        elif kind == "remove" and whole:
            blocks.change(url, 0, KVRemoved(names[-1:], "GPU"))
            model[url].discard(whole[-1])
        elif kind == "clear":
            blocks.change(url, 0, KVCleared())
            model[url].clear()
    for tokens in asked:
        found = blocks.cached(prompt(*tokens), URLS)
        for url in URLS:
            depth = 0
            while depth + SIZE < len(tokens) and tuple(tokens[: depth + SIZE]) in model[url]:
                depth += SIZE
            assert found.get(url, 0) == depth
    assert len(blocks) == len(set().union(*model.values()))


@pytest.mark.parametrize("holders", [0, 0b1011])
def test_keys_are_read_no_further_than_anybody_has_them(holders: int) -> None:
    index = PrefixIndex()
    for key in range(3):
        index.add(key, 0b0010)
    index.add(0, 0b1000)
    read = []

    def keys() -> object:
        for key in range(100):
            read.append(key)
            yield [key]

    found = index.depths(keys(), holders)  # type: ignore[arg-type]
    assert found == ({0b0001: 0, 0b0010: 3, 0b1000: 1} if holders else {})
    assert len(read) <= 5


@pytest.mark.parametrize("size", [1, 3, 10])
def test_gaps_within_runs_of_keys_are_seen(size: int) -> None:
    index = PrefixIndex()
    for key in range(10):
        index.add(key, 0b110 if key == 4 else 0b111 if key < 7 else 0b010)
    runs = [list(range(first, min(first + size, 12))) for first in range(0, 12, size)]
    assert index.depths(runs, 0b111) == {0b001: 4, 0b100: 7, 0b010: 10}


@pytest.mark.parametrize("salt", [None, "s"])
@pytest.mark.parametrize("num_sure", [0, 3, 4, 30, 31, 200])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_keys_of_blocks_that_are_known_are_made_once(salt: str | None, num_sure: int, size: int) -> None:
    """And are those that would be made anew."""
    tokens, known = array("I", range(100)), KnownTokens({})
    whole = [key for run in _keys(Prompt(tokens, salt), size, None) for key in run]
    for count in (num_sure, 8, num_sure):
        changed = tokens[:count] + array("I", bytes(4 * max(0, 100 - count)))
        keys = [key for run in _keys(Prompt(changed, salt, known=known.up_to(count)), size, None) for key in run]
        assert keys == [key for run in _keys(Prompt(changed, salt), size, None) for key in run]
        assert keys[: min(count, 99) // size] == whole[: min(count, 99) // size]
    assert sum(map(len, known.block_keys.values())) == (max(min(num_sure, 99), 8) // size if size >= LEAST_KEPT else 0)


def test_keys_of_known_blocks_are_kept_for_few_kinds() -> None:
    known = KnownTokens({}, 100)
    for size in range(1, 20):
        list(_keys(Prompt(array("I", range(100)), known=known), size, None))
        assert len(known.block_keys) <= MOST_KEPT


def test_bits_are_given_anew() -> None:
    bits = Bits()
    assert [bits.take() for _ in range(3)] == [1, 2, 4]
    bits.give_back(2)
    assert [bits.take(), bits.take()] == [2, 8]
