"""Weights of nibbles from a table against their reference: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.kernels.codebook import RUN, Run, dequantize, dequantize_table, fits
from frame.kernels.nibbles import Nibbles
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
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "group"), [(20, 256), (65, 384), (7, 8192), (1, 24576)])
def test_groups_that_span_threads_steps_and_programs(rows: int, group: int) -> None:
    depth = 3 * group if group < 24576 else group
    packed = torch.randint(-(2**31), 2**31, (rows, depth // 8)).to(torch.int32).to(DEVICE)
    scales = (torch.rand(rows, depth // group) + 0.5).to(DEVICE)
    numbers = torch.rand(rows, 1).to(DEVICE)
    table = torch.randn(16).to(DEVICE)
    assert fits(group)
    for own in (None, numbers):
        given = packed, scales, table, own
        assert torch.equal(dequantize_table(*given), Ops().dequantize_table(*given))


@pytest.mark.parametrize("run", [RUN, Run(1, 1), Run(4, 8), Run(8, 4)], ids=str)
@pytest.mark.parametrize("words", [1, 33, 4096, 4099])
def test_runs(run: Run, words: int) -> None:
    """Programs whose words end in any step, and at its end."""
    packed = torch.randint(-(2**31), 2**31, (words, 1)).to(torch.int32).to(DEVICE)
    weight = Nibbles(packed, (torch.rand(words, 1) + 0.5).to(DEVICE), torch.randn(16).to(DEVICE))
    given = weight.low, weight.scales, weight.table
    assert torch.equal(dequantize(weight, torch.float32, run), Ops().dequantize_table(*given))


@pytest.mark.parametrize("is_float4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_exponents(dtype: torch.dtype, is_float4: bool) -> None:
    """Of all codes: numbers that are subnormal, infinite or none too."""
    packed = torch.tensor([0x76543210, 0xFEDCBA98 - (1 << 32)]).to(torch.int32).repeat(256, 2).to(DEVICE)
    # the interpreter takes subnormal numbers of bfloat16 for 0
    scales = torch.arange(256, dtype=torch.uint8).clamp_min(3 if INTERPRETED and dtype == torch.bfloat16 else 0)
    given = packed, scales[:, None].to(DEVICE), torch.tensor(FP4).to(DEVICE), None, dtype
    found, expected = dequantize_table(*given, is_float4=is_float4), Ops().dequantize_table(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])


@pytest.mark.parametrize("group", [32, 64])
def test_float4_of_many_rows(group: int) -> None:
    packed = torch.randint(-(2**31), 2**31, (3, 67, 24)).to(torch.int32).to(DEVICE)
    scales = torch.randint(100, 150, (3, 67, 192 // group)).to(torch.uint8).to(DEVICE)
    given = packed, scales, torch.tensor(FP4).to(DEVICE), None, torch.bfloat16
    assert torch.equal(dequantize_table(*given, is_float4=True), Ops().dequantize_table(*given))


@pytest.mark.parametrize("group", [4, 24, 96, 130])
def test_groups_that_it_does_not_take(group: int) -> None:
    assert not fits(group)
