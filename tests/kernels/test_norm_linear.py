"""For which rows ordinary steps take a norm in the product that reads it, on a chip that is not there."""

from __future__ import annotations

import os
from functools import partial

import pytest

pytest.importorskip("triton")

from tests.kernels.ahead import DEVICE, H200, launched
from tests.kernels.launches import compiler

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
FUSED = {"norm_linear._norm_linear"}
#: shape of x, whether steps are deterministic, what takes the norm
CASES = {
    "one row": ((1, 1024), False, FUSED),
    "the longest row": ((1, 8192), False, FUSED),
    "a longer row": ((1, 8256), False, {"norm._rms_norm"}),
    "two rows": ((2, 1024), False, {"norm._rms_norm"}),
    "one row, deterministic": ((1, 1024), True, {"norm._rms_norm"}),
}


def kernels(name: str, gated: bool) -> set[str]:
    """Which kernels of norms are launched."""
    import torch

    from frame.plugins.platforms.cuda.ops import CudaOps

    shape, invariant, _ = CASES[name]
    ops = CudaOps()
    ops.invariant = invariant

    def launch() -> None:
        x, scale = (torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for size in (shape, shape[1:]))
        weight = torch.empty(256, shape[1], dtype=torch.bfloat16, device=DEVICE)
        product = ops.norm_linear_silu_mul if gated else ops.norm_linear
        product(x, x, (scale, 1e-6, 0.0), weight)

    return {found for found in launched(H200, launch) if "norm" in found}


@pytest.mark.matrix
def test_one_row_of_ordinary_steps() -> None:
    with compiler() as apart:
        for name, (_, _, expected) in CASES.items():
            for gated in (False, True):
                assert apart.submit(kernels, name, gated).result() == expected, (name, gated)


def routed(rows: int, at_once: bool, invariant: bool) -> set[str]:
    """The kernels of a router with the norm before it."""
    import torch

    from frame.interfaces import RouterSpec
    from frame.plugins.platforms.cuda.ops import CudaOps

    ops = CudaOps()
    ops.routes_at_once, ops.invariant = at_once, invariant

    def launch() -> None:
        empty = partial(torch.empty, dtype=torch.bfloat16, device=DEVICE)
        x, weight = empty(rows, 1024), empty(32, 1024)
        ops.norm_route(x, x, (empty(1024), 1e-6, 0.0), weight, None, RouterSpec(32, 4))

    return launched(H200, launch)


@pytest.mark.matrix
def test_one_row_chooses_experts_at_once_where_that_is_asked_for() -> None:
    alone = {"norm_route._norm_route"}
    with compiler() as apart:
        assert apart.submit(routed, 1, True, False).result() == alone
        for given in ((1, False, False), (2, True, False), (1, True, True)):
            found = apart.submit(routed, *given).result()
            assert "routing._route" in found
            assert not found & alone
