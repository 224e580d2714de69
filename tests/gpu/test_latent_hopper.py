"""Latent attention by the Hopper kernels, against the formula; only on such a GPU."""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

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
