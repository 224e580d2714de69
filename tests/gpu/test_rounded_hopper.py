"""Products of rounded rows from a ring of copies, against their formula: on a Hopper GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import quantized as references
from frame.kernels import quantized, rounded_hopper
from frame.kernels.rounded_hopper import TILE, RoundedTile
from tests.gpu.chains import check_chain
from tests.gpu.test_coded_fragments import FP8, weight

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: (outputs, columns, rows, tile): whole tiles and uneven ones, rings longer and shorter than a program's steps.
SMALL = [
    (64, 128, 17, RoundedTile(64, 128, 2)), (300, 384, 33, RoundedTile(128, 256, 4)),
    (1000, 640, 64, RoundedTile(64, 128, 4)), (64, 2048, 2, RoundedTile(64, 128, 2)),
    (300, 896, 64, RoundedTile(128, 128, 3)), (1, 1152, 5, TILE),
]  # fmt: skip
LARGE = [
    (6144, 4096, 64, TILE), (4096, 4096, 33, TILE), (4096, 14336, 17, TILE), (28672, 4096, 64, TILE),
    (4104, 2944, 16, TILE), (1000, 2816, 1, TILE), (28672, 4096, 64, RoundedTile(128, 128, 8)),
    (6144, 4096, 32, RoundedTile(64, 128, 12)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


def rounded(x: Tensor, static: Tensor | None) -> Tensor:
    """x as the product reads it, in float32."""
    codes, scales = quantized.round_rows(x, FP8, x.shape[1], static)
    return codes.float() * scales


@pytest.mark.parametrize(
    ("outputs", "depth", "rows", "tile", "few"),
    [(*case, True) for case in SMALL] + [(*case, False) for case in ([] if INTERPRETED else LARGE)],
)
def test_products(
    outputs: int, depth: int, rows: int, tile: RoundedTile, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:  # programs that go from tile to tile
        monkeypatch.setattr(rounded_hopper, "num_multiprocessors", lambda _: 5)
    codes, scales, _ = weight(FP8, outputs, depth, (1, 0), zeros=False)
    dtype, scales = torch.float16 if INTERPRETED else torch.bfloat16, scales.float()
    exact = references.dequantize(codes, scales, (1, depth))
    torch.manual_seed(outputs)
    for loud, static in ((1.0, None), (30.0, None), (1.0, torch.tensor([0.01], device=DEVICE)), (0.0, None)):
        x = (torch.randn(rows, depth + 8) * loud).to(dtype).to(DEVICE)[:, :depth]
        bias = torch.randn(outputs, dtype=dtype, device=DEVICE) if loud == 1.0 else None
        assert rounded_hopper.fits(codes, scales, (1, depth), rows)
        found = rounded_hopper.product(x, codes, scales, bias, static, tile)
        expected = rounded(x, static) @ exact.T
        expected += 0.0 if bias is None else bias.float()
        far = (found.float() - expected).abs().max()
        assert far <= (1e-3 if dtype == torch.float16 else 1e-2) * expected.abs().max(), far
        again = rounded_hopper.product(x, codes, scales, bias, static, tile)
        assert torch.equal(found, again)


@pytest.mark.skipif(INTERPRETED, reason="plain launches and graphs are alike there")
def test_chains() -> None:
    """Products that follow one another, each of the one before, while the kernels overlap."""
    codes, scales, _ = weight(FP8, 4096, 4096, (1, 0), zeros=False)
    scales = scales.float() / 64
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device=DEVICE)
    check_chain(x, lambda found: rounded_hopper.product(found, codes, scales))


def test_what_it_takes() -> None:
    codes, scales, _ = weight(FP8, 32, 4096, (1, 0), zeros=False)
    scales = scales.float()
    assert rounded_hopper.fits(codes, scales, (1, 4096), 64)
    assert not rounded_hopper.fits(codes, scales, (1, 4096), 65)
    assert not rounded_hopper.fits(codes, scales.half(), (1, 4096), 64)
    assert not rounded_hopper.fits(codes, scales.expand(32, 2).contiguous(), (1, 2048), 64)
    assert not rounded_hopper.fits(codes, scales, (128, 4096), 64)
    assert not rounded_hopper.fits(codes[:, :320].contiguous(), scales, (1, 320), 64)
    assert not rounded_hopper.fits(codes.view(torch.int8), scales, (1, 4096), 64)
