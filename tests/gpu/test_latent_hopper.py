"""Latent attention by the Hopper kernels, against the formula; only on such a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from frame.kernels import latent_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon knows no interpreter"),
]
RANK, WIDTH, SCALE = 512, 576, 192**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("module", "heads", "splits", "page"),
    [
        ("latent_hopper", 16, 1, 16),
        ("latent_hopper", 16, 4, 16),
        ("latent_hopper", 128, 2, 64),
        ("latent_hopper", 80, 1, 32),
        ("latent_hopper", 1, 3, 128),
        ("latent_few", 16, 1, 16),
        ("latent_few", 16, 4, 16),
        ("latent_few", 16, 17, 64),
        ("latent_few", 12, 3, 32),
        ("latent_few", 8, 2, 16),
        ("latent_few", 1, 1, 128),
        ("latent_few", 20, 128, 256),
    ],
)
def test_sums(module: str, heads: int, splits: int, page: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    kernel = import_module(f"frame.kernels.{module}")
    torch.manual_seed(heads)
    lengths = [1000, 0, 1, 64, 129, 700, 4096]
    blocks = [-(-length // page) for length in lengths]
    cache = torch.full((sum(blocks) + 1, page, WIDTH), float("nan"), dtype=dtype, device="cuda")
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
    order = torch.randperm(sum(blocks), device="cuda").int() + 1
    latents, slots, first = [], torch.full((len(lengths),), -1, device="cuda"), 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = order[first : first + count]
        first += count
        own = torch.randn(length, WIDTH, device="cuda").to(dtype)
        latents.append(own)
        if length:
            places = torch.arange(length, device="cuda")
            cache[table[row, places // page].long(), places % page] = own
            slots[row] = table[row, (length - 1) // page].long() * page + (length - 1) % page
            cache[slots[row] // page, slots[row] % page] = float("nan")  # the launch stores the newest
    newest = torch.stack([own[-1] if len(own) else torch.zeros(WIDTH, dtype=dtype, device="cuda") for own in latents])
    query = torch.randn(len(lengths), heads, WIDTH, device="cuda").to(dtype)
    assert kernel.serves(query, cache, RANK)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for _ in range(2):
        found = kernel.latent_decode(
            query, newest, cache, slots, lens, numbers, table, scale=SCALE, splits=splits
        )  # fmt: skip
        for row, own in enumerate(latents):
            weights = (query[row].float() @ own.float().T * SCALE).softmax(-1)
            expected = weights @ own.float()[:, :RANK]
            assert (found[row].float() - expected).abs().max() <= 2e-2 * max(
                1.0, float(expected.abs().max()) if len(own) else 0
            )
    for row, length in enumerate(lengths):
        if length:
            assert torch.equal(cache[slots[row] // page, slots[row] % page], newest[row])


@dataclass
class Step:
    """Decodes of rows over a cache that lacks their newest latents; what a kernel is given, in its order."""

    query: Tensor
    newest: Tensor
    cache: Tensor
    slots: Tensor
    lens: Tensor
    numbers: Tensor
    table: Tensor

    def run(self, kernel, **how) -> tuple[Tensor, Tensor]:
        """(What the kernel says, the cache that it leaves)."""
        cache = self.cache.clone()
        given = self.newest, cache, self.slots, self.lens, self.numbers, self.table
        return kernel(self.query, *given, scale=SCALE, **how), cache


def step_of(lengths: list[int], heads: int, page: int, dtype: torch.dtype) -> Step:
    """Rows of random latents. Those of a token or none are padding: they store nothing and read block 0."""
    torch.manual_seed(len(lengths) + heads)
    blocks = [-(-length // page) if length > 1 else 0 for length in lengths]
    cache = torch.randn(sum(blocks) + 1, page, WIDTH, device="cuda").to(dtype)
    order = (torch.randperm(sum(blocks)) + 1).int()
    table, slots = torch.zeros(len(lengths), max(blocks), dtype=torch.int32), torch.full((len(lengths),), -1)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = order[first : first + count]
        first += count
        if count:
            block, place = divmod(length - 1, page)
            slots[row] = int(table[row, block]) * page + place
    stored = slots[slots >= 0].cuda()
    cache.view(-1, WIDTH)[stored] = float("nan")
    cache.view(-1, WIDTH)[[place for place in (slots[slots >= 0] + 1).tolist() if place % page]] = float("nan")
    query, newest = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((len(lengths), heads, WIDTH), (len(lengths), WIDTH))
    )
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Step(query, newest, cache, slots.cuda(), lens, numbers, table.cuda())


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    ("heads", "splits", "page", "rows", "most"),
    [
        (16, 1, 16, 301, 900),
        (16, 1, 16, 1024, 130),
        (16, 1, 16, 20, 900),
        (16, 4, 16, 301, 900),
        (12, 1, 32, 301, 900),
        (8, 3, 16, 150, 900),
        (8, 1, 64, 301, 64),
        (20, 2, 256, 301, 900),
    ],
)
def test_parts_in_turn(heads: int, splits: int, page: int, rows: int, most: int, draws: bool) -> None:
    """Rows of unequal lengths and padding, more parts than multiprocessors or fewer: the bits of one part a program."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    few = import_module("frame.kernels.latent_few")
    lengths = torch.randint(2, most + 1, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    lengths[3:8] = [1, 0, 64, 65, 0]
    lengths[-6:] = [most, 1, 1, 0, 1, 0]
    step = step_of(lengths, heads, page, torch.bfloat16)
    assert few.serves(step.query, step.cache, RANK)
    launch = latent_decode.launch_for(heads, torch.bfloat16)
    expected, stored = step.run(latent_decode.latent_decode, rank=RANK, launch=launch)
    alone, _ = step.run(few.latent_decode, splits=splits, in_turn=False)
    for _ in range(3):  # the counter of drawn parts begins anew each time
        found, cache = step.run(few.latent_decode, splits=splits, in_turn=True, draws=draws)
        assert torch.equal(found, alone)
        assert torch.equal(cache.nan_to_num(7.0), stored.nan_to_num(7.0))
    assert not expected.isnan().any()
    assert (found.float() - expected.float()).abs().max() <= 2e-2 * max(1.0, float(expected.float().abs().max()))
