"""Products of rows in two halves with nibbles, against their formula: on a Hopper GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import quantized as references
from frame.kernels import halves, nibble_tiles, nibbles_hopper
from frame.kernels.nibble_tiles import NibbleTile
from frame.plugins.quantization.packing import pack_nibbles
from tests.gpu.chains import check_chain
from tests.gpu.test_coded_fragments import weight

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
BF16, F32 = torch.bfloat16, torch.float32
#: (outputs, columns, group, rows, tile, programs): whole tiles and uneven ones, shared by programs or not, rings longer
#: and shorter than a program's steps, and columns of no whole step.
SMALL = [
    (128, 128, 128, 9, NibbleTile(1, 1, 2), 5), (200, 512, 128, 33, NibbleTile(1, 2, 4), 3),
    (300, 384, 64, 23, NibbleTile(2, 1, 2), 3), (200, 384, 32, 64, NibbleTile(1, 1, 3), 4),
    (130, 896, 896, 17, NibbleTile(1, 1, 2, whole=True), 1), (72, 768, 256, 16, NibbleTile(2, 2, 2), 3),
    (1, 640, 128, 50, None, 2), (600, 256, 64, 64, NibbleTile(1, 2, 2, whole=True), 2), (64, 128, 32, 2, None, 8),
]  # fmt: skip
LARGE = [
    (6144, 4096, 128, 64, None, 0), (4096, 4096, 128, 33, None, 0), (4096, 14336, 128, 17, None, 0),
    (28672, 4096, 128, 64, None, 0), (28672, 4096, 128, 64, NibbleTile(2, 1, 6, whole=True), 0),
    (28672, 4096, 128, 48, NibbleTile(2, 2, 3), 0), (4104, 2944, 128, 16, None, 0), (1000, 2816, 64, 13, None, 0),
    (4096, 4096, 32, 64, None, 0), (6144, 4096, 4096, 30, None, 0), (4096, 14336, 128, 64, NibbleTile(1, 1, 8), 0),
]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


def rows_of(kind: str, rows: int, depth: int) -> Tensor:
    """Rows [rows, depth] that do not follow one another in memory."""
    x = torch.randn(rows, depth + 8)
    if kind == "outliers":
        x[:, ::97] *= 300
    return (x * (1e-3 if kind == "small" else 1.0)).to(BF16).to(DEVICE)[:, :depth]


def scale_of(x: Tensor, exact: Tensor) -> Tensor:
    """[rows, 1]: what errors of a row's products are measured by."""
    return (x.float().square() @ exact.square().T).sqrt().amax(1, keepdim=True) + 1e-30


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("outputs", "depth", "group", "rows", "tile", "programs"), SMALL if INTERPRETED else [*SMALL, *LARGE]
)
def test_products(
    outputs: int, depth: int, group: int, rows: int, tile: NibbleTile | None, programs: int, zeros: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if programs:  # which go from tile to tile, and share some
        monkeypatch.setattr(nibbles_hopper, "num_multiprocessors", lambda _: programs)
    codes, scales, zero = weight(torch.int32, outputs, depth, (1, group), zeros)
    block, exact = (1, group), references.dequantize_packed(codes, scales, zero)
    assert nibble_tiles.fits(codes, scales, block, zero, rows)
    torch.manual_seed(outputs)
    for kind in ("usual", "outliers", "small"):
        x = rows_of(kind, rows, depth)
        bias = torch.randn(outputs, dtype=BF16, device=DEVICE) if kind != "small" else None
        expected = x.float() @ exact.T + (0.0 if bias is None else bias.float())
        split = halves.split_rows(x, halves.width_of(group, depth))
        found = nibbles_hopper.split_product(split, rows, codes, scales, block, zero, bias, F32, tile)
        far = ((found - expected).abs() / scale_of(x, exact)).max()
        # the chip keeps some 14 bits of sums of 8-bit floats, whose nibbles are not less their zeros yet
        assert far < (3e-4 if INTERPRETED else 1e-2), (kind, far)
    rounded = nibbles_hopper.product(x, codes, scales, block, zero, bias, tile)
    assert rounded.dtype == BF16
    assert (rounded.float() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert torch.equal(rounded, nibbles_hopper.product(x, codes, scales, block, zero, bias, tile))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_halves_of_rows(width: int) -> None:
    torch.manual_seed(width)
    x = (torch.randn(13, 640) * torch.logspace(-6, 2, 640)).to(BF16)
    x[3] = 0.0
    found, sums, factors = (one.cpu() for one in halves.split_rows(x.to(DEVICE), width))
    room = halves.room_for(13)
    assert found.shape == (2 * room, 640)
    assert sums.shape == (768 // width, room)
    whole = found[:room].float() + found[room:].float()
    assert torch.equal(sums[: 640 // width].T, whole.unflatten(1, (-1, width)).sum(-1) / 512)
    assert not sums[640 // width :].any()
    assert not whole[13:].any()
    # a byte's two columns are in different halves of their width; four bytes of four threads follow one another
    apart = whole[:13].unflatten(1, (640 // width, 2, width // 32, 4, 4)).permute(0, 1, 4, 3, 5, 2)
    found = apart.reshape(13, 640) * factors[:13, None] / 512
    most = x.float().abs().amax(1, keepdim=True)
    large = x.float().abs() >= most / 512
    assert torch.equal(found[large], x.float()[large])
    assert ((found - x.float()).abs() <= most * 2.0 ** (-16 if INTERPRETED else -17)).all()


def test_columns_of_ordered_groups() -> None:
    """As a checkpoint with an order of activations is multiplied: columns are sorted by group, and x likewise."""
    outputs, depth, group, rows = 192, 512, 128, 12
    codes, scales, zero = weight(torch.int32, outputs, depth, (1, group), zeros=True)
    groups = torch.randperm(depth, generator=torch.Generator().manual_seed(3)).to(DEVICE) % (depth // group)
    order = torch.argsort(groups, stable=True)
    plain = references.unpack_nibbles(codes).float()
    exact = (plain - zero.float()[:, groups]) * scales.float()[:, groups]
    packed = pack_nibbles(references.unpack_nibbles(codes)[:, order])
    x = rows_of("usual", rows, depth)
    found = nibbles_hopper.product(x.index_select(1, order), packed, scales, (1, group), zero)
    expected = x.float() @ exact.T
    assert (found.float() - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.skipif(INTERPRETED, reason="plain launches and graphs are alike there")
def test_chains() -> None:
    """Products that follow one another, each of the one before, while the kernels overlap."""
    codes, scales, zero = weight(torch.int32, 4096, 4096, (1, 128), zeros=True)
    scales = scales / 16
    x = torch.randn(64, 4096, dtype=BF16, device=DEVICE)
    check_chain(x, lambda found: nibbles_hopper.product(found / found.abs().amax(), codes, scales, (1, 128), zero))


def test_what_it_takes() -> None:
    codes, scales, zero = weight(torch.int32, 32, 1024, (1, 128), zeros=True)
    fits = nibble_tiles.fits
    assert fits(codes, scales, (1, 128), zero, 64)
    assert fits(codes, scales, (1, 128), None, 9)
    assert not fits(codes, scales, (1, 128), zero, 65)
    assert not fits(codes, scales[:, :4].contiguous(), (1, 128), None, 64)
    assert not fits(codes, scales.repeat_interleave(8, 1), (1, 16), None, 64)
    assert not fits(codes[:, :100].contiguous(), scales[:, :1].contiguous(), (1, 800), None, 64)
    assert not fits(codes, scales.T.contiguous().T, (1, 128), None, 64)
    assert not fits(codes.to(torch.int8), scales, (1, 16), None, 64)
