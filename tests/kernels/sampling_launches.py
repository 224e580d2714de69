"""What the sampler and the runner launch, by vocabulary and type; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from frame.core.ops.step import StepBuffers, StepSizes
from frame.kernels import filters, join, logits, logprobs, sampling, step

from .ahead import DEVICE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 64


def _empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def draws(vocab: int, dtype: torch.dtype) -> None:
    """Greedy, random, and with every mix of filters that is a kernel of its own."""
    scores, row = _empty(ROWS, vocab, dtype=dtype), _empty(ROWS)
    stream, top_k = _empty(ROWS, dtype=torch.int64), _empty(ROWS, dtype=torch.int32)
    sampling.greedy(scores)
    sampling.draw(scores, row, stream, stream)
    sampling.best_of_part(scores[:, :-3], 300, row, stream, stream)
    sampling.best_of_part(scores[:, :-3], 300)
    join.join_parts(_empty(8, 3, ROWS, dtype=torch.int32))
    for given in ((top_k, None, None), (None, row, None), (None, None, row), (top_k, row, row)):
        sampling.draw(scores, row, stream, stream, *given)
        if dtype is F32:
            filters.keep_threshold(scores, *given)


def edits(vocab: int) -> None:
    """Biases, masks and penalties."""
    scores, rows = _empty(ROWS, vocab), _empty(ROWS, dtype=torch.int64)
    counts, seen = _empty(ROWS, vocab, dtype=torch.int32), _empty(ROWS, vocab, dtype=torch.bool)
    logits.add_bias(scores, rows, rows, _empty(ROWS))
    logits.count_tokens(counts, rows, rows)
    logits.count_tokens(counts, rows, _empty(ROWS, dtype=torch.int32))
    logits.apply_bitmask(scores, rows, _empty(ROWS, -(-vocab // 32), dtype=torch.int32))
    for kept in range(8):
        factors = [_empty(ROWS) if kept >> place & 1 else None for place in range(3)]
        logits.penalize(scores, rows, seen, counts, *factors)


def best(vocab: int, k: int) -> None:
    """Log-probabilities, raw and normalised."""
    for normalize in (False, True):
        logprobs.top_logprobs(_empty(ROWS, vocab), _empty(ROWS, dtype=torch.int32), k, normalize)


def runner(rows: int, groups: int, block_size: int) -> None:
    """A step's inputs and what it changes."""
    buffers = StepBuffers.allocate(8192, rows, [512] * groups, DEVICE)
    token_ids = _empty(rows, 8192, dtype=torch.int32)
    tables = [_empty(rows, 512, dtype=torch.int32) for _ in range(groups)]
    staged = _empty(3, rows, dtype=torch.int32)
    for padded in (rows, min(rows, 8)):
        sizes = StepSizes(1024, [64] * groups, [block_size] * groups)
        step.build_inputs(buffers, token_ids, tables, buffers.rows[: 3 * padded].view(3, padded), sizes)
    step.write_rows(token_ids, *staged, _empty(1000, dtype=torch.int32))
    step.write_values(_empty(rows, dtype=torch.int32), _empty(rows, dtype=torch.int32), _empty(rows, dtype=torch.int32))
    step.advance(token_ids, staged[0], staged[1], _empty(rows, dtype=torch.int32))


#: Of Qwen, Gemma, GPT-2 (a number of no round multiple), and a tiny one.
VOCABULARIES = (151936, 262144, 50257, 320)


def sampling_launches() -> dict[str, Callable[[], None]]:
    """The sampler's kernels."""
    found: dict[str, Callable[[], None]] = {}
    for vocab in VOCABULARIES:
        found[f"draws of {vocab}"] = partial(draws, vocab, F32)
        found[f"edits of {vocab}"] = partial(edits, vocab)
        found[f"log-probabilities of {vocab}"] = partial(best, vocab, 5)
    found["draws of bfloat16"] = partial(draws, VOCABULARIES[0], BF16)
    found["draws of float16"] = partial(draws, VOCABULARIES[0], F16)
    found["no log-probabilities but the drawn"] = partial(best, VOCABULARIES[0], 0)
    return found


def runner_launches() -> dict[str, Callable[[], None]]:
    """The runner's kernels."""
    found: dict[str, Callable[[], None]] = {}
    for rows, block_size in ((1, 16), (512, 16), (4096, 1), (512, 256)):
        found[f"step of {rows} rows, blocks of {block_size}"] = partial(runner, rows, 2, block_size)
    return found
