"""Norms, activations and rotary embedding against their references: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import Ops, attention, layers
from frame.kernels import (
    activation as activation_kernels,
    latent_rotary as latent_rotary_kernels,
    linear as linear_kernels,
    merge as merge_kernels,
    norm as norm_kernels,
    norm_linear as norm_linear_kernels,
    rotary as rotary_kernels,
)

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: (5e-6, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 1.6e-2)}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = CLOSE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 100, 1024, 4096])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, dim: int, offset: float) -> None:
    x, residual, weight = random(5, dim, dtype=dtype), random(5, dim, dtype=dtype), random(dim, dtype=dtype)
    close(norm_kernels.rms_norm(x, weight, 1e-6, offset), layers.rms_norm(x, weight, 1e-6, offset))
    found = norm_kernels.add_rms_norm(x, residual, weight, 1e-6, offset)
    expected = layers.add_rms_norm(x, residual, weight, 1e-6, offset)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_heads(dtype: torch.dtype) -> None:
    fused = random(7, 6 * 64, dtype=dtype)
    heads = fused[:, 64 : 64 + 4 * 64].unflatten(1, (4, 64))
    weight = random(64, dtype=dtype)
    close(norm_kernels.rms_norm(heads, weight, 1e-5), layers.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 1500, 3072])
def test_gated_activations(dtype: torch.dtype, size: int) -> None:
    x = random(3, 2 * size, dtype=dtype) * 4
    close(activation_kernels.silu_mul(x), layers.silu_mul(x.clone()))
    close(activation_kernels.gelu_tanh_mul(x), layers.gelu_tanh_mul(x.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (80, 32), (128, 128)])
def test_rotary(dtype: torch.dtype, interleaved: bool, dim: int, turned: int) -> None:
    fused = random(9, 8 * dim, dtype=dtype).unflatten(1, (8, dim))
    query, key = fused[:, :5], fused[:, 5:7]
    angles = torch.rand(50, turned // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = torch.randint(0, 50, (9,)).to(DEVICE)
    found = rotary_kernels.rotary(query, key, positions, table, interleaved)
    expected = layers.rotary(query, key, positions, table, interleaved)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turned", "apart"), [(64, 64, True), (80, 24, True), (32, 32, False)])
def test_rotary_on_three_axes(normed: bool, interleaved: bool, dim: int, turned: int, apart: bool) -> None:
    """Rows of positions lie apart, or are one that is read three times, as in text."""
    fused = random(9, 8 * dim, dtype=torch.float32).unflatten(1, (8, dim))
    query, key, weights = (
        fused[:, :5],
        fused[:, 5:7],
        (random(dim, dtype=torch.float32), random(dim, dtype=torch.float32)),
    )
    angles = torch.rand(50, turned // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    whole = torch.randint(0, 50, (3, 11)).to(DEVICE)
    rows = whole[:, :9] if apart else whole[:1, :9].expand(3, -1)
    positions = rows, torch.randint(0, 3, (turned // 2,), dtype=torch.int32).to(DEVICE)
    if normed:
        found = rotary_kernels.norm_rotary(query, key, weights, 1e-6, 1.0, positions, table, interleaved)
        expected = layers.norm_rotary(query, key, weights, 1e-6, 1.0, positions, table, interleaved)
    else:
        found = rotary_kernels.rotary(query, key, positions, table, interleaved)
        expected = layers.rotary(query, key, positions, table, interleaved)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "turned", "offset", "scale"),
    [(9, 5, 32, 0.0, 1.0), (3, 20, 24, 1.0, 0.37), (1, 1, 16, 0.0, 1.0)],
)
def test_latent_and_turned_parts_in_one_pass(
    dtype: torch.dtype, interleaved: bool, tokens: int, heads: int, turned: int, offset: float, scale: float
) -> None:
    """Latents of 40 numbers and 32 more behind others; each row's queries lie among those of another product."""
    fused = random(tokens, 90 + 40 + 32, dtype=dtype)
    query = random(tokens, (heads + 1) * 56, dtype=dtype)[:, : heads * 56].unflatten(1, (heads, 56))
    angles = torch.rand(50, turned // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    given = (
        (random(40, dtype=dtype), 1e-6, offset),
        torch.randint(0, 50, (tokens,)).to(DEVICE),
        table,
        interleaved,
        scale,
    )
    expected_query = query.clone()
    expected = Ops().latent_rotary(expected_query, fused[:, 90:], *given)
    close(latent_rotary_kernels.latent_rotary(query, fused[:, 90:], *given), expected)
    close(query, expected_query)
    assert torch.equal(query[..., :24], expected_query[..., :24])


