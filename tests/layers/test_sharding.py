"""Layers over several ranks give what one rank gives, from the same checkpoint."""

import pytest
import torch

from frame.interfaces import ExpertSpec, RouterSpec, Routing
from frame.layers.heads_norm import HeadsNorm, normed_heads
from frame.ops import Ops
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import make_build

pytestmark = pytest.mark.product


def load(module, tensors):
    for slot in module.weight_slots():
        tensor = tensors[slot.name]
        assert tuple(tensor.shape) == slot.shape
        slot.write(tensor[slot.index] if slot.index else tensor)
    return module


@pytest.mark.parametrize("transposed", [False, True])
def test_column_then_row(transposed):
    torch.manual_seed(0)
    up, down = torch.randn(8, 6), torch.randn(6, 8)
    tensors = {"up.weight": up, "up.bias": torch.randn(8), "down.weight": down, "down.bias": torch.randn(6)}
    if transposed:
        tensors |= {"up.weight": up.T, "down.weight": down.T}
    x = torch.randn(5, 6)

    def work(group):
        build = make_build(group)
        first = load(build.linear("up", 6, 8, bias=True, shard="column", transposed=transposed), tensors)
        second = load(build.linear("down", 8, 6, bias=True, shard="row", transposed=transposed), tensors)
        assert first.weight.shape == (8 // group.size, 6)
        return second(first(x))

    expected = (x @ up.T + tensors["up.bias"]) @ down.T + tensors["down.bias"]
    for size in (1, 2, 4):
        for out in run_ranks(size, work):
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_piece_of_one_tensor_is_sharded_by_itself(size, transposed):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(12, 6), torch.randn(12), torch.randn(5, 6)
    tensors = {"m.weight": weight.T if transposed else weight, "m.bias": bias}

    def work(group):
        build = make_build(group)
        layer = build.linear("m", 6, 12, bias=True, shard="column", pieces=(8, 4), transposed=transposed)
        return load(layer, tensors)(x)

    first, second = (x @ weight.T + bias).split([8, 4], dim=-1)
    for rank, out in enumerate(run_ranks(size, work)):
        mine = first.chunk(size, -1)[rank], second.chunk(size, -1)[rank]
        torch.testing.assert_close(out, torch.cat(mine, -1))


def test_pieces_that_cannot_be_sharded_are_named():
    build = make_build()
    with pytest.raises(ValueError, match=r"m: the parts \[4, 4\] do not add up to 9 outputs"):
        build.linear("m", 6, 9, pieces=(4, 4))
    with pytest.raises(ValueError, match=r"m: a row-sharded layer cannot be put together from parts \[4, 4\]"):
        build.linear("m", 6, 8, shard="row", pieces=(4, 4))
    with pytest.raises(ValueError, match="the outputs of m: 5 cannot be split over 2 ranks"):
        run_ranks(2, lambda group: make_build(group).linear("m", 6, 9, shard="column", pieces=(4, 5)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("invariant", [False, True])
def test_norms_over_the_heads_of_all_ranks(size, invariant):
    """Four query heads and two key heads, which four ranks hold twice, in one sum over ranks."""
    torch.manual_seed(0)
    query, key = torch.randn(5, 4, 3), torch.randn(5, 2, 3)
    tensors = {"q.weight": torch.rand(12), "k.weight": torch.rand(6)}
    sums = []

    def work(group):
        build = make_build(group)
        build.ops.invariant = invariant
        all_reduce = group.all_reduce
        group.all_reduce = lambda tensor: sums.append(tensor.shape) or all_reduce(tensor)
        norms = (HeadsNorm(build, "q", 4, 3, eps=1e-6), HeadsNorm(build, "k", 2, 3, eps=1e-6))
        for norm in norms:
            load(norm, tensors)
        held = max(1, 2 // group.size)
        first = group.rank * 2 // group.size
        mine = query.chunk(group.size, 1)[group.rank], key[:, first : first + held]
        together = normed_heads(norms, *mine)
        alone = [norm(x) for norm, x in zip(norms, mine, strict=True)]
        return together, alone

    def expected(x, weight):
        return (Ops.rms_norm(x.flatten(1), weight, 1e-6)).view(x.shape)

    wanted = expected(query, tensors["q.weight"]), expected(key, tensors["k.weight"])
    for rank, ways in enumerate(run_ranks(size, work)):
        first, held = rank * 2 // size, max(1, 2 // size)
        for normed_query, normed_key in ways:
            torch.testing.assert_close(normed_query, wanted[0].chunk(size, 1)[rank])
            torch.testing.assert_close(normed_key, wanted[1][:, first : first + held])
    assert sums.count((2, 5)) == (size if size > 1 else 0)


@pytest.mark.parametrize("names", [("q", "k", "v"), ("qkv",)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_input_by_heads(names, size):
    torch.manual_seed(0)
    query, key, value = torch.randn(4 * 3, 6), torch.randn(2 * 3, 6), torch.randn(2 * 3, 6)
    tensors = {"a.q.weight": query, "a.k.weight": key, "a.v.weight": value}
    if len(names) == 1:
        tensors = {"a.qkv.weight": torch.cat((query, key, value))}
    x = torch.randn(5, 6)

    def work(group):
        return load(make_build(group).attention_input("a", 6, 4, 2, 3, names=names), tensors)(x)

    parts = run_ranks(size, work)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], dim=1), (x @ query.T).view(5, 4, 3))
    keys = (x @ key.T).view(5, 2, 3)
    for rank, (_, k, v) in enumerate(parts):
        # with four ranks, each of the two key/value heads is held twice
        mine = slice(rank * 2 // size, rank * 2 // size + max(1, 2 // size))
        torch.testing.assert_close(k, keys[:, mine])
        assert v.shape == k.shape


#: (query heads, key/value heads, groups, order): a tensor of queries, keys and values in other ways.
JOINED = [(8, 8, 8, "qkv"), (8, 2, 2, "qkv"), (8, 4, 4, "qkv"), (8, 8, 4, "qvk"), (8, 4, 2, "kqv"), (8, 1, 1, "qkv")]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "groups", "order"), JOINED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_input_from_a_tensor_of_groups(num_heads, num_kv_heads, groups, order, transposed, size):
    torch.manual_seed(0)
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    apart = {kind: torch.randn(count, 3, 7) for kind, count in counts.items()}  # the last column is the bias
    split = {kind: part.view(groups, -1, 3, 7) for kind, part in apart.items()}
    joined = torch.cat([split[kind][group].flatten(0, 1) for group in range(groups) for kind in order])
    weight = joined[:, :6].T.contiguous() if transposed else joined[:, :6].contiguous()
    tensors, x = {"a.qkv.weight": weight, "a.qkv.bias": joined[:, 6].contiguous()}, torch.randn(5, 6)

    def work(group):
        layout = {"names": ("qkv",), "bias": True, "groups": groups, "order": order, "transposed": transposed}
        return load(make_build(group).attention_input("a", 6, num_heads, num_kv_heads, 3, **layout), tensors)(x)

    for rank, found in enumerate(run_ranks(size, work)):
        for kind, part in zip("qkv", found, strict=True):
            count = max(1, counts[kind] // size)
            mine = apart[kind][rank * counts[kind] // size :][:count]
            torch.testing.assert_close(part, torch.einsum("ti,hdi->thd", x, mine[..., :6]) + mine[..., 6])


@pytest.mark.parametrize(
    ("layout", "said"),
    [({"groups": 3}, "4 heads do not divide into 3 groups"), ({"order": "qq"}, "order 'qq' must have each of q, k, v")],
)
def test_a_layout_that_cannot_be_is_refused(layout, said):
    with pytest.raises(ValueError, match=said):
        make_build().attention_input("a", 6, 4, 2, 3, names=("qkv",), **layout)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_that_does_not_divide(size, tied):
    torch.manual_seed(0)
    tensors = {"e.weight": torch.randn(10, 6), "h.weight": torch.randn(10, 6)}
    ids, hidden = torch.tensor([0, 9, 3, 5, 7], dtype=torch.int32), torch.randn(2, 6)

    def work(group):
        build = make_build(group)
        embedding = load(build.embedding("e", 10, 6), tensors)
        head = build.head("h", 6, 10, tied=embedding if tied else None)
        if not tied:
            load(head.table, tensors)
        return embedding(ids), head(hidden)

    for rows, logits in run_ranks(size, work):
        assert torch.equal(rows, tensors["e.weight"][ids.long()])
        torch.testing.assert_close(logits, hidden @ tensors["e.weight" if tied else "h.weight"].T)


def test_experts_from_either_form_of_checkpoint():
    torch.manual_seed(0)
    gate, up, down = torch.randn(4, 8, 6), torch.randn(4, 8, 6), torch.randn(4, 6, 8)
    apart = {
        f"x.{expert}.{name}.weight": tensor[expert]
        for expert in range(4)
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    }
    fused = {"x.gate_up_proj": torch.cat((gate, up), dim=1), "x.down_proj": down}
    hidden, router = torch.randn(5, 6), torch.randn(5, 4)

    def work(group, tensors):
        experts = make_build(group).experts("x", ExpertSpec(4, 6, 8, 2))
        for slot in experts.weight_slots():
            if slot.name in tensors and slot.has_shape(tensors[slot.name].shape):
                slot.write(tensors[slot.name][slot.index])
        return experts(hidden, Routing(*Ops.route(router, RouterSpec(4, 2))))

    expected = run_ranks(1, lambda group: work(group, apart))[0]
    for tensors in (apart, fused):
        for size in (1, 2):
            for out in run_ranks(size, lambda group, tensors=tensors: work(group, tensors)):
                torch.testing.assert_close(out, expected)


def test_what_cannot_be_split_is_named():
    def work(group):
        make_build(group).linear("m", 4, 6, shard="column")

    with pytest.raises(ValueError, match="the outputs of m: 6 cannot be split over 4 ranks"):
        run_ranks(4, work)


@pytest.mark.parametrize("overlap_bytes", [0, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_the_norm_completes_a_sum(overlap_bytes, bias):
    """Rows of 24 bytes: with 64 bytes a part, a sum of 9 rows is begun in three parts."""
    torch.manual_seed(0)
    down, gain, residual, x = torch.randn(6, 8), torch.rand(6), torch.randn(9, 6), torch.randn(9, 8)
    tensors = {"down.weight": down, "down.bias": torch.randn(6), "norm.weight": gain}
    begun = []

    def work(group):
        group.overlap_bytes = overlap_bytes if group.size > 1 else 0
        build = make_build(group)
        linear = load(build.linear("down", 8, 6, bias=bias, shard="row", reduce=False), tensors)
        norm = load(build.norm("norm", 6, eps=1e-6, partial=True), tensors)
        mine = x.chunk(group.size, -1)[group.rank].contiguous()
        if overlap_bytes and group.size > 1:
            begun.append(len(group.parts_of(9, 24)))
        return norm(linear(mine), residual.clone())

    total = x @ down.T + residual + (tensors["down.bias"] if bias else 0)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * gain
    for size in (1, 2):
        for normed, found in run_ranks(size, work):
            torch.testing.assert_close(found, total)
            torch.testing.assert_close(normed, expected)
    assert begun == ([3, 3] if overlap_bytes else [])
