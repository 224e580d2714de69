"""Products in the registers of matrix instructions against their references: on a GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import quantized as references
from frame.kernels import coded_fragments, coded_warpgroups
from frame.kernels.coded_fragments import Fragments
from frame.kernels.coded_warpgroups import Warpgroups

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
FP8 = torch.float8_e4m3fn
#: (rows, columns) of a block, 0 for all columns.
BLOCKS = {torch.int32: [(1, 0), (1, 32), (1, 64), (1, 128), (1, 256)], FP8: [(1, 0), (1, 64), (32, 128)]}
SIZES = [Fragments(1, 1, 4, 1), Fragments(2, 2, 1, 2), Fragments(1, 2, 2, 3)]
SHARED = [Warpgroups(4, 1, 2), Warpgroups(8, 2, 4, 2), Warpgroups(4, 3, 1)]


def weight(codes: torch.dtype, outputs: int, depth: int, block: tuple[int, int], zeros: bool) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(outputs)
    rows, columns = -(-outputs // block[0]), depth // (block[1] or depth)
    if codes == torch.int32:
        made = torch.randint(-(2**31), 2**31 - 1, (outputs, depth // 8), generator=draw).to(torch.int32)
    else:  # every code but those of no number
        made = torch.randint(0, 256, (outputs, depth), generator=draw).to(torch.uint8)
        made = torch.where((made & 127) == 127, made - 1, made).view(FP8)
    scales = torch.rand(rows, columns, generator=draw).add(0.5) / (8 if codes == torch.int32 else 128)
    zero = torch.randint(0, 17, (rows, columns), generator=draw).to(torch.uint8)
    return made.to(DEVICE), scales.half().to(DEVICE), zero.to(DEVICE) if zeros else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("codes", "zeros"), [(torch.int32, False), (torch.int32, True), (FP8, False)])
@pytest.mark.parametrize("rows", [1, 13, 64])
def test_products(codes: torch.dtype, zeros: bool, rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows)
    for index, block in enumerate(BLOCKS[codes]):
        outputs, depth = (72, 512) if index % 2 else (21 if block[0] == 1 else 64, 768)
        made = weight(codes, outputs, depth, block, zeros)
        sized = block[0], block[1] or depth
        assert coded_fragments.fits(made[0], made[1], sized)
        bias = torch.randn(outputs, generator=draw).to(dtype).to(DEVICE) if rows % 2 else None
        x = torch.randn(rows, depth + 8, generator=draw)[:, :depth].to(dtype).to(DEVICE)
        given = x, made[0], made[1], sized, made[2], bias
        found = coded_fragments.product(*given, SIZES[(rows + index) % 3])
        if codes == torch.int32:
            exact = references.dequantize_packed(*made)
        else:
            exact = references.dequantize(made[0], made[1], sized)
        expected = x.float() @ exact.T
        expected = expected if bias is None else expected + bias.float()
        shared = [coded_warpgroups.product(*given, SHARED[(rows + index) % 3]) for _ in range(2)]  # counters stay right
        for one in (found, *shared):
            far = (one.float() - expected).abs().max() / expected.abs().max()
            assert far < (1e-3 if dtype == torch.float16 else 1e-2), far
            assert one.dtype == dtype


@pytest.mark.parametrize("codes", [torch.int32, FP8])
@pytest.mark.parametrize("depth", [1024, 896])
def test_programs_that_go_from_tile_to_tile(codes: torch.dtype, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_fragments, "num_multiprocessors", lambda _: 2)
    made = weight(codes, 72, depth, (1, 128), zeros=codes == torch.int32)
    x = torch.randn(5, depth, dtype=torch.float16, device=DEVICE)
    exact = references.dequantize_packed(*made) if codes == torch.int32 else references.dequantize(*made[:2], (1, 128))
    expected = x.float() @ exact.T
    for sizes in (Fragments(1, 1, 2, 2, 1), Fragments(2, 1, 4, 1, 1)):
        found = coded_fragments.product(x, made[0], made[1], (1, 128), made[2], None, sizes)
        assert (found.float() - expected).abs().max() / expected.abs().max() < 1e-3


def test_inputs_of_no_whole_chunk() -> None:
    made = weight(torch.int32, 20, 160, (1, 0), zeros=True)
    x = torch.randn(3, 160, dtype=torch.float16, device=DEVICE)
    found = coded_fragments.product(x, made[0], made[1], (1, 160), made[2], None, SIZES[0])
    torch.testing.assert_close(found.float(), x.float() @ references.dequantize_packed(*made).T, rtol=2e-2, atol=2e-2)
    assert not coded_fragments.fits(made[0], torch.ones(20, 10, device=DEVICE), (1, 16))
    assert not coded_fragments.fits(made[0].to(torch.int8), made[1], (1, 20))