@pytest.mark.parametrize("apart", [False, True])
def test_latent_turned_on_three_axes(apart: bool) -> None:
    query, latent = random(9, 5, 48, dtype=torch.float32), random(9, 40 + 32, dtype=torch.float32)
    table = random(50, 32, dtype=torch.float32)
    whole = torch.randint(0, 50, (3, 11)).to(DEVICE)
    rows = whole[:, :9] if apart else whole[:1, :9].expand(3, -1)
    positions = rows, torch.randint(0, 3, (16,), dtype=torch.int32).to(DEVICE)
    given = latent, (random(40, dtype=torch.float32), 1e-6, 0.0), positions, table
    expected_query = query.clone()
    expected = Ops().latent_rotary(expected_query, *given)
    close(latent_rotary_kernels.latent_rotary(query, *given), expected)
    close(query, expected_query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_the_number_of_tokens_changes_no_bits_of_turned_heads(
    dtype: torch.dtype, interleaved: bool, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of many tokens takes more heads."""
    fused = random(9, 22 * 80, dtype=dtype).unflatten(1, (22, 80))
    query, key, weights = fused[:, :19], fused[:, 19:21], (random(80, dtype=dtype), random(80, dtype=dtype))
    angles = torch.rand(50, 32) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    norm = (weights, 1e-6, 0.0) if normed else ()
    turn = rotary_kernels.norm_rotary if normed else rotary_kernels.rotary
    given = query, key, *norm, torch.randint(0, 50, (9,)).to(DEVICE), table, interleaved
    few = turn(*given)
    monkeypatch.setattr(rotary_kernels, "MANY_TOKENS", 9)
    assert all(torch.equal(one, other) for one, other in zip(few, turn(*given), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("tokens", "dim", "turned", "many"), [(9, 64, 64, 512), (3, 80, 32, 512), (9, 8, 8, 9)])
def test_norm_and_rotary_in_one_pass(
    dtype: torch.dtype, offset: float, tokens: int, dim: int, turned: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary_kernels, "MANY_TOKENS", many)
    fused = random(tokens, 8 * dim, dtype=dtype).unflatten(1, (8, dim))
    query, key = fused[:, :5], fused[:, 5:7]
    weights = random(dim, dtype=dtype), random(dim, dtype=dtype)
    angles = torch.rand(50, turned // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = torch.randint(0, 50, (tokens,)).to(DEVICE)
    found = rotary_kernels.norm_rotary(query, key, weights, 1e-6, offset, positions, table)
    expected = layers.norm_rotary(query, key, weights, 1e-6, offset, positions, table)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "inputs"), [(1, 8), (10, 100), (9, 2100)])
def test_gated_product_of_one_row(dtype: torch.dtype, size: int, inputs: int, biased: bool) -> None:
    x, weight = random(1, inputs, dtype=dtype), random(2 * size, inputs, dtype=dtype) / inputs**0.5
    bias = random(2 * size, dtype=dtype) if biased else None
    found = linear_kernels.linear_silu_mul(x, weight, bias)
    exact = Ops().linear_silu_mul(x.double(), weight.double(), None if bias is None else bias.double())
    close(found, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (21, 100), (9, 2100), (5, 5000)])
def test_norm_and_product_of_one_row(
    dtype: torch.dtype, outputs: int, inputs: int, offset: float, biased: bool
) -> None:
    given = random(1, inputs, dtype=dtype), random(1, inputs, dtype=dtype), (random(inputs, dtype=dtype), 1e-6, offset)
    weight = random(2 * outputs, inputs, dtype=dtype) / inputs**0.5
    bias = random(2 * outputs, dtype=dtype) if biased else None
    found, normed, total = norm_linear_kernels.norm_linear(*given, weight, bias)
    gated, other_total = norm_linear_kernels.norm_linear_silu_mul(*given, weight, bias)
    expected, expected_total = layers.add_rms_norm(*given[:2], *given[2])
    assert torch.equal(total, expected_total)
    assert torch.equal(other_total, expected_total)
    close(normed, expected)
    # of what was found, so that a rounding of the norm counts once
    wide = normed.double(), weight.double(), None if bias is None else bias.double()
    close(found, Ops().linear(*wide).to(dtype))
    close(gated, Ops().linear_silu_mul(*wide).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (20, 100), (17, 2100)])
def test_products_of_one_row(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight, bias = (
        random(1, inputs, dtype=dtype),
        random(outputs, inputs, dtype=dtype),
        random(outputs, dtype=dtype),
    )
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()  # what rounding is relative to, whatever cancels
    for found, expected in (
        (linear_kernels.linear(x, weight), exact),
        (linear_kernels.linear(x, weight, bias), exact + bias.double()),
    ):
        error = (found.double() - expected).norm() / (size.norm() + bias.double().norm())
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "heads", "dim"), [(2, 4, 64), (3, 5, 80), (8, 1, 128), (1, 3, 16)])
def test_merged_parts(dtype: torch.dtype, parts: int, heads: int, dim: int) -> None:
    """Parts beside their log-sum-exps, as ranks send them; what is empty is NaN, and one row has no part at all."""
    found, lses = random(parts, 7, heads, dim + 2, dtype=dtype)[..., :dim], random(parts, 7, heads, dtype=torch.float32)
    lses[0, 2], lses[:, 4] = float("-inf"), float("-inf")
    found[lses == float("-inf")] = float("nan")
    out, lse = merge_kernels.merge_parts(found, lses)
    want, want_lse = attention.merge_parts(found, lses)
    close(out, want)
    close(lse, want_lse)
