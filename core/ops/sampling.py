"""Drawing tokens: temperature, min-p, top-k, top-p, and the draw itself.

Every row depends on its own logits and parameters alone: sums that decide what is kept are taken in integers, so that
no batch and no order of summation can move a threshold. Knows no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .random import Purpose, add_gumbel_noise, gumbel_noise, stream_keys

_LOWEST = torch.finfo(torch.float32).min
#: Probability relative to the best token's, as an integer: below 2^-40 of it a token has no mass.
_MASS_SCALE = float(2**40)
#: Candidates looked at before a whole vocabulary is sorted for top-p.
_TOP_P_WIDTH = 1024


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int32 [N], their logits [N]) of the best of each row of `logits` [N, V]; ties go to the lowest id.

    A row with NaN yields the place and value of its first NaN.
    """
    best = logits.max(-1)
    return best.indices.to(torch.int32), best.values


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """int32 [N]: argmax over the kept ids of logits / temperature + Gumbel noise, ties to the lowest id.

    `logits` float32 [N, V]; per row [N]: `temperature` (0 is greedy), `top_k` int (0 is off), `top_p` (1 is off),
    `min_p` (0 is off), `seeds` and `positions` int64 of the noise. A row without a finite best logit yields the id
    where that shows (NaN, infinity), never an id outside the vocabulary.
    """
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    random = temperature > 0
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    keys = stream_keys(seeds, positions, Purpose.TOKEN)
    for rows, kind in ((~random, 0), (random & ~filtered, 1), (random & filtered, 2)):
        index = rows.nonzero().squeeze(-1)
        if not len(index):
            continue
        chosen = logits if len(index) == len(logits) else logits.index_select(0, index)
        if kind == 0:
            tokens[index] = greedy(chosen)[0]
            continue
        scores = chosen / temperature[index, None]
        if kind == 1:
            add_gumbel_noise(scores, keys[index])
            tokens[index] = greedy(scores)[0]
        else:
            threshold = keep_threshold(scores, top_k[index], top_p[index], min_p[index])
            tokens[index] = _draw_kept(scores, threshold, keys[index])
    return tokens


def keep_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [N]: the score from which on a row's ids are kept; every id of exactly that score is kept too.

    `scores` float32 [N, V] are logits after the temperature. In this order, each over what the former kept: min-p
    (probability at least min_p times the best), top-k (the k best), top-p (the fewest best whose probabilities reach
    p). At least the best id stays; ids of score -inf never do.
    """
    best = scores.amax(-1)
    threshold = (best + min_p.log()).clamp_(min=_LOWEST)
    limited = (top_k > 0) & (top_k < scores.shape[-1])
    width = int(torch.where(limited, top_k, 0).max())
    if width:
        ranked = scores.topk(width, -1).values
        last = ranked.gather(-1, (top_k.long().clamp(1, width) - 1)[:, None]).squeeze(-1)
        threshold = torch.where(limited, torch.maximum(threshold, last), threshold)
    nucleus = (top_p < 1).nonzero().squeeze(-1)
    if len(nucleus):
        part = scores if len(nucleus) == len(scores) else scores.index_select(0, nucleus)
        threshold[nucleus] = _top_p_threshold(part, best[nucleus], threshold[nucleus], top_p[nucleus])
    return threshold


def _top_p_threshold(scores: Tensor, best: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """The threshold [N] that also satisfies `top_p` among the ids that are at or above `threshold` [N]."""
    wanted = top_p.double() * _mass(scores, best, threshold).sum(-1).double()
    width = min(_TOP_P_WIDTH, scores.shape[-1])
    result, reached = _walk(scores.topk(width, -1).values, best, threshold, wanted)
    rest = (~reached).nonzero().squeeze(-1)
    if len(rest) and width < scores.shape[-1]:
        ranked = scores[rest].sort(-1, descending=True).values
        result[rest] = _walk(ranked, best[rest], threshold[rest], wanted[rest])[0]
    return result


def _walk(ranked: Tensor, best: Tensor, threshold: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(thresholds [N], whether `wanted` mass was reached [N]) along scores `ranked` [N, K] from the best down."""
    mass = _mass(ranked, best, threshold)
    total = mass.cumsum(-1)
    count = ((total - mass) < wanted[:, None]).sum(-1).clamp_(min=1)
    last = ranked.gather(-1, (count - 1)[:, None]).squeeze(-1)
    return torch.maximum(threshold, last), (total[:, -1] >= wanted) | (ranked[:, -1] < threshold)


def _mass(scores: Tensor, best: Tensor, threshold: Tensor) -> Tensor:
    """int64: unnormalised probability of each score, 0 below the threshold."""
    share = (scores - best[:, None]).exp_().mul_(_MASS_SCALE)
    share.masked_fill_(scores < threshold[:, None], 0.0)
    return share.nan_to_num_(0.0, posinf=0.0).to(torch.int64)


def _draw_kept(scores: Tensor, threshold: Tensor, keys: Tensor) -> Tensor:
    """As `draw`, for rows of which few ids are kept: noise is computed for those alone."""
    rows, token_ids = (scores >= threshold[:, None]).nonzero(as_tuple=True)
    token_ids = token_ids.to(torch.int32)
    noisy = scores[rows, token_ids] + gumbel_noise(keys[rows], token_ids)
    best = scores.max(-1)
    top = torch.full_like(threshold, -torch.inf).scatter_reduce_(0, rows, noisy, "amax")
    won = noisy == top[rows]
    tokens = torch.full_like(threshold, scores.shape[-1], dtype=torch.int32)
    tokens.scatter_reduce_(0, rows[won], token_ids[won], "amin")
    return torch.where(best.values.isfinite(), tokens, best.indices.to(torch.int32))
