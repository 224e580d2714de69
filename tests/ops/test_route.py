"""The choice of experts: against its rule written out for one token, and against routers of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as some
from transformers import DeepseekV2Config, DeepseekV3Config, Ernie4_5_MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from frame.core.ops import Ops
from frame.interfaces import RouterSpec

pytestmark = pytest.mark.product


@some.composite
def specs(draw: some.DrawFn) -> RouterSpec:
    """Every router, with up to 24 experts."""
    num_groups, group = draw(some.integers(1, 4)), draw(some.integers(2, 6))
    top_groups = draw(some.integers(1, num_groups))
    return RouterSpec(
        num_groups * group,
        draw(some.integers(1, group * top_groups)),
        draw(some.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(some.booleans()),
        scale=draw(some.sampled_from([1.0, 2.5])),
        corrected=draw(some.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(some.sampled_from(["max", "top2"])),
    )


def routed(logits: list[float], spec: RouterSpec, bias: list[float]) -> dict[int, float]:
    """The rule, for one token: the weight of each expert that it gets."""
    if spec.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    merit = [score + more for score, more in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(first, first + size) for first in range(0, spec.num_experts, size)]

    def worth(group: range) -> float:
        best = sorted((merit[expert] for expert in group), reverse=True)
        return best[0] + best[1] if spec.group_score == "top2" else best[0]

    kept = sorted(groups, key=worth, reverse=True)[: spec.top_groups]
    allowed = [expert for group in kept for expert in group]
    chosen = sorted(allowed, key=lambda expert: merit[expert], reverse=True)[: spec.top_k]
    total = sum(scores[expert] for expert in chosen) if spec.renormalize else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@given(specs(), some.integers(0, 2**31))
def test_routers_follow_their_rule(spec: RouterSpec, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, spec.num_experts, generator=draw) * 3
    bias = torch.randn(spec.num_experts, generator=draw) if spec.corrected else None
    weights, ids = Ops.route(logits, spec, bias)
    assert (weights.dtype, ids.dtype, ids.shape) == (torch.float32, torch.int32, (3, spec.top_k))
    for row in range(3):
        want = routed(logits[row].tolist(), spec, bias.tolist() if bias is not None else [0.0] * spec.num_experts)
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_deepseek_v3s_router() -> None:
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=32, num_experts_per_tok=6, n_group=8, topk_group=3, routed_scaling_factor=2.5
    )
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.normal_()
    logits, weights, ids = router(torch.randn(20, 16))
    spec = RouterSpec(32, 6, "sigmoid", True, 2.5, True, num_groups=8, top_groups=3, group_score="top2")
    same_choices(Ops.route(logits, spec, router.e_score_correction_bias), (weights, ids))


def test_deepseek_v2s_router() -> None:
    config = DeepseekV2Config(
        hidden_size=16, num_attention_heads=2, n_routed_experts=20, num_experts_per_tok=4, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=16.0,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    logits, weights, ids = router(torch.randn(20, 16))
    spec = RouterSpec(20, 4, renormalize=False, scale=16.0, num_groups=4, top_groups=2)
    same_choices(Ops.route(logits, spec), (weights, ids))


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_phi_3_5_moes_router(jitter: float) -> None:
    logits = torch.cat((torch.randn(40, 16) * 2, -torch.rand(4, 16)))
    want = sparsemixer(logits, jitter_eps=jitter, training=False)
    same_choices(Ops.route(logits, RouterSpec(16, 2, "sparsemixer", renormalize=False, jitter=jitter)), want)


@pytest.mark.parametrize("least", [1e-12, 0.6])
def test_ernies_router(least: float) -> None:
    config = Ernie4_5_MoeConfig(hidden_size=16, moe_num_experts=12, moe_k=3, moe_norm_min=least)
    router = Ernie4_5_MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    router.moe_statics.e_score_correction_bias.data.normal_()
    logits, weights, ids = router(torch.randn(20, 16))
    spec = RouterSpec(12, 3, corrected=True, least_sum=least)
    same_choices(Ops.route(logits, spec, router.moe_statics.e_score_correction_bias[0]), (weights, ids))


def same_choices(found: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Equal experts in any order, with equal weights."""
    orders = [ids.argsort(dim=-1) for _, ids in (found, want)]
    assert torch.equal(found[1].gather(1, orders[0]).long(), want[1].gather(1, orders[1]))
    torch.testing.assert_close(found[0].gather(1, orders[0]), want[0].gather(1, orders[1]).float())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": 10, "top_k": 2, "num_groups": 4}, "10 experts cannot be divided into 4 equal groups"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 4, "top_groups": 5}, "5 groups cannot be chosen of 4"),
        ({"num_experts": 8, "top_k": 5, "num_groups": 4, "top_groups": 2}, "5 experts cannot be chosen of 4"),
        ({"num_experts": 8, "top_k": 0}, "0 experts cannot be chosen of 8"),
        (
            {"num_experts": 8, "top_k": 2, "score": "softplus"},
            "'softplus' of a router; there are: softmax, sigmoid, sparsemixer",
        ),
        ({"num_experts": 8, "top_k": 2, "score": "sparsemixer"}, "a sparsemixer is not renormalized"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 8, "top_groups": 2, "group_score": "top2"}, "by max"),
    ],
)
def test_routers_whose_sizes_do_not_fit_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RouterSpec(**fields)  # type: ignore[arg-type]
