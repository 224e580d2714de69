"""Products of one row with codes from a ring of copies, against their references: on a Hopper GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import layers, quantized as references
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
@pytest.mark.parametrize("codes", [torch.int32, FP8])
@pytest.mark.parametrize(("outputs", "steps"), [(16, 1), (77, 2), (1000, 7)])
def test_products(codes: torch.dtype, outputs: int, steps: int, sizes: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and outputs > 100:
        outputs = 40
    if outputs > 16:  # programs that go from tile to tile, and a ring that begins anew
        monkeypatch.setattr(coded_ring, "num_multiprocessors", lambda _: 2)
    nibbles = codes == torch.int32
    depth = steps * (2048 if nibbles else 1024)
    made = weight(codes, outputs, depth, (1, 128) if nibbles else (1, 0), zeros=False)
    dtype = torch.float16 if INTERPRETED or outputs == 16 else torch.bfloat16
    scales = made[1] if nibbles else made[1].float()
    torch.manual_seed(outputs)
    for loud in (1.0, 30.0, 1e-3, 0.0):
        x = (torch.randn(1, depth) * loud).to(dtype).to(DEVICE)
        bias = torch.randn(outputs, dtype=dtype, device=DEVICE) if loud == 1.0 else None
        assert coded_ring.fits(made[0], scales, (1, 128 if nibbles else depth), None)
        found = coded_ring.product(x, made[0], scales, bias, sizes)
        exact = references.dequantize_packed(*made) if nibbles else references.dequantize(made[0], scales, (1, depth))
        expected = x.float() @ exact.T + (0.0 if bias is None else bias.float())
        far = (found.float() - expected).abs().max()
        assert far <= (1e-3 if dtype == torch.float16 else 1e-2) * expected.abs().max(), far


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("codes", [torch.int32, FP8])
def test_norm_and_gate(codes: torch.dtype, gated: bool, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_ring, "num_multiprocessors", lambda _: 2)
    nibbles, outputs = codes == torch.int32, 88
    depth, dtype = (4096 if nibbles else 2048), torch.float16 if INTERPRETED else torch.bfloat16
    made = weight(codes, outputs, depth, (1, 128) if nibbles else (1, 0), zeros=False)
    scales = made[1].to(dtype) if nibbles else made[1].float()
    x, residual, gain = (torch.randn(1, depth).to(dtype).to(DEVICE) for _ in range(3))
    norm = gain[0], 1e-6, offset
    bias = torch.randn(outputs, dtype=dtype, device=DEVICE)
    found, normed, total = coded_ring.norm_product(
        x, residual, norm, made[0], scales, bias, Ring(3, 1), gated=gated
    )  # fmt: skip
    row, sums = layers.add_rms_norm(x, residual, *norm)
    assert torch.equal(total, sums)
    exact = (
        references.dequantize_packed(made[0], scales, None)
        if nibbles
        else references.dequantize(made[0], scales, (1, depth))
    )
    expected = (row.float() @ exact.T + bias.float()).to(dtype)
    if gated:
        assert normed is None
        expected = layers.silu_mul(expected)
    else:
        assert (normed.float() - row.float()).abs().max() <= 1e-2 * row.float().abs().max()
    far = (found.float() - expected.float()).abs().max()
    assert far <= (4e-3 if dtype == torch.float16 else 2e-2) * expected.float().abs().max(), far
    again = coded_ring.product(row, made[0], scales, bias, Ring(2, 2), gated=gated)
    assert (again.float() - expected.float()).abs().max() <= 2e-2 * expected.float().abs().max()


def test_what_it_takes() -> None:
    codes, scales, zeros = weight(torch.int32, 32, 4096, (1, 128), zeros=True)
    assert coded_ring.fits(codes, scales, (1, 128), None)
    assert not coded_ring.fits(codes, scales, (1, 128), zeros)
    assert not coded_ring.fits(codes, scales.float(), (1, 128), None)
    assert coded_ring.fits(codes, scales.bfloat16(), (1, 128), None)
    assert not coded_ring.fits(codes, scales, (1, 64), None)
    assert not coded_ring.fits(codes[:, :384].contiguous(), scales, (1, 128), None)
