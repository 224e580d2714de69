"""Sparse latent attention and its index by Triton against the references: on a GPU, and under the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from frame.interfaces import BackendSetup, IndexSpec
from frame.kernels import latent_decode, latent_index
from frame.kernels.latent_index import choose_best
from frame.kernels.latent_sparse import token_rows
from frame.ops import Ops
from frame.plugins.attention import triton_sparse
from frame.plugins.attention.latent_index import TorchIndex
from frame.plugins.attention.triton_sparse import TritonIndex, TritonSparse
from frame.testing.latent_case import LatentCase, latent_spec, make_latent_case
from frame.testing.latent_suite import _chosen

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
#: By type, of the largest number: the reference multiplies in float32.
CLOSE = {torch.float32: 1e-4 if INTERPRETED else 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MIXED = [(0, 1), (5, 1), (0, 7), (20, 5), (3, 1), (0, 33), (63, 2), (64, 1), (200, 3)]
DECODES = [(0, 1), (90, 1), (3, 1), (63, 1), (64, 1)]
#: DeepSeek V3.2 on one rank and on eight; GLM-5.
LAYERS: dict[str, dict[str, Any]] = {
    "128 heads": {"num_heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512},
    "16 heads": {"num_heads": 16, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512},
    "64 heads": {"num_heads": 64, "nope_dim": 192, "rope_dim": 64, "value_dim": 256, "rank": 512},
}


def check(case: LatentCase, **how: Any) -> None:
    expected, out = case.expected().float(), case.run(TritonSparse, **how).float()
    assert torch.isfinite(out).all()
    gap = (out[: len(expected)] - expected).abs().max() / expected.abs().max()
    assert gap < CLOSE[case.layer.spec.dtype], f"{gap:.2g} of the largest"


def small(**changes: Any) -> Any:
    return latent_spec(device_type=DEVICE, **{"top_k": 20, **changes})


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "top_k", [pytest.param(1, marks=pytest.mark.slow), 20, 64, pytest.param(300, marks=pytest.mark.slow)]
)
def test_any_step_equals_the_reference(rows: list, top_k: int) -> None:
    """Rows of no more tokens than are chosen are dense; what was not stored is not read."""
    check(make_latent_case(small(block_size=3, top_k=top_k), rows), stale=float("nan"))


def test_half_precision() -> None:
    check(make_latent_case(small(dtype=HALF), MIXED), stale=7.0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "16" in name else pytest.mark.slow) for name in LAYERS]
)
def test_layers_of_models(name: str) -> None:
    check(make_latent_case(small(dtype=HALF, top_k=64, **LAYERS[name]), [(40, 1), (100, 2)]))


def test_parts_of_lists_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short lists have fewer parts than the launch, and none of a token that sees nothing."""
    given = latent_decode.launch_for
    monkeypatch.setattr(latent_decode, "launch_for", lambda heads, dtype, _=1: given(heads, dtype, 8))
    check(make_latent_case(small(top_k=100), [(0, 1), (300, 1), (15, 1), (129, 2)]), padding_rows=2)


def test_lists_with_gaps() -> None:
    """-1 anywhere, and in whole tiles."""
    case = make_latent_case(small(top_k=40), [(99, 2), (50, 1)])
    for chosen in case.chosen:
        chosen[:, :33] = -1
        chosen[:, 35::2] = -1
    check(case)


def test_a_step_is_attended_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sparse, "WORKSPACE_BYTES", 1)
    check(make_latent_case(small(), [(5, 1), (90, 40), (7, 5)]))


def test_padding_stores_nothing_and_sees_nothing() -> None:
    check(make_latent_case(small(), DECODES), padding_rows=3)
    check(make_latent_case(small(), [(5, 1), (90, 4)]), padding_rows=2, padding_tokens=5)
    check(make_latent_case(small(), DECODES), captured=True, bound=400)


def test_the_rows_of_tokens() -> None:
    starts = torch.tensor([0, 1, 1, 201, 203, 203], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([9, 5, 250, 0, 0], dtype=torch.int32, device=DEVICE)
    rows, seen = token_rows(starts, lengths, 210)
    assert rows[:203].tolist() == [0] + [2] * 200 + [3] * 2
    assert seen.tolist() == [9, *range(51, 251), *([0] * 9)]


def index_spec(**changes: Any) -> IndexSpec:
    sizes = {"num_heads": 8, "head_dim": 16, "top_k": 12, "scale": 0.25, "dtype": torch.float32, "block_size": 16}
    given = {**sizes, **changes}
    return IndexSpec(kv_dtype=given["dtype"], device_type=DEVICE, **given)


@pytest.mark.parametrize("rows", [[(0, 1), (0, 14), (11, 2), (18, 5)], [(3, 1), (63, 1)]], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"block_size": 3}, {"top_k": 64}, {"num_heads": 5, "head_dim": 24}, {"dtype": HALF})
        ),
    ],
    ids=["usual", "short blocks", "64 chosen", "5 heads", "half"],
)
def test_the_index_chooses_what_the_reference_chooses(rows: list, changes: dict) -> None:
    """As sets."""
    spec = index_spec(**changes)
    mine, theirs = (_chosen(kind(BackendSetup(spec, Ops())), spec, rows, 3) for kind in (TritonIndex, TorchIndex))
    token = 0
    for cached, count in rows:
        for seen in range(cached + 1, cached + count + 1):
            found = mine[token].tolist()
            if seen <= spec.top_k:
                assert found == [*range(seen), *([-1] * (spec.top_k - seen))]
            else:
                assert found == sorted(set(found))
                assert set(found) == set(theirs[token].tolist())
            token += 1
    assert (mine[token:] == -1).all()


