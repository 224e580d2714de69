"""One row's norm, router and choice of experts in one kernel: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import Ops
from frame.interfaces import RouterSpec
from frame.kernels import coded_rows
from frame.kernels.norm_linear import norm_linear
from frame.kernels.norm_route import norm_route
from frame.kernels.routing import route
from frame.testing.op_cases import ROUTERS

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [*ROUTERS, RouterSpec(1, 1)])
def test_the_choice_of_one_row(spec: RouterSpec, dtype: torch.dtype) -> None:
    """It has the bits of the two launches that it replaces, which the reference's choice is near, and counts to 0."""
    torch.manual_seed(spec.num_experts)
    inputs = 200
    x, residual, weight = (
        torch.randn(*shape).to(DEVICE, dtype) for shape in ((1, inputs), (1, inputs), (spec.num_experts, inputs))
    )
    weight /= inputs**0.5
    norm = torch.randn(inputs).to(DEVICE, dtype), 1e-6, 1.0
    correction = torch.randn(spec.num_experts).to(DEVICE) if spec.corrected else None
    for bias in (None, torch.randn(spec.num_experts).to(DEVICE, dtype)):
        given = x, residual, norm, weight, bias
        logits, normed, total = norm_linear(*given)
        expected = *route(logits, spec, correction), normed, total
        for _ in range(2):
            found = norm_route(*given, spec, correction)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert not coded_rows.counters(x.device).any()
        if dtype == torch.bfloat16:  # in which logits of two experts may be equal
            continue
        exact = Ops().norm_route(*given, spec, correction)
        for sizes in (None, (1, 4), (64, 8)):
            found = norm_route(*given, spec, correction, sizes)
            assert torch.equal(found[1], exact[1])
            for one, other in zip(found, exact, strict=True):
                assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)
