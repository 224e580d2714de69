from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from frame.core.ops.attention import merge_parts, paged_attention, write_kv

pytestmark = pytest.mark.product

SCALE, BLOCK = 0.3, 4


def dense(query, keys, values, *, window=0, soft_cap=0.0, sinks=None, slopes=None):
    """One row in float64, a query and a head at a time: the definition itself."""
    query, keys, values = query.double(), keys.double(), values.double()
    groups, offset = query.shape[1] // keys.shape[1], len(keys) - len(query)
    out = torch.zeros_like(query)
    for i in range(len(query)):
        position = offset + i
        first = max(0, position - window + 1) if window else 0
        for head in range(query.shape[1]):
            k, v = keys[first : position + 1, head // groups], values[first : position + 1, head // groups]
            score = k @ query[i, head] * SCALE
            if soft_cap:
                score = soft_cap * torch.tanh(score / soft_cap)
            if slopes is not None:
                score = score + slopes[head].double() * (torch.arange(first, position + 1) - position)
            weight = score.exp()
            total = weight.sum() + (sinks[head].double().exp() if sinks is not None else 0)
            out[i, head] = (weight / total) @ v
    return out


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("extras", [False, True])
def test_paged_attention_is_its_definition(window: int, soft_cap: float, extras: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = [(0, 1), (9, 1), (0, 6), (7, 3), (0, 0)]
    cache = torch.full((2, 20, BLOCK, 2, 8), float("nan"))
    blocks, given = torch.randperm(20, generator=draw).int(), 0
    table = torch.zeros(len(rows), 4, dtype=torch.int32)
    sinks, slopes = (torch.rand(4, generator=draw) for _ in range(2)) if extras else (None, None)
    queries, wanted = [], []
    for row, (cached, count) in enumerate(rows):
        length = cached + count
        needed = -(-length // BLOCK)
        table[row, :needed] = blocks[given : given + needed]
        given += needed
        query = torch.randn(count, 4, 8, generator=draw)
        keys, values = torch.randn(2, length, 2, 8, generator=draw)
        position = torch.arange(length)
        write_kv(keys, values, cache, table[row].long()[position // BLOCK] * BLOCK + position % BLOCK)
        queries.append(query)
        wanted.append(dense(query, keys, values, window=window, soft_cap=soft_cap, sinks=sinks, slopes=slopes))
    starts = torch.tensor([0] + [count for _, count in rows]).cumsum(0).int()
    lengths = torch.tensor([sum(row) for row in rows], dtype=torch.int32)
    got = paged_attention(
        torch.cat(queries),
        cache,
        starts,
        lengths,
        table,
        scale=SCALE,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=slopes,
    )
    torch.testing.assert_close(got.double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_write_kv_skips_negative_slots_and_casts() -> None:
    cache = torch.zeros(2, 3, BLOCK, 2, 8, dtype=torch.bfloat16)
    key, value = torch.randn(2, 3, 2, 8)
    write_kv(key, value, cache, torch.tensor([5, -1, 11]))
    assert torch.equal(cache[0, 1, 1], key[0].bfloat16())
    assert torch.equal(cache[1, 2, 3], value[2].bfloat16())
    assert int((cache != 0).sum()) == 2 * 2 * 16


def _state(query, keys, values):
    score = torch.einsum("thd,khd->thk", query, keys) * SCALE
    return torch.einsum("thk,khd->thd", score.softmax(-1), values), score.logsumexp(-1)


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 2**31), st.data())
def test_merging_any_split_is_attention_over_all(parts: int, num_keys: int, seed: int, data: st.DataObject) -> None:
    """Parts of any keys, empty ones included, whose outputs are not looked at."""
    draw = torch.Generator().manual_seed(seed)
    query, keys = torch.randn(3, 2, 8, generator=draw) * 4, torch.randn(num_keys, 2, 8, generator=draw) * 4
    values = torch.randn(num_keys, 2, 8, generator=draw)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), min_size=num_keys, max_size=num_keys)))
    split = [_state(query, keys[owner == part], values[owner == part]) for part in range(parts)]
    outs = torch.stack([out.masked_fill((lse == float("-inf"))[..., None], float("nan")) for out, lse in split])
    out, lse = merge_parts(outs, torch.stack([lse for _, lse in split]))
    want, want_lse = _state(query, keys, values)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
