"""Ranks that share contexts give, each for its own heads, attention over all tokens."""

import pytest
import torch

from frame.core.layers.context import shared_context
from frame.interfaces import AttentionSpec, Mesh, RunningStep
from frame.ops import Ops
from frame.testing.ranks import run_mesh

pytestmark = pytest.mark.product

TOKENS, HEADS, DIM = 7, 8, 16


def attend(query, keys, values, positions):
    """Causal attention to the tokens at `positions` [L] and its log-sum-exp: the definition."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x[positions].repeat_interleave(groups, 1).float() for x in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", query.float(), keys) * 0.25
    scores = scores.masked_fill((positions > torch.arange(TOKENS)[:, None])[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", weights, values), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 4), (4, 4), (4, 8)])
def test_each_rank_gets_its_heads_over_all_tokens(ranks, kv_heads, dtype):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, DIM, generator=draw).to(dtype)
    keys, values = torch.randn(2, TOKENS, kv_heads, DIM, generator=draw).to(dtype)
    sinks = torch.randn(HEADS, generator=draw)
    out, lse = attend(query, keys, values, torch.arange(TOKENS))
    want = out * (1 / (1 + (sinks - lse).exp()))[..., None]

    def work(groups):
        own, held, rank = HEADS // 4, max(1, kv_heads // 4), groups.tensor.rank
        spec = AttentionSpec(own, held, DIM, 0.25, dtype, dtype, 0, "cpu", sinks=True)
        shared = shared_context("a", spec, kv_heads, groups, Ops(), RunningStep())
        first = rank * kv_heads // 4
        mine = slice(own * rank, own * (rank + 1))
        gathered = shared.gather(query[:, mine], keys[:, first : first + held], values[:, first : first + held])
        assert [x.shape[1] for x in gathered] == [shared.spec.num_heads, *[shared.spec.num_kv_heads] * 2]
        part, part_lse = attend(*gathered, torch.arange(TOKENS)[shared.spec.context.rank :: ranks])
        found = shared.merge(part.to(dtype), part_lse, sinks[mine])
        assert found.dtype == dtype
        return found, shared.spec.num_kv_heads

    results = run_mesh(Mesh(tensor=4, decode_context=ranks), work)
    close = 3e-2 if dtype == torch.bfloat16 else 1e-5
    found = torch.cat([part for part, _ in results], 1)
    torch.testing.assert_close(found.float(), want.float(), atol=close, rtol=close)
    assert {heads for _, heads in results} == {max(1, kv_heads * ranks // 4)}
