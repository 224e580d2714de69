"""Products of some rows with nibbles from a ring of shared memory, against their references: on a Hopper GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import quantized as references

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="there is no interpreter for Gluon"),
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


def weight(outputs: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, the weight in float32)."""
    draw = torch.Generator().manual_seed(outputs + depth)
    codes = torch.randint(-(2**31), 2**31 - 1, (outputs, depth // 8), generator=draw).to(torch.int32).cuda()
    scales = torch.rand(outputs, depth // 128, generator=draw).add(0.5).div(8).to(dtype).cuda()
    return codes, scales, references.dequantize_packed(codes, scales, None)


@pytest.mark.parametrize("sizes", [(1, 3), (1, 2, 8), (1, 3, 4, False), (2, 2, 4, False), (2, 2, 8, False), (2, 2)])
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(("outputs", "depth"), [(128, 256), (77, 1024), (1000, 768), (520, 3584)])
def test_products(
    outputs: int, depth: int, programs: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from frame.kernels import coded_hopper
    from frame.kernels.coded_hopper import Staged

    monkeypatch.setattr(coded_hopper, "num_multiprocessors", lambda _: programs)
    for dtype in (torch.bfloat16, torch.float16):
        codes, scales, exact = weight(outputs, depth, dtype)
        assert coded_hopper.fits(codes, scales, (1, 128), None)
        for rows in (1, 16, 27, 64):
            width = depth + 8 * (rows == 27)  # rows of a wider tensor, too
            x = torch.randn(rows, width, device="cuda").to(dtype)[:, :depth]
            bias = torch.randn(outputs, dtype=dtype, device="cuda") if rows == 27 else None
            expected = x.float() @ exact.T
            expected += 0.0 if bias is None else bias.float()
            found = [coded_hopper.product(x, codes, scales, bias, Staged(*sizes)) for _ in range(3)]
            assert found[0].dtype == dtype
            far = (found[0].float() - expected).abs().max() / expected.abs().max()
            assert far < (1e-3 if dtype == torch.float16 else 1e-2), (rows, far)
            assert torch.equal(found[0], found[1])  # counters stay right, sums have an order
            assert torch.equal(found[0], found[2])


def test_every_column_and_output_is_where_it_belongs() -> None:
    from frame.kernels import coded_hopper
    from frame.kernels.coded_hopper import Staged

    codes, scales, exact = weight(256, 512, torch.float16)
    for first in range(0, 512, 64):
        x = torch.zeros(64, 512, dtype=torch.float16, device="cuda")
        x[range(64), range(first, first + 64)] = 1.0
        found = coded_hopper.product(x, codes, scales, None, Staged(1, 2))
        torch.testing.assert_close(found.float(), exact[:, first : first + 64].T, rtol=1e-3, atol=1e-4)


def test_what_it_takes() -> None:
    from frame.kernels import coded_hopper

    codes, scales, _ = weight(32, 512, torch.float16)
    assert coded_hopper.fits(codes, scales, (1, 128), None)
    assert not coded_hopper.fits(codes, scales, (1, 128), scales)
    assert not coded_hopper.fits(codes, scales[:, ::2].contiguous(), (1, 256), None)
    assert not coded_hopper.fits(codes[:, :48].contiguous(), scales[:, :3].contiguous(), (1, 128), None)
    assert not coded_hopper.fits(codes.to(torch.int8), scales, (1, 128), None)
