"""Products with codes in host memory against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frame.core.ops import quantized as references
from frame.plugins.platforms import cpu_codes
from frame.plugins.platforms.cpu_ops import CpuOps

#: What a product may differ by, over the largest result: float32 sums, and one or two roundings to 16 bits.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
needs_bytes = pytest.mark.skipif(not cpu_codes.multiplies_bytes(), reason="no products of bytes on this processor")


def rows_of_bytes(outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (outputs, depth)).to(torch.int8), torch.rand(outputs, 1) / 100


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@needs_bytes
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(16, 64), (7, 64), (33, 100), (48, 96), (1, 8), (64, 2816)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 300])
def test_rows_of_int8(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    codes, scales = rows_of_bytes(*shape)
    x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0]).to(dtype) if rows > 1 else None
    x[:, 0] *= 20  # one large value makes all others of its row small
    x = x.to(dtype)
    expected = x.double() @ (codes.double() * scales.double()).T + (0 if bias is None else bias.double())
    found = cpu_codes.byte_linear(x, codes, scales, bias)
    assert found.dtype == dtype
    assert distance(found, expected) < TOLERANCES[dtype]
    assert torch.equal(cpu_codes.byte_linear(x[None], codes, scales, bias)[0], found)


@needs_bytes
def test_the_largest_codes_do_not_saturate() -> None:
    codes, scales = torch.full((16, 4096), 127, dtype=torch.int8), torch.ones(16, 1)
    assert torch.equal(
        cpu_codes.byte_linear(torch.ones(5, 4096), codes, scales, None), torch.full((5, 16), 127 * 4096.0)
    )


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_long_rows_do_not_overflow(dtype: torch.dtype) -> None:
    for depth in (cpu_codes.MAX_INPUTS // 32 * 32, cpu_codes.MAX_INPUTS // 32 * 32 + 32):
        codes, scales = torch.full((16, depth), -128, dtype=torch.int8), torch.ones(16, 1)
        found = CpuOps().scaled_linear(torch.ones(5, depth, dtype=dtype), codes, scales, (1, depth))
        assert distance(found, torch.full((5, 16), -128.0 * depth).double()) < TOLERANCES[dtype]


@needs_bytes
@pytest.mark.parametrize("rows", [1, 5])
def test_columns_of_wider_codes_and_inputs(rows: int) -> None:
    codes, scales = rows_of_bytes(16, 128)
    x = torch.randn(rows, 128).bfloat16()
    found = CpuOps().scaled_linear(x[:, ::2], codes[:, 32:96], scales, (1, 64))
    expected = x[:, ::2].double() @ (codes[:, 32:96].double() * scales.double()).T
    assert distance(found, expected) < TOLERANCES[torch.bfloat16]


@needs_bytes
def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    codes, scales = rows_of_bytes(16, 64)
    x = torch.zeros(6, 64)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 1e-40
    found = cpu_codes.byte_linear(x, codes, scales, None)
    assert torch.equal(found[[0, 4, 5]], torch.zeros(3, 16))
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].abs().max() < 1e-30


def test_other_codes_than_rows_of_bytes_are_not_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.plugins.platforms.cpu_ops.byte_linear", lambda *_: pytest.fail("was called"))
    ops, x = CpuOps(), torch.randn(2, 64)
    codes, scales = rows_of_bytes(16, 64)
    zeros = torch.ones(16, 1, dtype=torch.int8)
    ops.scaled_linear(x, codes, scales, (1, 64), zeros=zeros)
    ops.scaled_linear(x, codes, scales[:4], (4, 64))
    ops.scaled_linear(x, codes, scales.expand(16, 2), (1, 32))
    ops.invariant = True
    ops.scaled_linear(x, codes, scales, (1, 64))
    monkeypatch.setattr("frame.plugins.platforms.cpu_ops.multiplies_bytes", lambda: False)
    ops.invariant = False
    ops.scaled_linear(x, codes, scales, (1, 64))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block", [(1, 32), (16, 32), (1, 64)])
def test_weights_in_parts(dtype: torch.dtype, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of five rows, or of whole blocks; the last one is smaller."""
    monkeypatch.setattr(cpu_codes, "_IN_CACHE", 5 * 64)
    codes = torch.randint(-127, 128, (42, 64)).to(torch.int8)
    scales = torch.rand(-(-42 // block[0]), 64 // block[1])
    zeros = torch.randint(-8, 8, scales.shape).to(torch.int8)
    x, bias = torch.randn(2, 3, 64).to(dtype), torch.randn(42).to(dtype)
    expected = x.double() @ references.dequantize(codes, scales, block, zeros).double().T + bias.double()
    found = CpuOps().scaled_linear(x, codes, scales, block, bias, zeros)
    assert found.dtype == dtype
    assert distance(found, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nibbles_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_codes, "_IN_CACHE", 5 * 64)
    packed, scales = torch.randint(-(2**31), 2**31, (42, 8)).to(torch.int32), torch.rand(42, 2)
    zeros, table = torch.randint(0, 16, (42, 2)).to(torch.uint8), torch.randn(16)
    x, ops = torch.randn(3, 64).to(dtype), CpuOps()
    expected = x.double() @ references.dequantize_packed(packed, scales, zeros).double().T
    assert distance(ops.packed_linear(x, packed, scales, zeros), expected) < TOLERANCES[dtype]
    expected = x.double() @ references.dequantize_table(packed, scales, table).double().T
    assert distance(ops.table_linear(x, packed, scales, table), expected) < TOLERANCES[dtype]
