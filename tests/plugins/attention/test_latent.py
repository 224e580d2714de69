"""Latent attention in plain torch equals its formulas, absorbed and expanded, whatever a step is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frame.interfaces import ContextShare, IndexSpec
from frame.plugins.attention import latent
from frame.plugins.attention.latent import TorchLatent, least_expanded
from frame.plugins.attention.latent_index import TorchIndex
from frame.plugins.attention.triton_latent import TritonLatent, pieces_of
from frame.plugins.attention.triton_sparse import TritonIndex, TritonSparse
from frame.testing.latent_case import latent_spec, make_latent_case

MIXED = [(0, 1), (5, 1), (0, 7), (70, 5), (3, 1), (30, 2), (0, 33), (200, 40), (16, 16), (0, 64)]


def check(case, out) -> None:
    expected = case.expected()
    assert (out[: len(expected)] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_absorbed_scores_and_values_are_those_of_expanded_ones() -> None:
    case = make_latent_case(latent_spec(), [(0, 9)])
    layer, query, latents = case.layer, case.queries[0], case.latents[0]
    nope, values = layer.expand(latents)
    keys = torch.cat((nope, latents[:, None, layer.spec.rank :].expand(-1, 4, -1)), -1)
    expanded = torch.einsum("nhd,shd->hns", query, keys)
    absorbed = torch.einsum("nhd,sd->hns", layer.absorb(query), latents)
    assert torch.allclose(expanded, absorbed, atol=1e-4)
    weights = expanded.softmax(-1)
    mixed = torch.einsum("hns,sd->nhd", weights, latents[:, : layer.spec.rank])
    assert torch.allclose(layer.values_of(mixed), torch.einsum("hns,shd->nhd", weights, values), atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("rows", [MIXED, [(0, 1), (90, 1), (3, 1), (31, 1)]], ids=["mixed", "decode"])
def test_any_step_equals_the_reference(rows, block_size) -> None:
    case = make_latent_case(latent_spec(block_size=block_size), rows)
    check(case, case.run(TorchLatent, stale=float("nan")))


@pytest.mark.parametrize("numbers", [1, 16 * 4 * 36, 1 << 22], ids=["1", "16", "all"])
def test_pieces_of_the_context_are_merged(numbers, monkeypatch) -> None:
    """With 4 heads of 36 numbers, one or 16 cached tokens are expanded at once."""
    monkeypatch.setattr(latent, "PIECE_NUMBERS", numbers)
    case = make_latent_case(latent_spec(), [(50, 40), (33, 60)])
    check(case, case.run(TorchLatent))


def test_deterministic_steps_give_equal_bits_in_any_batch() -> None:
    spec = latent_spec(deterministic=True)
    together = make_latent_case(spec, [(40, 40), (7, 1), (0, 5)])
    out = together.run(TorchLatent)
    assert (out - make_latent_case(latent_spec(), [(40, 40), (7, 1), (0, 5)]).expected()).abs().max() < 1e-4
    alone = make_latent_case(spec, [(79, 1), (7, 1), (0, 5)])
    assert torch.equal(alone.run(TorchLatent)[0], out[39])


def test_padding_stores_nothing_and_is_finite() -> None:
    case = make_latent_case(latent_spec(), [(5, 1), (0, 7)])
    out = case.run(TorchLatent, padding_tokens=4, padding_rows=2)
    check(case, out)
    assert torch.isfinite(out).all()


EIGHTS = {"kv_dtype": torch.float8_e4m3fn}


@pytest.mark.parametrize("numbers", [16 * 4 * 36, 1 << 22], ids=["16", "all"])
@pytest.mark.parametrize("top_k", [0, 12])
def test_latents_whose_first_part_is_kept_in_8_bits(numbers, top_k, monkeypatch) -> None:
    """The reference reads the same bytes; a value beyond the range is kept as the largest."""
    monkeypatch.setattr(latent, "PIECE_NUMBERS", numbers)
    case = make_latent_case(latent_spec(top_k=top_k, **EIGHTS), MIXED)
    check(case, case.run(TorchLatent, padding_tokens=3, padding_rows=2))
    for dtype in (torch.float32, torch.bfloat16):
        spec = latent_spec(dtype=dtype, **EIGHTS)
        latents = torch.randn(5, spec.width, generator=torch.Generator().manual_seed(0)).to(dtype)
        latents[0, 0], latents[1, 31] = 1e4, -460
        cached = latent.packed(latents, spec)
        assert (cached.dtype, cached.shape[1]) == (torch.uint8, 32 + 8 * dtype.itemsize)
        found = latent.unpacked(cached, spec)
        assert torch.equal(found[:, 32:], latents[:, 32:])
        assert (found[0, 0], found[1, 31]) == (448, -448)
        inside = latents[:, :32].abs() < 448
        assert torch.allclose(found[:, :32][inside].float(), latents[:, :32][inside].float(), rtol=2**-4, atol=2**-10)


def test_a_token_is_the_same_however_its_prompt_is_cut() -> None:
    """Also what a prompt attends to of itself has been in 8 bits."""
    spec = latent_spec(**EIGHTS)
    whole, cut = make_latent_case(spec, [(0, 90)]), make_latent_case(spec, [(50, 40)])
    assert torch.allclose(whole.run(TorchLatent)[50:], cut.run(TorchLatent), atol=1e-5)


@pytest.mark.parametrize("top_k", [4, 32, 300])
def test_sparse_attention_reads_the_chosen_tokens(top_k) -> None:
    """Rows of no more than `top_k` tokens are dense."""
    case = make_latent_case(latent_spec(top_k=top_k), [(0, 3), (40, 20), (31, 1), (100, 1)])
    check(case, case.run(TorchLatent))
    dense = make_latent_case(latent_spec(), [(0, 3), (40, 20), (31, 1), (100, 1)])
    same = (case.expected() - dense.expected()).abs().amax((1, 2)) < 1e-5
    assert bool(same[:3].all())
    assert bool(same[-1]) == (top_k > 100)


def test_long_rows_are_expanded_where_that_saves_products() -> None:
    assert least_expanded(latent_spec(rank=512, nope_dim=128, value_dim=128)) == 171
    assert least_expanded(latent_spec(rank=16, nope_dim=16, value_dim=16)) == 2


def test_pieces_hold_all_rows_together() -> None:
    assert pieces_of(np.array([5, 0, 3, 9]), 6) == [
        [(0, 0, 5), (2, 0, 1)],
        [(2, 1, 3), (3, 0, 4)],
        [(3, 4, 9)],
    ]


def test_what_is_refused_is_named() -> None:
    assert TorchLatent.supports(latent_spec()) is None
    other = TorchLatent.supports(latent_spec(kv_dtype=torch.float8_e5m2))
    assert other == (
        "KV-cache dtype float8_e5m2 not supported by latent attention, which caches float32 or float8_e4m3fn "
        "(set kv_cache_dtype to auto)"
    )
    assert "30 numbers of 8 bits before numbers of float32" in str(TorchLatent.supports(latent_spec(rank=30, **EIGHTS)))
    index = IndexSpec(8, 16, 12, 0.25, torch.float32, torch.float8_e4m3fn, 16, "cpu")
    assert "float8_e4m3fn not supported by the index of sparse attention, which caches float32 (" in str(
        TorchIndex.supports(index)
    )
    assert "share of the context" in str(TorchLatent.supports(latent_spec(context=ContextShare(2, 0))))
    reasons = str(TritonLatent.supports(latent_spec(top_k=4, deterministic=True, rank=1024)))
    for what in ("sparse attention", "deterministic steps", "latents of 1024 numbers", "device 'cpu'"):
        assert what in reasons
    reasons = str(TritonSparse.supports(latent_spec(deterministic=True, rank=1024)))
    for what in ("attention to all tokens", "deterministic steps", "latents of 1024 numbers", "device 'cpu'"):
        assert what in reasons
    index = IndexSpec(200, 300, 0, 1.0, torch.float64, torch.float32, 16, "cpu", deterministic=True)
    assert str(TritonIndex.supports(index)).split("; ") == [
        "0 chosen tokens not supported",
        "dtype float64 not supported (there are: float32, bfloat16, float16)",
        "KV-cache dtype float32 not supported by the index of sparse attention, which caches float64 "
        "(set kv_cache_dtype to auto)",
        "200 heads not supported (at most 128)",
        "keys of 300 numbers not supported (at most 256)",
        "device 'cpu' not supported (there are: cuda)",
    ]
