"""Products with weights of nibbles against float32: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.kernels import codebook, nibble_rows
from frame.kernels.nibbles import Nibbles
from frame.ops import Ops
from frame.plugins.gguf.blocks import dequantize
from frame.plugins.gguf.superblocks import SUPER, planes_of, values_of
from frame.plugins.gguf.types import BY_NAME
from frame.plugins.quantization.bitsandbytes_4bit import TABLES
from frame.plugins.quantization.codebook import FP4
from tests.gguf.drawn import random_blocks

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
#: Name of the table, columns of a group, what scales are.
TABLED = {
    "nf4": ("nf4", 64, "float32"),
    "fp4": ("fp4", 128, "float32"),
    "mxfp4": ("e2m1", 32, "exponents"),
    "nvfp4": ("e2m1", 16, "floats, numbered"),
    "groups of 8": ("e2m1", 8, "float32"),
}


def made(kind: str, outputs: int, depth: int) -> tuple[Nibbles, Tensor]:
    """A weight of a format, and its values in float32."""
    draw = torch.Generator().manual_seed(outputs)
    if kind in SUPER:
        shape = (outputs, depth // BY_NAME[kind].values)
        blocks = torch.from_numpy(random_blocks(kind, shape, seed=outputs, size=1 / 64))
        planes = planes_of(blocks, kind).to(DEVICE)
        assert torch.equal(values_of(planes, kind).cpu(), dequantize(blocks, kind))
        return planes.nibbles(), dequantize(blocks, kind)
    name, group, scaled = TABLED[kind]
    low = torch.randint(-(2**31), 2**31, (outputs, depth // 8), generator=draw).to(torch.int32)
    scales = torch.rand((outputs, depth // group), generator=draw) + 0.5
    if scaled == "exponents":
        scales = torch.randint(120, 131, scales.shape, generator=draw).to(torch.uint8)
    elif scaled.startswith("floats"):
        scales = scales.to(torch.float8_e4m3fn)
    numbers = torch.rand((outputs, 1), generator=draw) if scaled.endswith("numbered") else None
    table = torch.tensor(TABLES.get(name, FP4))
    given = [None if one is None else one.to(DEVICE) for one in (low, scales, table, numbers)]
    return Nibbles(*given), Ops().dequantize_table(low, scales, table, numbers)


@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("kind", [*TABLED, *SUPER])
def test_products(kind: str, rows: int) -> None:
    for outputs, depth in ((37, 512), (16, 256)) if kind in SUPER else ((37, 384), (16, 128)):
        weight, values = made(kind, outputs, depth)
        x = torch.randn(rows, depth).to(DTYPE).to(DEVICE)
        bias = torch.randn(outputs).to(DTYPE).to(DEVICE) if rows > 1 else None
        found = nibble_rows.product(x, weight, bias)
        expected = x.float().cpu() @ values.T
        expected = expected if bias is None else expected + bias.float().cpu()
        far = (found.float().cpu() - expected).abs().max() / expected.abs().max()
        assert found.dtype == DTYPE
        assert far < (4e-3 if INTERPRETED else 2e-2), far


def test_rows_with_a_stride() -> None:
    weight, values = made("nf4", 20, 192)
    wide = torch.randn(5, 400).to(DTYPE).to(DEVICE)
    found = nibble_rows.product(wide[:, 8:200], weight)
    torch.testing.assert_close(found.float().cpu(), wide[:, 8:200].float().cpu() @ values.T, rtol=2e-2, atol=0.15)


@pytest.mark.parametrize("kind", SUPER)
def test_weights_put_together(kind: str) -> None:
    weight, values = made(kind, 37, 512)
    torch.testing.assert_close(codebook.dequantize(weight, torch.float32).cpu(), values, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="asks a device for its capability")
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_ops_of_the_platform(rows: int) -> None:
    """As steps call them: of few rows and of many, deterministic too."""
    from frame.plugins.platforms.cuda.ops import CudaOps

    ops = CudaOps()
    for kind in TABLED:
        weight, values = made(kind, 256, 512)
        x = torch.randn(rows, 512).to(DTYPE).to(DEVICE)
        for ops.invariant in (False, True):
            found = ops.table_linear(x, weight.low, weight.scales, weight.table, weight.numbers)
            expected = x.float().cpu() @ values.T
            assert (found.float().cpu() - expected).abs().max() / expected.abs().max() < 4e-2


@pytest.mark.skipif(INTERPRETED, reason="asks a device for its capability")
@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", *SUPER])
def test_blocks_of_files(kind: str, rows: int) -> None:
    """As GGUF layers call them; of many rows of a large weight in parts."""
    from types import SimpleNamespace

    from frame.plugins.gguf.held import held_as
    from frame.plugins.platforms.cuda.ops import CudaOps

    blocks = torch.from_numpy(random_blocks(kind, (96, 512 // BY_NAME[kind].values), seed=rows, size=1 / 64))
    layer = SimpleNamespace(ops=CudaOps(), empty=lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=DEVICE))
    held = held_as(kind)
    held.create(layer, 96, 512)
    held.put(layer, slice(0, 96), blocks.to(DEVICE))
    x = torch.randn(rows, 512).to(DTYPE).to(DEVICE)
    expected = x.float().cpu() @ dequantize(blocks, kind).T
    for layer.ops.invariant in (False, True):
        found = held.apply(layer, x, None).float().cpu()
        assert (found - expected).abs().max() / expected.abs().max() < 4e-2