@pytest.mark.slow
def test_the_index_of_deepseek() -> None:
    """64 heads of 128 numbers, in parts of a row."""
    spec = index_spec(num_heads=64, head_dim=128, top_k=2048, scale=128**-0.5, dtype=HALF, block_size=64)
    rows = [(2047, 1), (2048, 1)]
    mine, theirs = (_chosen(kind(BackendSetup(spec, Ops())), spec, rows, 0) for kind in (TritonIndex, TorchIndex))
    assert mine[0].tolist() == list(range(2048))
    assert len(set(mine[1].tolist()) - set(theirs[1].tolist())) <= 1  # sums in another order may swap neighbours


def test_the_index_scores_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = index_spec()
    rows = [(3, 1), (10, 20)]
    whole = _chosen(TritonIndex(BackendSetup(spec, Ops())), spec, rows, 3)
    monkeypatch.setattr(triton_sparse, "WORKSPACE_BYTES", 1)
    assert torch.equal(_chosen(TritonIndex(BackendSetup(spec, Ops())), spec, rows, 3), whole)


def test_deterministic_choices_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the parts that a row is scored in: the same bits."""
    spec = index_spec(deterministic=True)
    backend = TritonIndex(BackendSetup(spec, Ops()))
    alone = _chosen(backend, spec, [(39, 1), (1, 1)], 0)
    monkeypatch.setattr(latent_index, "_MIN_PART", 8)
    backend._multiprocessors = 132
    assert torch.equal(_chosen(backend, spec, [(39, 1), (1, 1)], 0), alone)
    assert torch.equal(_chosen(backend, spec, [(30, 10), (0, 2)], 0)[9], alone[0])


@pytest.mark.parametrize("length", [65, 4097])
def test_the_best_of_any_scores(length: int) -> None:
    """Ties, both zeros, infinities, and numbers whose bits differ in the last byte alone."""
    drawn = torch.Generator().manual_seed(length)
    scores = torch.randn(5, length, generator=drawn)
    scores[1] = scores[1].round()
    scores[2] = torch.where(torch.rand(length, generator=drawn) < 0.5, 0.0, -0.0)
    scores[3] = (torch.randint(0, 256, (length,), generator=drawn) + 0x3F800000).to(torch.int32).view(torch.float32)
    scores[4, ::3] = float("-inf")
    scores[4, 5] = float("inf")
    seen = torch.tensor([length, length, length, length, length - 1], dtype=torch.int32)
    chosen = torch.full((5, 64), -7, dtype=torch.int32, device=DEVICE)
    choose_best(scores.to(DEVICE), seen.to(DEVICE), chosen)
    for row in range(5):
        end = int(seen[row])
        order = (scores[row, :end] + 0.0).sort(descending=True, stable=True).indices[:64]
        assert chosen[row].tolist() == sorted(order.tolist()), row


@pytest.mark.skipif(INTERPRETED, reason="nothing is recorded under the interpreter")
def test_a_recorded_step_serves_other_rows() -> None:
    """The index and attention of one step, for rows shorter and longer than a list."""
    spec = index_spec(dtype=HALF, head_dim=128, num_heads=64, top_k=256, scale=0.1)
    layer = small(dtype=HALF, top_k=256, **LAYERS["16 heads"])
    case = make_latent_case(layer, [(899, 1), (300, 1), (31, 1)])
    index, attention = (kind(BackendSetup(one, Ops())) for kind, one in ((TritonIndex, spec), (TritonSparse, layer)))
    batch = case.paging.batch([(899, 900), (300, 301), (31, 32)], captured=True, bound=0)
    tokens, blocks = batch.num_tokens, case.paging.num_blocks
    keys, latents = (torch.randn(blocks, 16, width, device=DEVICE, dtype=HALF) for width in (128, layer.width))
    small_query, key = torch.randn(tokens, 64, 128, device=DEVICE, dtype=HALF), torch.randn(tokens, 128, device=DEVICE)
    weights, query = torch.randn(tokens, 64, device=DEVICE), torch.randn(tokens, 16, 192, device=DEVICE, dtype=HALF)
    latent = torch.randn(tokens, layer.width, device=DEVICE, dtype=HALF)

    def step() -> torch.Tensor:
        chosen = index.forward(spec, small_query, weights.to(HALF), key.to(HALF), keys, index.plan(batch))
        return attention.forward(case.layer, query, latent, latents, attention.plan(batch), chosen)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    batch.seq_lens.copy_(torch.tensor([257, 17, 256], dtype=torch.int32)[: len(batch.seq_lens)])
    graph.replay()
    assert torch.equal(out, step())
