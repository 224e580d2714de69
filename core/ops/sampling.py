"""Drawing tokens: temperature, min-p, top-k, top-p, the draw itself, and which drafts of a speculator it confirms.

Every row depends on its own logits and parameters alone: sums that decide what is kept are taken in integers, so that
no batch and no order of summation can move a threshold. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .random import CHUNK, add_gumbel_noise, gumbel_noise, shifted_keys, stream_keys

_LOWEST = torch.finfo(torch.float32).min
#: Probability relative to the best token's, as an integer: below 2^-40 of it a token has no mass.
_MASS_SCALE = float(2**40)
#: Buckets of scores for top-p, and how many make one unit; together they reach to where there is no mass.
_BUCKETS = 1024
_BUCKETS_PER_UNIT = 32


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int32 [N], their logits float32 [N]) of the best of each row of `logits` [N, V]; ties: the lowest id.

    A row with NaN yields the place and value of its first NaN.
    """
    best = logits.max(-1)
    return best.indices.to(torch.int32), best.values.float()


def join_drawn(token_ids: Tensor, drawn: Tensor) -> Tensor:
    """int32 [2, N]: ids int32 [N], and the bits of their logits float32 [N]."""
    return torch.stack((token_ids, drawn.view(torch.int32)))


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

    `logits` [N, V] are read as float32. Per row [N]: `temperature` (0 is greedy), `streams` and `positions` int64 of
    the noise, and the filters of `keep_threshold`, None where no row has one. A row without a finite best logit yields
    the id where that shows (NaN, infinity), never an id outside the vocabulary.
    """
    keys = stream_keys(streams, positions)
    random = temperature > 0
    filtered = _any_filter(top_k, top_p, min_p)
    plain = random if filtered is None else random & ~filtered
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for rows in _blocks(plain, logits.shape[-1]):
        scores = logits[rows].float() / temperature[rows, None]
        add_gumbel_noise(scores, keys[rows])
        tokens[rows] = greedy(scores)[0]
    for rows in () if filtered is None else _blocks(random & filtered, logits.shape[-1]):
        scores = logits[rows].float() / temperature[rows, None]
        limits = (None if limit is None else limit[rows] for limit in (top_k, top_p, min_p))
        tokens[rows] = _draw_kept(scores, keep_threshold(scores, *limits), keys[rows])
    for rows in _blocks(~random, logits.shape[-1]):
        tokens[rows] = greedy(logits[rows])[0]
    return tokens


def best_of_part(
    logits: Tensor,
    first: int,
    temperature: Tensor | None = None,
    streams: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores float32 [N], token ids int32 [N], their logits float32 [N]): who wins among a part of the vocabulary.

    `logits` [N, V'] are those of the ids from `first` on. Scores are what `greedy` compares, or with other arguments
    what `draw` does without filters; the part whose score is highest, the first of equals, has the token of all.
    """
    if temperature is None or streams is None or positions is None:
        token_ids, values = greedy(logits)
        return values, token_ids + first, values
    random, keys = temperature > 0, shifted_keys(stream_keys(streams, positions), first)
    scores = logits.float() / torch.where(random, temperature, 1.0)[:, None]
    for rows in _blocks(random, logits.shape[-1]):
        noisy = scores[rows]
        add_gumbel_noise(noisy, keys[rows])
        scores[rows] = noisy
    token_ids, best = greedy(scores)
    return best, token_ids + first, logits.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()


