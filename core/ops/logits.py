"""Changing logits before a draw, and reading log-probabilities from them.

All ops change float32 logits [N, V] in place. Index vectors say which rows and ids they change; an entry of -1, where a
docstring allows it, is padding and changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i]; entries may repeat. A value of -inf forbids the token."""
    logits.index_put_((rows, token_ids), values, accumulate=True)


def keep_only(logits: Tensor, rows: Tensor, entry_rows: Tensor, token_ids: Tensor) -> None:
    """Sets every logit of `rows` [n] to -inf except at (entry_rows[i], token_ids[i]); rows and entries may repeat."""
    kept = logits[entry_rows, token_ids]
    logits.index_fill_(0, rows, -torch.inf)
    logits[entry_rows, token_ids] = kept


def apply_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbids in logits[rows[i]] every id v whose bit v % 32 of words[i, v // 32] is 0; `words` int32 [n, ⌈V / 32⌉].

    A row may be -1.
    """
    rows, words = rows[rows >= 0], words[rows >= 0]
    vocab_size = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def match_tails(tails: Tensor, patterns: Tensor) -> Tensor:
    """bool [E]: whether patterns[i] [W] equals tails[i] [W]; -1 in a pattern matches anything."""
    return ((tails == patterns) | (patterns == -1)).all(-1)


def penalize(
    logits: Tensor,
    rows: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
) -> None:
    """Penalties of `rows` [n] of `logits`, whose `in_prompt` bool [n, V] and `output_counts` int32 [n, V] are given.

    Repetition (Keskar et al. 2019): logits of tokens in prompt or output are divided by it where positive, else
    multiplied. Then frequency times the count in the output, and presence where that is not 0, are subtracted. A
    penalty [n] that no row has is None. A row may be -1.
    """
    kept = rows >= 0
    if not bool(kept.all()):
        rows, in_prompt, output_counts = rows[kept], in_prompt[kept], output_counts[kept]
        given = (repetition, frequency, presence)
        repetition, frequency, presence = (None if penalty is None else penalty[kept] for penalty in given)
    part = logits[rows]
    in_output = output_counts > 0
    if repetition is not None:
        factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
        part = torch.where(part > 0, part / factor, part * factor)
    if frequency is not None:
        part.addcmul_(output_counts.float(), frequency[:, None], value=-1)
    if presence is not None:
        part.addcmul_(in_output.float(), presence[:, None], value=-1)
    logits[rows] = part


def count_tokens(counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """counts[rows[i], token_ids[i]] += 1; `counts` int32 [C, V]. Entries may repeat, and rows and ids may be -1."""
    amounts = ((rows >= 0) & (token_ids >= 0)).to(counts.dtype)
    counts.index_put_((rows.clamp(min=0).long(), token_ids.clamp(min=0).long()), amounts, accumulate=True)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [N, k+1], values float32 [N, k+1], ranks int32 [N]): column 0 is token_ids[i], the rest the k best.

    Values are log-softmax of `logits` [N, V], or the logits themselves without `normalize`. Rank 1 is the best.
    """
    values = logits.log_softmax(-1) if normalize else logits
    chosen = token_ids.long()[:, None]
    own = values.gather(-1, chosen)
    ranks = (values > own).sum(-1, dtype=torch.int32) + 1
    best = values.topk(k, -1)
    ids = torch.cat([chosen, best.indices], -1).to(torch.int32)
    return ids, torch.cat([own, best.values], -1), ranks
