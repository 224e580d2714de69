"""Changing logits in place in Triton: biases, grammar masks, penalties and their counts.

The references are in `frame.core.ops.logits`. Each function is one launch and one pass over the rows that it changes,
and never waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "token_ids", "values"])
def _add(table, rows, token_ids, values, count, stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < count
    row = tl.load(rows + entry, mask=exists, other=-1).to(tl.int64)
    token = tl.load(token_ids + entry, mask=exists, other=-1)
    exists = (row >= 0) & (token >= 0)
    value = 1
    if values is not None:
        value = tl.load(values + entry, mask=exists, other=0.0)
    tl.atomic_add(table + row * stride + token, value, mask=exists, sem="relaxed")


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """As `frame.core.ops.logits.add_bias`, for float32 logits.

    Several values of one logit are added in no fixed order. The sampler gives at most one bias beside zeros and -inf
    for a logit, whose sum is exact in any order.
    """
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, 256),)
        _add[grid](logits, rows, token_ids, values, count, logits.stride(0), BLOCK=256)


def count_tokens(counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """As `frame.core.ops.logits.count_tokens`."""
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, 256),)
        _add[grid](counts, rows, token_ids, None, count, counts.stride(0), BLOCK=256)


@triton.jit
def _apply_bitmask(logits, rows, words, vocab, stride, words_stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab
    word = tl.load(words + place * words_stride + (token >> 5), mask=exists, other=0)
    forbidden = exists & (((word >> (token & 31)) & 1) == 0) & (row >= 0)
    tl.store(logits + row * stride + token, tl.full([BLOCK], -float("inf"), tl.float32), mask=forbidden)


def apply_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """As `frame.core.ops.logits.apply_bitmask`; reads no logit, and writes -inf only."""
    vocab = logits.shape[1]
    if len(rows):
        grid = (len(rows), triton.cdiv(vocab, _BLOCK))
        _apply_bitmask[grid](logits, rows, words, vocab, logits.stride(0), words.stride(0), BLOCK=_BLOCK)


# One kernel serves any set of penalties: which of them a batch has is an argument, so that nothing is compiled anew.
@triton.jit(do_not_specialize=["repeats", "frequents", "presents"])
def _penalize(
    logits, rows, in_prompt, counts, repetition, frequency, presence, repeats, frequents, presents,
    vocab, stride, prompt_stride, counts_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = (token < vocab) & (row >= 0)
    count = tl.load(counts + place * counts_stride + token, mask=exists, other=0)
    seen = count > 0
    if repeats != 0:
        seen = seen | (tl.load(in_prompt + place * prompt_stride + token, mask=exists, other=0) != 0)
    # Tokens that were never seen keep their logits, so that most of a row is neither read nor written.
    value = tl.load(logits + row * stride + token, mask=exists & seen, other=0.0)
    if repeats != 0:
        factor = tl.zeros_like(value) + tl.load(repetition + place)
        value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    if frequents != 0:
        value -= count.to(tl.float32) * tl.load(frequency + place)
    if presents != 0:
        value -= tl.where(count > 0, tl.load(presence + place), 0.0)
    tl.store(logits + row * stride + token, value, mask=exists & seen)


def penalize(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
) -> None:
    """As `frame.core.ops.logits.penalize`."""
    vocab = logits.shape[1]
    if len(rows):
        grid = (len(rows), triton.cdiv(vocab, _BLOCK))
        _penalize[grid](
            logits, rows, in_prompt.view(torch.uint8), output_counts,
            *(logits if given is None else given for given in (repetition, frequency, presence)),
            *(int(given is not None) for given in (repetition, frequency, presence)),
            vocab, logits.stride(0), in_prompt.stride(0), output_counts.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip
