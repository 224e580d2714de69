"""Ranks that share contexts give, each for its own heads or its own tokens, attention over all tokens."""

from types import SimpleNamespace

import pytest
import torch

from frame.core.interfaces.collectives import UnconnectedGroup
from frame.core.layers.context import own_tokens, shared_context
from frame.interfaces import AttentionSpec, ForwardStep, Groups, Mesh, RunningStep
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_gets_its_tokens_over_all_tokens(ranks, dtype):
    """Seven tokens, of which the last rank has fewer than the others."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, DIM, generator=draw).to(dtype)
    keys, values = torch.randn(2, TOKENS, 2, DIM, generator=draw).to(dtype)
    sinks = torch.randn(HEADS, generator=draw)
    out, lse = attend(query, keys, values, torch.arange(TOKENS))
    want = out * (1 / (1 + (sinks - lse).exp()))[..., None]

    def work(groups):
        group, batch = groups.prefill_context, SimpleNamespace(num_tokens=TOKENS)
        spec = AttentionSpec(HEADS, 2, DIM, 0.25, dtype, dtype, 0, "cpu", sinks=True)
        shared = shared_context("a", spec, 2, groups, Ops(), RunningStep(ForwardStep((), (batch,))))
        assert (shared.spec.num_heads, shared.spec.num_kv_heads) == (HEADS, 2)
        gathered = shared.gather(*(own_tokens(x, group) for x in (query, keys, values)))
        assert all(torch.equal(x, y) for x, y in zip(gathered, (query, keys, values), strict=True))
        part, part_lse = attend(*gathered, torch.arange(TOKENS)[group.rank :: ranks])
        return shared.merge(part.to(dtype), part_lse, sinks)

    found = torch.cat(run_mesh(Mesh(prefill_context=ranks), work))
    assert len(found) == -(-TOKENS // ranks) * ranks
    close = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[:TOKENS].float(), want.float(), atol=close, rtol=close)


def test_an_encoder_s_tokens_are_not_divided():
    spec = AttentionSpec(HEADS, 2, DIM, 0.25, torch.float32, torch.float32, 0, "cpu", kind="encoder_only")
    groups = Groups.of(prefill_context=UnconnectedGroup(0, 2))
    with pytest.raises(ValueError, match="a lets each token see the whole prompt"):
        shared_context("a", spec, 2, groups, Ops(), RunningStep())
