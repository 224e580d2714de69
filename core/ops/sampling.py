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
#: Numbers of candidates looked at for top-p before a whole vocabulary is sorted.
_TOP_P_WIDTHS = (64, 1024)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int32 [N], their logits [N]) of the best of each row of `logits` [N, V]; ties go to the lowest id.

    A row with NaN yields the place and value of its first NaN.
    """
    best = logits.max(-1)
    return best.indices.to(torch.int32), best.values


def draw(
    logits: Tensor,
    temperature: Tensor,
    streams: Tensor,
    positions: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """int32 [N]: argmax over the kept ids of logits / temperature + Gumbel noise, ties to the lowest id.

    `logits` float32 [N, V]; per row [N]: `temperature` (0 is greedy), `streams` and `positions` int64 of the noise, and
    the filters of `keep_threshold`, None where no row has one. A row without a finite best logit yields the id where
    that shows (NaN, infinity), never an id outside the vocabulary.
    """
    keys = stream_keys(streams, positions, Purpose.TOKEN)
    random = temperature > 0
    filtered = _any_filter(top_k, top_p, min_p)
    if filtered is None and bool(random.all()):
        return _draw_all(logits / temperature[:, None], keys)
    if filtered is None:
        filtered = torch.zeros_like(random)
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for number, rows in enumerate((~random, random & ~filtered, random & filtered)):
        index = rows.nonzero().squeeze(-1)
        if not len(index):
            continue
        chosen = _rows(logits, index)
        if number == 0:
            tokens[index] = greedy(chosen)[0]
            continue
        scores = chosen / temperature[index, None]
        if number == 1:
            tokens[index] = _draw_all(scores, keys[index])
        else:
            limits = (None if limit is None else limit[index] for limit in (top_k, top_p, min_p))
            tokens[index] = _draw_kept(scores, keep_threshold(scores, *limits), keys[index])
    return tokens


def _any_filter(top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor | None:
    """bool [N]: the rows that are filtered at all; None when no row is."""
    found: Tensor | None = None
    for active in (
        None if top_k is None else top_k > 0,
        None if top_p is None else top_p < 1,
        None if min_p is None else min_p > 0,
    ):
        if active is not None:
            found = active if found is None else found | active
    return found


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index], without a copy when that is all of them; `index` is ascending."""
    return values if len(index) == len(values) else values.index_select(0, index)


def _draw_all(scores: Tensor, keys: Tensor) -> Tensor:
    add_gumbel_noise(scores, keys)
    return greedy(scores)[0]


def _draw_kept(scores: Tensor, threshold: Tensor, keys: Tensor) -> Tensor:
    """The same for rows of which few ids are kept: noise is computed for those alone."""
    rows, token_ids = (scores >= threshold[:, None]).nonzero(as_tuple=True)
    noisy = scores[rows, token_ids] + gumbel_noise(keys[rows], token_ids.to(torch.int32))
    best = scores.max(-1)
    top = torch.full_like(threshold, -torch.inf).scatter_reduce_(0, rows, noisy, "amax")
    losing = noisy < top[rows]
    tokens = torch.full_like(rows[:1], scores.shape[-1]).repeat(len(scores))
    tokens.scatter_reduce_(0, rows, token_ids.masked_fill_(losing, scores.shape[-1]), "amin")
    return torch.where(best.values.isfinite(), tokens, best.indices).to(torch.int32)


def keep_threshold(
    scores: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """float32 [N]: the score from which on a row's ids are kept; every id of exactly that score is kept too.

    `scores` float32 [N, V] are logits after the temperature. In this order, each over what the former kept: `min_p`
    (probability at least that times the best's; 0 is off), `top_k` (the k best; 0 is off), `top_p` (the fewest best
    whose probabilities reach p; 1 is off); None where no row has one. At least the best id stays; ids of score -inf
    never do.
    """
    best = scores.amax(-1)
    threshold = torch.full_like(best, _LOWEST) if min_p is None else (best + min_p.log()).clamp_(min=_LOWEST)
    ranked = limited = None
    if top_k is not None:
        limited = (top_k > 0) & (top_k < scores.shape[-1])
        width = int(torch.where(limited, top_k, 0).max())
        if width:
            ranked = scores.topk(width, -1).values
            last = ranked.gather(-1, (top_k.long().clamp(1, width) - 1)[:, None]).squeeze(-1)
            threshold = torch.where(limited, torch.maximum(threshold, last), threshold)
    if top_p is not None:
        nucleus = top_p < 1
        if ranked is not None and limited is not None:
            _limit_mass(scores, best, threshold, top_p, nucleus & limited, ranked)
            nucleus &= ~limited
        _limit_mass(scores, best, threshold, top_p, nucleus, None)
    return threshold


def _limit_mass(
    scores: Tensor, best: Tensor, threshold: Tensor, top_p: Tensor, rows: Tensor, ranked: Tensor | None
) -> None:
    """Raises `threshold` [N] of `rows` bool [N] so that it satisfies `top_p` among the ids at or above it.

    `ranked` [N, K] holds at least the K best scores of each of these rows down to its threshold, or None.
    """
    index = rows.nonzero().squeeze(-1)
    if not len(index):
        return
    part, top, low = _rows(scores, index), best[index], threshold[index]
    wanted = top_p[index].double() * _mass(part, top, low).sum(-1).double()
    if ranked is not None:
        threshold[index] = _walk(_rows(ranked, index), top, low, wanted)[0]
        return
    result = low.clone()
    rest = torch.arange(len(index), device=scores.device)
    for width in (*_TOP_P_WIDTHS, scores.shape[-1]):
        candidates = _rows(part, rest)
        ranked = (
            candidates.topk(width, -1).values
            if width < scores.shape[-1]
            else candidates.sort(-1, descending=True).values
        )
        result[rest], reached = _walk(ranked, top[rest], low[rest], wanted[rest])
        rest = rest[~reached]
        if not len(rest) or width >= scores.shape[-1]:
            break
    threshold[index] = result


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
