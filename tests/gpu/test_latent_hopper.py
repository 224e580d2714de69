"""Latent attention by the Hopper kernel, against the formula; only on such a GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon knows no interpreter"),
]
RANK, WIDTH, SCALE = 512, 576, 192**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "splits", "page"), [(16, 1, 16), (16, 4, 16), (128, 2, 64), (80, 1, 32), (1, 3, 128)]
)
def test_sums(heads: int, splits: int, page: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from frame.kernels import latent_hopper

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
    assert latent_hopper.serves(query, cache, RANK)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for _ in range(2):
        found = latent_hopper.latent_decode(
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
