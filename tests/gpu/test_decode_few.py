"""Decodes of a few rows that read cached keys early, against the reference: on a GPU, and interpreted."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import attention as reference
from frame.kernels import decode_few
from frame.kernels.decode_few import FewLaunch

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16  # the interpreter multiplies bfloat16 as if its bits were integers
CLOSE = 4e-3
#: Every kind of launch that a plan or a benchmark may choose; rows of the tests have up to 300 tokens.
LAUNCHES = {
    "unsplit": FewLaunch(64, 8),
    "unsplit, large tiles": FewLaunch(128, 8),
    "reads late": FewLaunch(64, 8, early=False),
    "lets nobody in": FewLaunch(64, 8, early=False, lets_in=False),
    "split": FewLaunch(64, 8, 4, 64),
    "split from 128 keys on": FewLaunch(64, 8, 16, 128),
    "more room than parts": FewLaunch(32, 4, 32),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)


def attend(
    lengths: list[int], launch: FewLaunch, *, groups: int = 4, dim: int = 64, page: int = 16, window: int = 0,
    sinks: bool = False, stored: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(found, expected, cache after the launch, cache as the reference leaves it)."""
    kv_heads, rows = 2, len(lengths)
    blocks = [-(-length // page) for length in lengths]
    cache = random(2, sum(blocks) + 1, page, kv_heads, dim, seed=1)
    table = torch.zeros(rows, max(blocks) + 1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)).to(DEVICE).int() + 1
    slots, first = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE), 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = order[first : first + count]
        first += count
        if length:
            last = int(table[row, (length - 1) // page])
            slots[row] = last * page + (length - 1) % page
            cache[:, last, (length - 1) % page :] = float("nan")  # what nobody wrote may be no number
    cache[:, 0] = float("nan")
    query = random(rows, kv_heads * groups, dim, seed=3)
    key, value = (random(rows, kv_heads + 1, dim, seed=seed)[:, :kv_heads] for seed in (4, 5))
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, theirs = torch.full_like(query, float("nan")), cache.clone()
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    features = {"window": window, "sinks": random(kv_heads * groups, seed=6) if sinks else None}
    for _ in range(2):  # counters stay right, and what is stored is not attended to twice
        decode_few.decode_attention(
            query, key, value, cache, slots if stored else torch.full_like(slots, -1), lens, table, scale=dim**-0.5,
            out=out, launch=launch, arrivals=arrivals, **features,
        )  # fmt: skip
    assert not arrivals.any()
    reference.write_kv(key, value, theirs, slots)
    start = (lens > 0).cumsum(0).int()  # the reference takes rows without tokens to have no query
    start = torch.cat([torch.zeros_like(start[:1]), start])
    expected = torch.zeros_like(out, dtype=torch.float32)
    given = query[lens > 0].float(), theirs, start, lens, table
    expected[lens > 0] = reference.paged_attention(*given, scale=dim**-0.5, **features)
    return out, expected, cache, theirs


def near(out: Tensor, expected: Tensor) -> bool:
    return bool((out.float() - expected).abs().max() < CLOSE * expected.abs().max())


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_rows_of_any_length(launch: FewLaunch) -> None:
    out, expected, cache, theirs = attend([140, 0, 1, 64, 65, 300, 129], launch)
    assert near(out, expected)
    assert not out[1].any()
    assert torch.equal(cache.nan_to_num(9), theirs.nan_to_num(9))


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_windows_and_sinks(launch: FewLaunch) -> None:
    assert near(*attend([7, 300, 0, 100, 101], launch, window=100, sinks=True, groups=8)[:2])


@pytest.mark.parametrize(("groups", "dim", "page"), [(1, 128, 16), (7, 96, 48), (16, 64, 1), (2, 80, 32)])
def test_heads_and_pages(groups: int, dim: int, page: int) -> None:
    for name in ("unsplit", "split from 128 keys on"):
        assert near(*attend([77, 260], LAUNCHES[name], groups=groups, dim=dim, page=page)[:2])


def test_a_token_without_a_slot_is_attended_to_and_not_stored() -> None:
    out, expected, cache, _ = attend([33, 130], LAUNCHES["split"], stored=False)
    assert near(out, expected)
    assert cache[:, 0].isnan().all()
    assert int(cache.isnan().any(-1).any(-1).sum()) > 2 * 16


def test_what_there_is_a_kernel_for() -> None:
    usual = 128, 16, torch.bfloat16, torch.bfloat16
    assert decode_few.fits(*usual)
    for place, other in enumerate((256, 17, torch.float16, torch.float8_e4m3fn)):
        assert not decode_few.fits(*usual[:place], other, *usual[place + 1 :])
    assert not decode_few.fits(128, 4, torch.float32, torch.float32)
