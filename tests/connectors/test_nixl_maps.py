"""Which bytes go where between engines of other shapes: each byte of a block comes from exactly one byte."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from frame.plugins.connectors.nixl import maps as nixl_maps
from frame.plugins.connectors.nixl.maps import LayerRows, Rows, Side, check_orders, of_rank, pieces, readers, rows
from frame.plugins.connectors.nixl.shapes import BlockShape, Facts, GroupShape, LayerShape

ITEM = 2


def block_shape(order, block_size, num_heads, numbers, dtype="bfloat16"):
    if num_heads is None:
        return BlockShape((block_size, numbers), tuple(axis for axis in order if axis < 2), dtype, ITEM, 0, None)
    return BlockShape((2, block_size, num_heads, numbers), tuple(order), dtype, ITEM, 1, 2)


def make_facts(block_size=4, heads=4, ranks=1, order=(0, 1, 2, 3), numbers=3, layers=("a", "b"), **other):
    """An engine of `ranks`, over which `heads` are divided; None: latents."""
    kept, ranks = (None, ranks) if isinstance(ranks, int) else (ranks, len(ranks))
    own = None if heads is None else max(1, heads // ranks)
    firsts = [0 if own is None else rank * heads // ranks for rank in range(ranks)]
    shape = block_shape(order, block_size, own, numbers)
    if kept is None:
        kept = [[LayerShape(name, 0, 0, first, first + (own or 0), heads or 0) for name in layers] for first in firsts]
    facts = {"version": 2, "model": "m", "exact": "", "grain": block_size, "groups": [GroupShape(block_size, "all", 0)]}
    return Facts(**{**facts, "blocks": [shape], "ranks": kept, **other})


class Memory:
    """The blocks of an engine by rank and layer, whose bytes lie from address 0 on; some bytes lie between blocks."""

    def __init__(self, facts, num_blocks):
        self.facts = facts
        (self.shape,) = facts.blocks
        self.size = facts.groups[0].block_size
        self.stride = self.shape.num_bytes + 6
        self.bytes = np.full((len(facts.ranks), len(facts.ranks[0]), num_blocks * self.stride), -1, np.int64)

    def side(self, rank, layer):
        return Side(self.shape, self.size, self.facts.ranks[rank][layer].first, 0, self.stride)

    def cells(self, rank, layer, table, tokens):
        """(place of a byte, what it means) of all bytes of tokens, one by one, straight from the words of the shape."""
        shape, first = self.shape, self.facts.ranks[rank][layer].first
        for token in tokens:
            block = table[token // self.size]
            if block == 0:
                continue
            lengths = [1 if axis == shape.token_axis else size for axis, size in enumerate(shape.shape)]
            for place in itertools.product(*map(range, lengths)):
                meaning = list(place)
                place = [token % self.size if axis == shape.token_axis else one for axis, one in enumerate(place)]
                if shape.head_axis is not None:
                    meaning[shape.head_axis] += first
                number = 0
                for axis in shape.order:
                    number = number * shape.shape[axis] + place[axis]
                for byte in range(ITEM):
                    where = block * self.stride + number * ITEM + byte
                    yield where, (layer, token, tuple(meaning), byte)


def transfer(prefill, decode, rank, tokens, ours, theirs):
    """{(layer, byte here): (rank, layer, byte there)} of what a rank reads; no byte is written twice."""
    found = {}
    wanted = pieces(prefill.facts, decode.facts, rank)
    for other in readers([wanted])[0]:
        for piece in of_rank(wanted, other):
            here, there = decode.side(rank, piece.ours), prefill.side(other, piece.theirs)
            tail = theirs[tokens.start // prefill.size :]
            moved = rows(here, there, (piece.first, piece.last), tokens, ours[tokens.start // decode.size :], tail)
            for to, source, size in zip(moved.ours, moved.theirs, moved.sizes, strict=True):
                for byte in range(size):
                    assert (piece.ours, to + byte) not in found
                    found[piece.ours, to + byte] = other, piece.theirs, source + byte
    return found


def check(prefill_facts, decode_facts, start=0, stop=None, dropped=0):
    """All bytes of tokens from `start` on come over, and nothing else; the first `dropped` blocks there are gone."""
    size = max(prefill_facts.groups[0].block_size, decode_facts.groups[0].block_size)
    stop = 2 * size if stop is None else stop
    prefill, decode = (Memory(facts, 2 * size + 2) for facts in (prefill_facts, decode_facts))
    draw = np.random.default_rng(stop)
    theirs, ours = (draw.permutation(2 * size)[: -(-stop // one.size)] + 1 for one in (prefill, decode))
    theirs[:dropped] = 0
    means = {
        (rank, layer, where): meaning
        for rank, layers in enumerate(prefill_facts.ranks)
        for layer in range(len(layers))
        for where, meaning in prefill.cells(rank, layer, theirs, range(stop))
    }
    names = [layer.name for layer in prefill_facts.ranks[0]]
    for rank, layers in enumerate(decode_facts.ranks):
        found = transfer(prefill, decode, rank, range(start, stop), ours, theirs)
        wanted = {}
        for layer in range(len(layers)):
            for where, meaning in decode.cells(rank, layer, ours, range(max(start, dropped * prefill.size), stop)):
                wanted[layer, where] = (names.index(layers[layer].name), *meaning[1:])
        assert found.keys() == wanted.keys()
        assert all(means[found[key]] == wanted[key] for key in wanted)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({}, {"ranks": 2}),
        ({"ranks": 2}, {}),
        ({"ranks": 4}, {"ranks": 2}),
        ({"heads": None}, {"heads": None, "ranks": 2}),
        ({"heads": None, "ranks": 2}, {"heads": None}),
        ({"heads": 2, "ranks": 4}, {"heads": 2, "ranks": 1}),
        ({"heads": 1}, {"heads": 1, "ranks": 2}),
        ({"heads": 1, "ranks": 2}, {"heads": 1, "ranks": 4}),
        ({"block_size": 2}, {"block_size": 4}),
        ({"block_size": 4}, {"block_size": 2}),
        ({"block_size": 1}, {"block_size": 4, "ranks": 2}),
        ({"order": (1, 0, 2, 3)}, {"order": (0, 2, 1, 3), "ranks": 2}),
        ({"layers": ("a", "b")}, {"layers": ("b", "a")}),
    ],
    ids=str,
)
def test_bytes_of_engines_with_other_shapes(prefill, decode):
    check(make_facts(**prefill), make_facts(**decode))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_byte_comes_from_exactly_one_byte(data):
    heads = data.draw(st.sampled_from([None, 1, 2, 4]))
    short = data.draw(st.sampled_from([1, 2, 3]))
    sizes = data.draw(st.permutations([short, short * data.draw(st.sampled_from([1, 2, 3]))]))
    sides = [
        make_facts(
            block_size=size,
            heads=heads,
            ranks=data.draw(st.sampled_from([1, 2, 4])),
            order=data.draw(st.permutations(range(4))),
            layers=("a",),
            numbers=2,
        )
        for size in sizes
    ]
    stop = data.draw(st.integers(1, 2)) * sizes[1]
    start = data.draw(st.integers(0, stop // sizes[1] - 1)) * sizes[1]
    check(*sides, start, stop, data.draw(st.integers(0, (stop - 1) // sizes[0])))


def test_blocks_that_lie_side_by_side_are_read_in_one_piece():
    side = Side(block_shape((0, 1, 2, 3), 4, 2, 3), 4, 0, 100, 96)
    found = rows(side, side, (0, 2), range(16), np.array([3, 4, 5, 9]), np.array([6, 7, 8, 9]))
    assert found.sizes.tolist() == [3 * 96, 96]
    assert found.ours.tolist() == [100 + 3 * 96, 100 + 9 * 96]
    assert len(Rows.join([]).sizes) == 0


def test_heads_of_half_a_block_are_as_few_pieces_as_the_order_allows():
    counts = {}
    for order in ((0, 2, 1, 3), (0, 1, 2, 3)):
        whole, half = (Side(block_shape(order, 16, heads, 8), 16, 0, 0, 1 << 20) for heads in (4, 2))
        counts[order] = len(rows(half, whole, (0, 2), range(16), np.array([1]), np.array([1])).sizes)
    assert list(counts.values()) == [2, 32]


def test_orders_with_nothing_in_common_are_refused():
    plain, turned = (make_facts(order=order, numbers=16) for order in ((0, 1, 2, 3), (3, 2, 1, 0)))
    check_orders(plain, make_facts(order=(2, 1, 0, 3), numbers=16, ranks=2))
    with pytest.raises(ValueError, match=r"a block's axes, of layer b: \(3, 2, 1, 0\) at .* so that only 2 bytes lie"):
        check_orders(turned, plain)
    check_orders(turned, turned)


def test_a_read_of_too_many_pieces_is_refused(monkeypatch):
    monkeypatch.setattr(nixl_maps, "MAX_ROWS", 31)
    whole, half = (Side(block_shape((0, 1, 2, 3), 16, heads, 8), 16, 0, 0, 1 << 20) for heads in (4, 2))
    with pytest.raises(ValueError, match="they are 32 pieces of 32 bytes"):
        rows(half, whole, (0, 2), range(16), np.array([1]), np.array([1]))


def test_ranks_that_keep_the_same_are_read_by_turns():
    latents = make_facts(heads=None, ranks=2), make_facts(heads=None, ranks=4)
    assert readers([pieces(*latents, rank) for rank in range(4)]) == [[0], [1], [0], [1]]
    one_head = make_facts(heads=1, ranks=2), make_facts(heads=1, ranks=2)
    assert readers([pieces(*one_head, rank) for rank in range(2)]) == [[0], [1]]


def test_what_no_rank_has_is_said():
    half = replace(prefill := make_facts(ranks=2), ranks=prefill.ranks[:1])
    with pytest.raises(ValueError, match="head 2 of layer a is on none"):
        pieces(half, make_facts(), 0)
    unknown = [[LayerShape("a", 0, 0, 0, 0, 4)]] * 2
    shape = BlockShape((2, 4, 2, 3), (0, 1, 2, 3), "bfloat16", 2, 1, None)
    divided = make_facts(blocks=[shape], ranks=unknown)
    assert [piece.rank for piece in pieces(divided, divided, 1)] == [1]
    with pytest.raises(ValueError, match="tells no axis of heads"):
        pieces(divided, make_facts(blocks=[shape], ranks=unknown[:1]), 0)
    with pytest.raises(ValueError, match="layer c is on none"):
        pieces(make_facts(heads=None), make_facts(heads=None, layers=("c",)), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ()},
        {"shape": (2, 0, 2, 3)},
        {"order": (0, 1, 2, 2)},
        {"item_bytes": 0},
        {"token_axis": 4},
        {"head_axis": -1},
        {"head_axis": 1},
        {"shape": (2,) * 9, "order": tuple(range(9))},
        {"shape": (1 << 20, 1 << 10, 1 << 10, 1)},
    ],
    ids=str,
)
def test_a_block_that_cannot_be_is_refused(changes):
    right = {"shape": (2, 4, 2, 3), "order": (0, 1, 2, 3), "dtype": "bfloat16", "item_bytes": 2}
    assert math.prod(right["shape"]) * 2 == BlockShape(**right).num_bytes
    with pytest.raises(ValueError, match="a block has"):
        BlockShape(**{**right, "token_axis": 1, "head_axis": 2, **changes})


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (LayerShape("a", 1, 0, 0, 4, 4), "in a group"),
        (LayerShape("a", 0, -1, 0, 4, 4), "in a group"),
        (LayerShape("a", 0, 0, 0, 3, 4), "has heads"),
        (LayerShape("a", 0, 0, 2, 6, 4), "has heads"),
        (LayerShape("a", 0, 0, -2, 2, 4), "has heads"),
    ],
)
def test_layers_that_cannot_be_are_refused(layer, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_facts(ranks=[[layer]])
    with pytest.raises(ValueError, match="other tokens"):
        make_facts(groups=[GroupShape(5, "all", 0)])
    with pytest.raises(ValueError, match="more of itself"):
        make_facts(ranks=[[]] * 2000)


def test_layers_whose_blocks_lie_alike_are_pieced_together_once():
    ours, theirs = (Side(block_shape((0, 1, 2, 3), size, 2, 3), size, 0, 0, 400) for size in (4, 8))
    given_ = (0, 2), range(8, 24), np.array([3, 4, 9, 1]), np.array([2, 7])
    addresses = [(10_000, 70_000), (20_000, 50_000)]
    both = LayerRows(np.array(addresses), rows(ours, theirs, *given_)).told()
    one_by_one = Rows.join(
        [
            rows(Side(ours.block, 4, 0, here, 400), Side(theirs.block, 8, 0, there, 400), *given_)
            for here, there in addresses
        ]
    )
    for name in ("ours", "theirs", "sizes"):
        assert getattr(both, name).tolist() == getattr(one_by_one, name).tolist()
    assert len(both.sizes) == len(LayerRows(np.array(addresses), rows(ours, theirs, *given_)))