def join_parts(came: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int32 [N], their logits float32 [N]) of the part of the vocabulary whose score is highest in each row.

    `came` int32 [parts, 3, N] are the bits of what `best_of_part` gives for each. The first of equal scores wins, and
    NaN before all.
    """
    winner = came[:, 0].view(torch.float32).argmax(0, keepdim=True)
    tokens, logits = (came[:, place].gather(0, winner).squeeze(0) for place in (1, 2))
    return tokens, logits.view(torch.float32)


def _blocks(rows: Tensor, width: int) -> Sequence[slice | Tensor]:
    """Indices of the rows that are True in `rows` bool [N], in parts that fit the cache at `width` elements a row."""
    size = max(1, CHUNK // width)
    index = rows.nonzero().squeeze(-1)
    if len(index) == len(rows):
        return [slice(start, start + size) for start in range(0, len(rows), size)]
    return index.split(size) if len(index) else ()


def _any_filter(top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor | None:
    """bool [N]: the rows that have a filter; None when the batch has none."""
    active = [] if top_k is None else [top_k > 0]
    active += [] if top_p is None else [top_p < 1]
    active += [] if min_p is None else [min_p > 0]
    return torch.stack(active).any(0) if active else None


def _draw_kept(scores: Tensor, threshold: Tensor, keys: Tensor) -> Tensor:
    """The tokens drawn from the ids whose scores reach `threshold` [N]; noise is computed for these ids alone."""
    rows, token_ids = (scores >= threshold[:, None]).nonzero(as_tuple=True)
    noisy = scores[rows, token_ids] + gumbel_noise(keys[rows], token_ids.to(torch.int32))
    best = scores.max(-1)
    top = torch.full_like(threshold, -torch.inf).scatter_reduce_(0, rows, noisy, "amax")
    losing = noisy < top[rows]
    tokens = torch.full((len(scores),), scores.shape[-1], dtype=rows.dtype, device=rows.device)
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
    if top_k is not None:
        limited = (top_k > 0) & (top_k < scores.shape[-1])
        width = int(torch.where(limited, top_k, 0).max())
        if width:
            ranked = scores.topk(width, -1).values
            last = ranked.gather(-1, (top_k.long().clamp(1, width) - 1)[:, None]).squeeze(-1)
            threshold = torch.where(limited, torch.maximum(threshold, last), threshold)
    if top_p is not None:
        nucleus, open_ended = top_p < 1, threshold == _LOWEST
        for rows, limit in ((nucleus & open_ended, _top_p_of_all), (nucleus & ~open_ended, _top_p_of_kept)):
            index = rows.nonzero().squeeze(-1)
            if len(index):
                threshold[index] = limit(
                    scores if len(index) == len(scores) else scores[index], best[index], threshold[index], top_p[index]
                )
    # a share so small that it rounds to nothing still keeps the best
    return torch.minimum(threshold, best.clamp(min=_LOWEST))


def _top_p_of_all(scores: Tensor, best: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds [N] of top-p over whole rows: a histogram by score tells in which bucket the probabilities reach p."""
    del threshold
    mass = _mass(scores, best[:, None])
    distance = (best[:, None] - scores).mul_(_BUCKETS_PER_UNIT)
    bucket = distance.nan_to_num_(0.0, posinf=_BUCKETS).clamp_(max=_BUCKETS - 1).to(torch.int64)
    share = torch.zeros((len(scores), _BUCKETS), dtype=torch.int64, device=scores.device)
    share.scatter_add_(1, bucket, mass)
    total = share.cumsum(-1)
    wanted = top_p.double() * total[:, -1].double()
    before = total - share
    last = (before < wanted[:, None]).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    rows, token_ids = (bucket == last).nonzero(as_tuple=True)
    return _reach(scores[rows, token_ids], mass[rows, token_ids], rows, before.gather(-1, last).squeeze(-1), wanted)


def _top_p_of_kept(scores: Tensor, best: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds [N] of top-p over the ids at or above `threshold`, which are few."""
    rows, token_ids = (scores >= threshold[:, None]).nonzero(as_tuple=True)
    kept = scores[rows, token_ids]
    mass = _mass(kept, best[rows])
    total = torch.zeros(len(scores), dtype=torch.int64, device=scores.device).index_add_(0, rows, mass)
    return _reach(kept, mass, rows, torch.zeros_like(total), top_p.double() * total.double())


def _reach(scores: Tensor, mass: Tensor, rows: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
    """The lowest score [N] needed for each row to reach `wanted` [N] mass, from the best candidate down.

    Candidate i, of row rows[i], has scores[i] and mass[i]; `before` [N] is the mass of ids above every candidate.
    """
    order = scores.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    scores, mass, rows = scores[order], mass[order], rows[order]
    above = mass.cumsum(0) - mass
    first = torch.zeros_like(before).scatter_reduce_(0, rows, above, "amin", include_self=False)
    needed = above - first[rows] + before[rows] < wanted[rows]
    lowest = torch.full(wanted.shape, torch.inf, dtype=scores.dtype, device=scores.device)
    return lowest.scatter_reduce_(0, rows[needed], scores[needed], "amin")


def _mass(scores: Tensor, best: Tensor) -> Tensor:
    """int64: probability of each score relative to the best, as a whole number."""
    return (scores - best).exp_().mul_(_MASS_SCALE).nan_to_num_(0.0, posinf=0.0).to(torch.int64)


def accept_drafts(token_ids: Tensor, drafts: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int32 [S, k+1], counts int32 [S]): of each row the draws up to and including the first that is no draft.

    `token_ids` int32 [S, k+1]: what was drawn after the last known token, and after each of `drafts` int32 [S, k], of
    which row i has `limits[i]`. A draw counts only while all drafts before it equal the draws before it. The noise of a
    draw depends on its position alone, so the tokens are those that single steps would draw. The rest is -1.
    """
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    equal = (token_ids[:, :-1] == drafts) & (places[:-1] < limits[:, None])
    counts = equal.cumprod(-1).sum(-1, dtype=torch.int32) + 1
    return token_ids.masked_fill(places >= counts[:, None], -1), counts
