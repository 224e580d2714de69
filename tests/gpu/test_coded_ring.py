"""Products of one row with codes from a ring of copies, against their references: on a Hopper GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import quantized as references
from frame.kernels import coded_ring
from frame.kernels.coded_ring import Ring
from tests.gpu.test_coded_fragments import FP8, weight

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


@pytest.mark.parametrize("sizes", [Ring(2, 1), Ring(4, 2)])
@pytest.mark.parametrize(("outputs", "steps"), [(16, 1), (77, 2), (1000, 7)])
def test_products(outputs: int, steps: int, sizes: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and outputs > 100:
        outputs = 40
    if outputs > 16:  # programs that go from tile to tile, and a ring that begins anew
        monkeypatch.setattr(coded_ring, "num_multiprocessors", lambda _: 2)
    depth = steps * 1024
    codes, scales, _ = weight(FP8, outputs, depth, (1, 0), zeros=False)
    dtype, scales = torch.float16 if INTERPRETED or outputs == 16 else torch.bfloat16, scales.float()
    torch.manual_seed(outputs)
    for loud in (1.0, 30.0, 1e-3, 0.0):
        x = (torch.randn(1, depth) * loud).to(dtype).to(DEVICE)
        bias = torch.randn(outputs, dtype=dtype, device=DEVICE) if loud == 1.0 else None
        assert coded_ring.fits(codes, scales, (1, depth), None)
        found = coded_ring.product(x, codes, scales, bias, sizes)
        expected = x.float() @ references.dequantize(codes, scales, (1, depth)).T
        expected += 0.0 if bias is None else bias.float()
        far = (found.float() - expected).abs().max()
        assert far <= (1e-3 if dtype == torch.float16 else 1e-2) * expected.abs().max(), far


def test_what_it_takes() -> None:
    codes, scales, _ = weight(FP8, 32, 4096, (1, 0), zeros=False)
    assert coded_ring.fits(codes, scales, (1, 4096), None)
    assert not coded_ring.fits(codes, scales, (1, 4096), scales)
    assert not coded_ring.fits(codes, scales.expand(32, 2).contiguous(), (1, 2048), None)
    assert not coded_ring.fits(codes, scales, (128, 4096), None)
    assert not coded_ring.fits(codes[:, :384].contiguous(), scales, (1, 384), None)
    assert not coded_ring.fits(codes.view(torch.int32), scales, (1, 4096), None)
