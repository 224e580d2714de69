"""Norms, rotary embedding, activations and experts against float64 and against the transformers library."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from frame.core.ops import Ops
from frame.interfaces import RouterSpec
from frame.layers.rotary import frequency_axes

pytestmark = pytest.mark.product

HALVES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


#: Library → (its rotary embedding, frequencies of each axis, whether they are mixed, whether neighbours are pairs).
AXES = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", [2, 3, 3], False, False),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", [2, 3, 3], False, False),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", [3, 3, 2], True, False),
    "qwen3_5": ("Qwen3_5TextRotaryEmbedding", [4, 2, 2], True, False),
    "glm4v": ("Glm4vTextRotaryEmbedding", [1, 2, 5], False, True),
    "glm4v_moe": ("Glm4vMoeTextRotaryEmbedding", [8, 0, 0], False, False),
}


def _exact_rms(x, weight, offset=0.0):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("library", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_rms_norm_has_the_librarys_bits(dtype: torch.dtype, library: type, offset: float) -> None:
    x, weight = torch.randn(7, 96).mul(3).to(dtype), torch.randn(96).to(dtype)
    module = library(96, eps=EPS).to(dtype)
    module.weight.data.copy_(weight)
    got = Ops.rms_norm(x, weight, EPS, offset)
    assert torch.equal(got, module(x))
    torch.testing.assert_close(got.double(), _exact_rms(x, weight, offset), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_add_rms_norm_returns_the_sum_as_the_next_residual() -> None:
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    normed, total = Ops.add_rms_norm(x, residual, weight, EPS, 0.0)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, Ops.rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_against_float64(bias: bool) -> None:
    x, weight, shift = torch.randn(6, 48) * 4 + 1, torch.randn(48), torch.randn(48) if bias else None
    exact = (x.double() - x.double().mean(-1, keepdim=True)) / (
        x.double().var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    exact = exact * weight.double() + (shift.double() if bias else 0)
    torch.testing.assert_close(Ops.layer_norm(x, weight, shift, 1e-5).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_rotary_has_the_librarys_bits(dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    positions = torch.tensor([0, 3, 3, 17, 63])
    query, key = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    want = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    angles = torch.arange(64)[:, None].float() * (1 / 10000 ** (torch.arange(0, 16, 2).float() / 16))
    got = Ops.rotary(query, key, positions, torch.cat((angles.cos(), angles.sin()), dim=-1))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", AXES)
def test_rotary_on_three_axes_has_the_librarys_bits(family: str, dtype: torch.dtype) -> None:
    library = import_module(f"transformers.models.{family}.modeling_{family}")
    name, sections, mixed, interleaved = AXES[family]
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = SimpleNamespace(
        max_position_embeddings=64, rope_parameters=parameters, head_dim=16, hidden_size=64, num_attention_heads=4
    )
    positions = torch.tensor([[0, 3, 3, 17, 63], [0, 5, 60, 17, 9], [0, 40, 4, 18, 2]])
    query, key = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    cos, sin = getattr(library, name)(config)(query, positions[:, None])
    want = library.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    angles = torch.arange(64)[:, None].float() * (1 / 10000 ** (torch.arange(0, 16, 2).float() / 16))
    table, axes = torch.cat((angles.cos(), angles.sin()), dim=-1), frequency_axes(sections, 8, mixed=mixed)
    got = Ops.rotary(query, key, (positions, axes), table, interleaved)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))
    equal = positions[:1].expand(3, -1)
    for one, other in zip(
        Ops.rotary(query, key, (equal, axes), table, interleaved),
        Ops.rotary(query, key, positions[0], table, interleaved),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 12])
def test_rotary_turns_pairs_in_the_plane(interleaved: bool, rotary_dim: int) -> None:
    """In float64: pair i, seen as a complex number, is multiplied by e^(i·angle); the rest of the head stays."""
    half, dim = rotary_dim // 2, 12
    positions, angles = torch.tensor([5, 0, 9]), torch.rand(10, half).double() * 6
    query, key = torch.randn(3, 4, dim), torch.randn(3, 2, dim)
    got = Ops.rotary(query, key, positions, torch.cat((angles.cos(), angles.sin()), -1).float(), interleaved)
    for x, turned in zip((query, key), got, strict=True):
        first, second = (
            (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
            if interleaved
            else (slice(half), slice(half, rotary_dim))
        )
        pairs = torch.complex(x[..., first].double(), x[..., second].double())
        pairs = pairs * torch.polar(torch.ones(3, 1, half).double(), angles[positions][:, None])
        torch.testing.assert_close(turned[..., first].double(), pairs.real, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(turned[..., second].double(), pairs.imag, rtol=1e-5, atol=1e-6)
        assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("op", "library"), [("silu_mul", "silu"), ("gelu_tanh_mul", "gelu_pytorch_tanh")])
def test_gated_activations_are_the_librarys(dtype: torch.dtype, op: str, library: str) -> None:
    gate, up = torch.randn(2, 9, 40).mul(4).to(dtype)
    # Not bit for bit: the vectorised loop and its remainder round differently, and the two halves split elsewhere.
    got = getattr(Ops, op)(torch.cat((gate, up), -1))
    torch.testing.assert_close(got, ACT2FN[library](gate) * up, rtol=3 * torch.finfo(dtype).eps, atol=1e-5)


def test_gelu_tanh_is_gpt2s() -> None:
    gate, up = torch.randn(9, 40), torch.ones(9, 40)
    torch.testing.assert_close(Ops.gelu_tanh_mul(torch.cat((gate, up), -1)), ACT2FN["gelu_new"](gate))


@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_are_a_weighted_sum_of_gated_products(renormalize: bool) -> None:
    hidden, gate_up, down = torch.randn(6, 8), torch.randn(4, 10, 8), torch.randn(4, 8, 5)
    logits = torch.randn(6, 4)
    weights, ids = Ops.route(logits, RouterSpec(4, 2, renormalize=renormalize))
    assert ids.dtype == torch.int32
    want = torch.zeros(6, 8).double()
    for token in range(6):
        probability = logits[token].double().softmax(-1)
        best = probability.argsort(descending=True)[:2]
        total = probability[best].sum() if renormalize else 1.0
        for expert in best.tolist():
            gate, up = (gate_up[expert].double() @ hidden[token].double()).chunk(2)
            value = down[expert].double() @ (gate * gate.sigmoid() * up)
            want[token] += probability[expert] / total * value
    got = Ops.fused_experts(hidden, gate_up, down, weights, ids)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_experts_of_another_rank_add_nothing() -> None:
    hidden, gate_up, down = torch.randn(3, 8), torch.randn(2, 10, 8), torch.randn(2, 8, 5)
    weights, ids = torch.ones(3, 1), torch.tensor([[0], [-1], [2]], dtype=torch.int32)
    got = Ops.fused_experts(hidden, gate_up, down, weights, ids)
    assert (got[1:] == 0).all()
    assert (got[0] != 0).any()
    assert torch.equal(Ops.fused_experts(hidden, gate_up, down, weights, ids + 5, first=5), got)


@pytest.mark.parametrize("interleaved", [False, True])
def test_latents_and_queries_have_the_bits_of_their_steps(interleaved: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    query, latent = torch.randn(5, 3, 28, generator=draw), torch.randn(5, 40, generator=draw)[:, 8:]
    weight, table = torch.randn(20, generator=draw), torch.randn(16, 12, generator=draw)
    positions = torch.tensor([3, 15, 0, 7, 1])
    nope, rope = query.split([16, 12], -1)
    turned, key = Ops.rotary(rope, latent[:, None, 20:], positions, table, interleaved)
    want_query = torch.cat((nope, turned), -1)
    want = torch.cat((Ops.rms_norm(latent[:, :20], weight, 1e-6) * 0.3, key[:, 0]), -1)
    found = Ops().latent_rotary(query, latent, (weight, 1e-6, 0.0), positions, table, interleaved, 0.3)
    assert torch.equal(found, want)
    assert torch.equal(query, want_query)
