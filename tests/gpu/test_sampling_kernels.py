"""Greedy choice and the draw against their references, id for id: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import random as noise
from frame.core.ops import sampling
from frame.kernels import sampling as kernels

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    return (torch.randn(rows, vocab) * 3).to(DEVICE)


@pytest.mark.parametrize("vocab", [7, 1024, 20000])
def test_greedy_takes_the_lowest_of_equal_ids(vocab: int) -> None:
    logits = make_logits(5, vocab)
    logits[1, 2] = logits[1, vocab - 1] = 99.0
    logits[2] = 1.0
    tokens, values = kernels.greedy(logits)
    expected = logits.cpu().max(-1).values
    first = (logits.cpu() == expected[:, None]).int().argmax(-1)
    assert tokens.tolist() == first.tolist()
    assert torch.equal(values.cpu(), expected)


def test_a_row_that_is_not_finite_shows_it() -> None:
    logits = make_logits(4, 9000)
    logits[0, 8500] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    tokens, values = kernels.greedy(logits)
    assert tokens[0] == 8500
    assert [bool(value.isfinite()) for value in values] == [False, False, False, True]
    assert all(0 <= token < 9000 for token in tokens.tolist())


@pytest.mark.parametrize("vocab", [7, 5000, 20000])
def test_the_draw_is_the_reference_id_for_id(vocab: int) -> None:
    rows = 64 if DEVICE == "cuda" else 12
    logits = make_logits(rows, vocab)
    heat = torch.tensor([0.0, 0.6, 1.0, 2.0] * (rows // 4), device=DEVICE)
    seeds = [noise.seed_stream(seed) for seed in range(rows)]
    streams = torch.tensor(seeds, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(rows, dtype=torch.int64, device=DEVICE) * 37
    found = kernels.draw(logits, heat, streams, positions)
    expected = sampling.draw(logits.clone(), heat, streams, positions)
    assert torch.equal(found, expected)
