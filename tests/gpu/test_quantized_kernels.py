"""Products with quantised weights against their references: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import Ops, quantized as references
from frame.kernels import coded_rows, quantized
from frame.layers import WeightSlot
from frame.plugins.platforms.cuda.products import rounded
from frame.plugins.quantization.scaled import with_exponents

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
FP8 = torch.float8_e4m3fn
CODES = [torch.int8, FP8, torch.int32]
#: (rows, columns) of a block, 0 for all columns.
BLOCKS = [(1, 0), (1, 32), (32, 64), (1, 128)]


def weight(codes: torch.dtype, outputs: int, depth: int, block: tuple[int, int], zeros: bool) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(outputs)
    rows, columns = -(-outputs // block[0]), -(-depth // (block[1] or depth))
    if codes == torch.int32:
        made = torch.randint(-(2**31), 2**31 - 1, (outputs, depth // 8), generator=draw).to(torch.int32)
    elif codes == torch.int8:
        made = torch.randint(-127, 128, (outputs, depth), generator=draw).to(torch.int8)
    else:
        made = (torch.randn(outputs, depth, generator=draw) * 60).to(FP8)
    scales = torch.rand(rows, columns, generator=draw).add(0.5) / (8 if codes == torch.int32 else 128)
    zero = torch.randint(0, 16, (rows, columns), generator=draw).to(torch.uint8)
    return made.to(DEVICE), scales.to(DEVICE), zero.to(DEVICE) if zeros else None


def exact(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None) -> Tensor:
    if codes.dtype == torch.int32:
        return references.dequantize_packed(codes, scales, zeros)
    return references.dequantize(codes, scales, block, zeros)


def close(found: Tensor, expected: Tensor, tolerance: float = 4e-3) -> None:
    far = (found.float() - expected).abs().max() / expected.abs().max()
    assert far < tolerance, far


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_few_rows(codes: torch.dtype, block: tuple[int, int], zeros: bool, rows: int) -> None:
    if (codes == torch.int32 and block[0] > 1) or (codes == FP8 and zeros):
        pytest.skip("no format stores that")
    for outputs, depth in ((40, 128), (96, 384)):
        made = weight(codes, outputs, depth, block, zeros)
        x = torch.randn(rows, depth).to(DTYPE).to(DEVICE)
        bias = torch.randn(outputs).to(DTYPE).to(DEVICE) if rows > 1 else None
        found = quantized.few_rows(x, made[0], made[1], (block[0], block[1] or depth), made[2], bias)
        expected = x.float() @ exact(made[0], made[1], (block[0], block[1] or depth), made[2]).T
        close(found, expected if bias is None else expected + bias.float())


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", [(1, 0), (1, 128), (32, 128)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (2, 1), (5, 3), (33, 2), (64, 1)])
def test_coded_rows(codes: torch.dtype, block: tuple[int, int], zeros: bool, rows: int, splits: int) -> None:
    """Twice, as the programs that divide inputs must leave their counters as they were."""
    if (codes == torch.int32 and block[0] > 1) or (codes == FP8 and zeros):
        pytest.skip("no format stores that")
    for outputs, depth in ((40, 128), (200, 768)):
        made = weight(codes, outputs, depth, block, zeros)
        sized = block[0], block[1] or depth
        assert coded_rows.fits(made[0], made[1], sized, rows)
        bias = torch.randn(outputs).to(DTYPE).to(DEVICE) if rows % 2 else None
        sizes = (64, 128, 3, min(splits, depth // 128)) if rows > 1 or codes == torch.int32 else None
        for _ in range(2):
            x = torch.randn(rows, depth + 8)[:, :depth].to(DTYPE).to(DEVICE)
            found = coded_rows.product(x, made[0], made[1], sized, made[2], bias, sizes)
            expected = x.float() @ exact(made[0], made[1], sized, made[2]).T
            close(found, expected if bias is None else expected + bias.float())


@pytest.mark.parametrize("block", [(1, 0), (1, 128), (128, 128)])
@pytest.mark.parametrize(("rows", "splits"), [(2, 1), (33, 3)])
@pytest.mark.parametrize("static", [False, True])
def test_few_rounded_rows(block: tuple[int, int], rows: int, splits: int, static: bool) -> None:
    """Of what x is rounded to, with scales of rows or of 128 of their columns."""
    outputs, depth = 200, 736  # the last group is shorter
    made = weight(FP8, outputs, depth, block, zeros=False)
    sized = block[0], block[1] or depth
    x, bias = torch.randn(rows, depth).to(DTYPE).to(DEVICE), torch.randn(outputs).to(DTYPE).to(DEVICE)
    fixed = torch.tensor([0.02], device=DEVICE) if static else None
    found, own = quantized.rounded_rows(x, made[0], made[1], fixed)
    assert own.shape == (rows, 6 if block[1] and not static else 1)
    back = found.float() * own.repeat_interleave(-(-depth // own.shape[1]) if own.shape[1] == 1 else 128, 1)[:, :depth]
    expected = back @ exact(made[0], made[1], sized, None).T + bias.float()
    close(coded_rows.rounded_product(found, own, made[0], made[1], sized, bias, DTYPE, (64, 128, 3, splits)), expected)
    close(rounded.few_rows(x, made[0], made[1], sized, bias, fixed), expected)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", [(1, 16), (1, 32), (1, 64)])
def test_coded_rows_of_small_groups_are_those_of_one_row(codes: torch.dtype, block: tuple[int, int]) -> None:
    made = weight(codes, 40, 192, block, zeros=False)
    takes = coded_rows.fits(made[0], made[1], block, 1)
    assert takes == (codes != torch.int32)
    assert not coded_rows.fits(made[0], made[1], block, 2)
    if takes:
        x = torch.randn(1, 192).to(DTYPE).to(DEVICE)
        close(coded_rows.product(x, made[0], made[1], block, None, None), x.float() @ exact(*made[:2], block, None).T)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("zeros", [False, True])
def test_dequantized(codes: torch.dtype, block: tuple[int, int], zeros: bool) -> None:
    if (codes == torch.int32 and block[0] > 1) or (codes == FP8 and zeros):
        pytest.skip("no format stores that")
    for outputs, depth in ((40, 128), (64, 192)):
        block_ = (block[0], block[1] or depth)
        if depth % block_[1]:
            continue
        made = weight(codes, outputs, depth, block, zeros)
        expected = exact(made[0], made[1], block_, made[2])
        close(quantized.dequantize(made[0], made[1], block_, made[2], torch.float32), expected, 1e-6)
        several = [None if one is None else torch.stack((one, one.flip(0))) for one in made]
        found = quantized.dequantize(several[0], several[1], block_, several[2], DTYPE)
        close(found[0], expected)
        close(found[1], exact(several[0][1], several[1][1], block_, None if made[2] is None else several[2][1]))


@pytest.mark.parametrize("codes", [torch.int8, FP8])
@pytest.mark.parametrize("group", [128, 0])
def test_rounded_rows(codes: torch.dtype, group: int) -> None:
    x = torch.randn(5, 256).to(DTYPE).to(DEVICE)
    found, scales = quantized.round_rows(x, codes, group or 256)
    wanted, own = references.quantize_rows(x.unflatten(1, (-1, group or 256)), codes)
    torch.testing.assert_close(scales, own.flatten(1))
    back, expected = (one.float() for one in (found, wanted.flatten(1)))
    assert ((back - expected).abs() <= expected.abs() / 8 + 1).all()  # a neighbour, where it lies in the middle
    assert (back != expected).float().mean() < 0.01
    fixed = torch.tensor([0.05], device=DEVICE)
    found, scales = quantized.round_rows(x * 100, codes, 256, fixed)
    assert torch.equal(scales, fixed.expand(5, 1))
    assert found.float().abs().max() == (448 if codes == FP8 else 127)


@pytest.mark.parametrize("codes", [torch.int8, FP8])
@pytest.mark.parametrize("block", [(1, 0), (128, 128), (32, 64)])
@pytest.mark.parametrize("rows", [3, 130])
def test_rounded_products(codes: torch.dtype, block: tuple[int, int], rows: int) -> None:
    """Of what x is rounded to: the reference multiplies the same numbers in float32."""
    outputs, depth = 160, 256
    made = weight(codes, outputs, depth, block, zeros=False)
    block_ = (block[0], block[1] or depth)
    x, bias = (torch.randn(*shape).to(DTYPE).to(DEVICE) for shape in ((rows, depth), (outputs,)))
    for static in (None, torch.tensor([0.02], device=DEVICE)):
        group = 128 if block[1] and static is None else depth
        own, scales = quantized.round_rows(x, codes, group, static)
        rounded = references.dequantize(own, scales, (1, group))
        expected = rounded @ references.dequantize(made[0], made[1], block_).T + bias.float()
        close(quantized.rounded_product(x, made[0], made[1], block_, bias, static), expected)


@pytest.mark.skipif(INTERPRETED, reason="asks a device for its capability")
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_ops_of_the_platform(rows: int) -> None:
    """As steps call them: captured or not, with and without rounding, deterministic too."""
    from frame.plugins.platforms.cuda.ops import CudaOps

    ops, depth = CudaOps(), 512
    x = torch.randn(rows, depth).to(DTYPE).to(DEVICE)
    for codes in CODES:
        made = weight(codes, 256, depth, (1, 128), zeros=False)
        for invariant in (False, True):
            ops.invariant = invariant
            if codes == torch.int32:
                found = ops.packed_linear(x, made[0], made[1])
                expected = Ops().packed_linear(x.float(), made[0], made[1])
            else:
                found = ops.scaled_linear(x, made[0], made[1], (1, 128), rounds=True)
                expected = Ops().scaled_linear(x.float(), made[0], made[1], (1, 128))
            close(found, expected, 4e-2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_scales_that_are_exponents_become_their_powers_of_two(dtype: torch.dtype) -> None:
    scales = torch.zeros(16, 16, device=DEVICE)
    (slot,) = with_exponents([WeightSlot("scale", (16, 16), scales)], dtype)
    place = slot.place(dtype)
    place.copy_(torch.arange(256).to(torch.uint8).view(16, 16).view(dtype))
    slot.write(place)
    wanted = torch.tensor([*(2.0 ** (x - 127) for x in range(255)), float("nan")]).view(16, 16)
    torch.testing.assert_close(scales.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
