"""Decodes over a cache of e4m3 in registers, against the reference: on a GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import attention as reference
from frame.kernels import decode_narrow
from frame.kernels.decode_narrow import NarrowLaunch

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
E4M3 = torch.float8_e4m3fn
DIM, SCALE = 128, 128**-0.5


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float16).to(DEVICE)


def attend(
    lengths: list[int], launch: NarrowLaunch, *, groups: int = 4, page: int = 16, scales=(0.5, 2.0), loud: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(found, expected, cache after the launch, cache as the reference leaves it)."""
    kv_heads, rows = 2, len(lengths)
    blocks = [-(-length // page) for length in lengths]
    cache = (random(2, sum(blocks) + 1, page, kv_heads, DIM, seed=1) * 3).to(E4M3)
    table = torch.zeros(rows, max(blocks) + 1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)).to(DEVICE).int() + 1
    slots, first = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE), 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = order[first : first + count]
        first += count
        if length:
            last = table[row, (length - 1) // page].item()
            slots[row] = last * page + (length - 1) % page
            free = cache.view(torch.uint8)[:, last, (length - 1) % page + 1 :]
            free.fill_(127)  # what nobody wrote may be no number
    query = random(rows, kv_heads * groups, DIM, seed=3) * loud
    key, value = (random(rows, kv_heads + 1, DIM, seed=seed)[:, :kv_heads] for seed in (4, 5))
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(query, float("nan"))
    theirs = cache.clone()
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # counters stay right
        decode_narrow.decode_attention(
            query, key, value, cache, slots, lens, table, scale=SCALE, out=out, launch=launch, arrivals=arrivals,
            key_scale=scales[0], value_scale=scales[1],
            order=torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=DEVICE) if rows > 2 else None,
        )  # fmt: skip
    assert not arrivals.any()
    reference.write_kv(key, value, theirs, slots, key_scale=scales[0], value_scale=scales[1])
    start = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    given = query.float(), theirs, start, lens, table
    expected = reference.paged_attention(*given, scale=SCALE, key_scale=scales[0], value_scale=scales[1])
    return out, expected, cache, theirs


@pytest.mark.parametrize(("tile", "splits", "page"), [(2, 1, 16), (1, 4, 32), (4, 16, 16), (2, 3, 48)])
def test_rows_of_any_length(tile: int, splits: int, page: int) -> None:
    out, expected, cache, theirs = attend([140, 0, 1, 33, 64], NarrowLaunch(splits, groups=tile), page=page)
    assert (out.float() - expected).abs().max() < 4e-3 * expected.abs().max()
    assert not out[1].any()
    assert torch.equal(cache.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("groups", [1, 7, 8])
def test_heads_of_a_key_and_scales_of_heads(groups: int) -> None:
    scales = tuple(torch.tensor(pair, device=DEVICE) for pair in ([0.02, 0.5], [3e-5, 1.75]))
    out, expected, *_ = attend([77, 130], NarrowLaunch(2), groups=groups, scales=scales)
    for head in range(2):  # values of the two KV heads differ by their scales
        mine, own = (x.unflatten(1, (2, groups))[:, head].float() for x in (out, expected))
        assert (mine - own).abs().max() < 4e-3 * own.abs().max()


@pytest.mark.parametrize("loud", [60.0, 1e-6, 0.0])
def test_queries_beyond_the_range_of_float16(loud: float) -> None:
    out, expected, *_ = attend([100], NarrowLaunch(1), loud=loud, scales=(1e-3 if loud > 1 else 1.0, 1.0))
    assert (out.float() - expected).abs().max() < 4e-3 * expected.abs().max()


def test_what_there_is_a_kernel_for() -> None:
    usual = 128, 4, 16, torch.bfloat16, E4M3
    assert decode_narrow.fits(*usual)
    for place, other in enumerate((64, 16, 24, torch.float32, torch.float8_e5m2)):
        assert not decode_narrow.fits(*usual[:place], other, *usual[place + 1 :])
