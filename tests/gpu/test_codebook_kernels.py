"""Weights of nibbles from a table against their reference: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.kernels.codebook import dequantize_table, fits
from frame.ops import Ops
from frame.plugins.quantization.codebook import FP4

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 17, 192), (5, 320), (1, 256)])
@pytest.mark.parametrize("kind", ["exponents of 32", "floats of 16, numbered", "float32 of 64", "float32 of 8"])
def test_the_weights_are_those_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    group = int(kind.split(" of ")[1].split(",")[0])
    packed = torch.randint(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8), generator=generator).to(torch.int32)
    size = (*shape[:-1], shape[-1] // group)
    if kind.startswith("exponents"):
        scales = torch.randint(115, 131, size, generator=generator).to(torch.uint8)
    else:
        scales = torch.rand(size, generator=generator) + 0.5
        scales = scales.to(torch.float8_e4m3fn) if kind.startswith("floats of") else scales
    numbers = torch.rand((*shape[:-1], 1), generator=generator) if "numbered" in kind else None
    given = [None if one is None else one.to(DEVICE) for one in (packed, scales, torch.tensor(FP4), numbers)]
    assert fits(group)
    found, expected = dequantize_table(*given, dtype), Ops().dequantize_table(*given, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)


def test_a_group_that_spans_programs() -> None:
    packed = torch.randint(-(2**31), 2**31, (20, 64)).to(torch.int32).to(DEVICE)
    scales = (torch.rand(20, 2) + 0.5).to(DEVICE)
    table = torch.randn(16).to(DEVICE)
    assert fits(256)
    torch.testing.assert_close(
        dequantize_table(packed, scales, table), Ops().dequantize_table(packed, scales, table), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("group", [4, 24, 96, 130])
def test_groups_that_it_does_not_take(group: int) -> None:
    assert not fits(group)
