"""Edits of logits and log-probabilities against their references: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.ops import logits as reference
from frame.kernels import logits as kernels
from frame.kernels.logprobs import MAX_NARROW, top_logprobs

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=dtype)


def check_edit(name: str, table: torch.Tensor, *rest: torch.Tensor | None, exact: bool = True) -> None:
    expected = table.clone()
    getattr(reference, name)(expected, *rest)
    found = table.clone().to(DEVICE)
    getattr(kernels, name)(found, *(None if value is None else value.to(DEVICE) for value in rest))
    torch.testing.assert_close(found.cpu(), expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


def test_biases_meet() -> None:
    rows, token_ids = ints(4, 600), ints(9, 600)
    values = torch.zeros(600)
    values[:30:3] = -torch.inf
    rows[0], token_ids[0], values[0] = 3, 1999, 1.5
    check_edit("add_bias", torch.randn(4, 2000), rows, token_ids, values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_grow_by_every_entry(dtype: torch.dtype) -> None:
    check_edit("count_tokens", ints(5, 4, 50, dtype=torch.int32), ints(4, 700, dtype=dtype), ints(7, 700, dtype=dtype))
    filled = ints(4, 700, dtype=dtype) - 1, ints(7, 700, dtype=dtype) - 1
    check_edit("count_tokens", ints(5, 4, 50, dtype=torch.int32), *filled)


@pytest.mark.parametrize("vocab", [31, 64, 2050])
def test_grammar_masks_forbid(vocab: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, (vocab + 31) // 32), dtype=torch.int32)
    check_edit("apply_bitmask", torch.randn(5, vocab), torch.tensor([4, 0, 3]), words)


@pytest.mark.parametrize("given", ["rfp", "r", "f", "p", "fp"])
def test_penalties(given: str) -> None:
    factors = {
        "r": torch.tensor([1.3, 1.0, 0.7]),
        "f": torch.tensor([0.5, 0.0, -1.0]),
        "p": torch.tensor([0.0, 0.3, 1]),
    }
    chosen = [factors[name] if name in given else None for name in "rfp"]
    counts = ints(3, 3, 1500, dtype=torch.int32) * ints(2, 3, 1500, dtype=torch.int32)
    in_prompt = ints(2, 3, 1500).bool()
    for rows in (torch.tensor([4, 0, 1]), torch.tensor([3, -1, -1])):
        check_edit("penalize", torch.randn(5, 1500), rows, in_prompt, counts, *chosen, exact=False)


def check_logprobs(logits: torch.Tensor, k: int, normalize: bool) -> None:
    token_ids = ints(logits.shape[1], len(logits), dtype=torch.int32)
    token_ids[0] = logits[0].argmax()
    ids, values, ranks = (part.cpu() for part in top_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), k, normalize))
    _, expected, _ = reference.top_logprobs(logits, token_ids, k, normalize)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    own = logits.gather(1, token_ids.long()[:, None])
    assert torch.equal(ranks, (logits > own).sum(1, dtype=torch.int32) + 1)
    assert (ids.dtype, values.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    assert ids[:, 0].tolist() == token_ids.tolist()
    assert torch.equal(ids[:, 1:], order.to(torch.int32))


@pytest.mark.parametrize(
    ("k", "vocab", "normalize"),
    [
        *((k, vocab, True) for k, vocab in ((0, 700), (5, 7), (7, 7), (20, 3000), (32, 40000))),
        *((k, vocab, False) for k, vocab in ((0, 700), (7, 7))),
        *(pytest.param(k, vocab, False, marks=pytest.mark.slow) for k, vocab in ((5, 7), (20, 3000), (32, 40000))),
    ],
)
def test_log_probabilities(k: int, vocab: int, normalize: bool) -> None:
    check_logprobs(torch.randn(3, vocab) * 4, k, normalize)


def test_equal_log_probabilities_come_by_the_lowest_id() -> None:
    check_logprobs(torch.zeros(2, 5000), 9, True)
    check_logprobs((torch.randn(3, 5000) * 2).round(), 20, True)


def test_fewer_tokens_than_asked_for() -> None:
    logits = torch.full((2, 3000), -torch.inf)
    logits[:, 100:2900:700] = torch.randn(2, 4)
    check_logprobs(logits, 9, False)
    check_logprobs(logits, 9, True)


def test_more_than_the_kernel_takes() -> None:
    """There torch sorts, which promises no order of equal logits."""
    check_logprobs(torch.stack([torch.randperm(900), torch.randperm(900)]) / 100.0, MAX_NARROW + 1, True)


def test_rows_that_are_not_finite_stay_in_the_vocabulary() -> None:
    logits = torch.randn(3, 2000)
    logits[0, 1500], logits[1] = float("nan"), float("-inf")
    ids, values, _ = top_logprobs(logits.to(DEVICE), ints(9, 3, dtype=torch.int32).to(DEVICE), 4, True)
    assert ((ids >= 0) & (ids < 2000)).all()
    assert values[0].isnan().all()
    assert not values[1].isfinite().any()
    assert values[2].isfinite().all()
