"""Log-probabilities of the drawn and of the best tokens in Triton; the reference is in `frame.core.ops.logits`.

One pass over the logits sums the exponentials, ranks the drawn token and notes each tile's highest logit; then
one program a row reads only the tiles that hold the row's k best (kernels/tiles.py) and sorts them, equal ones by the
lowest id. Ranks compare logits, so that tokens whose log-probabilities round to the same value still differ in rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import (
    CAP,
    LOWEST,
    STAGES,
    STEP,
    TILE,
    WARPS,
    best_or_nan,
    bisect,
    key_of,
    list_tiles,
    load_tiles,
    search,
    value_of,
)

#: The most tokens that the kernel finds; for more, torch sorts.
MAX_NARROW = 64
_PART_TILES = 128


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _survey(
    logits, token_ids, best, tops, sums, above, vocab, stride, tiles, parts,
    PART_TILES: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: of one part of a row each tile's highest logit, the part's highest logit and its sum of
    exp(x - highest), and how many of its logits are above that of the drawn token.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits += row * stride
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    top = tl.full([STEP], -float("inf"), tl.float32)
    total = tl.zeros([STEP], tl.float32)
    number = tl.zeros([STEP], tl.int32)
    for first in range(0, PART_TILES, STEP):
        tile = part * PART_TILES + first + tl.arange(0, STEP)
        token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        highest = best_or_nan(x, 1)
        tl.store(best + row * tiles + tile, highest, mask=tile < tiles)
        number += tl.sum((x > own).to(tl.int32), 1)
        newer = tl.where(highest > top, highest, top)
        shift = tl.where(newer == -float("inf"), 0.0, newer)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        top = newer
    highest = tl.max(top, 0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(tops + row * parts + part, highest)
    tl.store(sums + row * parts + part, tl.sum(total * tl.exp(top - shift), 0))
    tl.store(above + row * parts + part, tl.sum(number, 0))


@triton.jit
def _collect(logits, listed, count, vocab, threshold, wanted, values, ids, STEP: tl.constexpr, TILE: tl.constexpr):
    """Writes the `wanted` best values, unsorted: all above the threshold, then the first of those equal to it."""
    over = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    SIZE: tl.constexpr = STEP * TILE
    for first in tl.range(0, count, STEP, num_stages=STAGES):
        x, token, exists = load_tiles(logits, listed, first, count, vocab, 1.0, False, STEP, TILE)
        x, token = tl.reshape(x, [SIZE]), tl.reshape(token, [SIZE])
        exists = tl.reshape(exists.to(tl.int32), [SIZE]) > 0
        more = (exists & (x > threshold)).to(tl.int32)
        same = (exists & (x == threshold)).to(tl.int32)
        # Values above the threshold fill the list from its front, equal ones from its back, until both meet.
        place = tl.where(more > 0, over + tl.cumsum(more, 0) - 1, wanted - equal - tl.cumsum(same, 0))
        over += tl.sum(more, 0)
        equal += tl.sum(same, 0)
        stored = (more > 0) | ((same > 0) & (place >= over))
        # Values of later steps may overwrite equal ones that an earlier step stored last.
        tl.debug_barrier()
        tl.store(values + place, x, mask=stored)
        tl.store(ids + place, token, mask=stored)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["wanted"], do_not_specialize_on_alignment=["token_ids"])
def _top(
    logits, token_ids, survey, scratch, out, vocab, stride, tiles, parts, wanted,
    NORMALIZE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program: the `wanted` best tokens of a row, found by what `_survey` wrote of the row."""
    best, tops, sums, above = survey
    listed, found, values, ids = scratch
    out_ids, out_values, ranks = out
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    listed += row * tiles
    values += row * K
    ids += row * K
    part = tl.arange(0, PARTS)
    exists = part < parts
    each = tl.load(tops + row * parts + part, mask=exists, other=-float("inf"))
    top = tl.max(each, 0)
    shift = tl.zeros_like(top)
    if NORMALIZE:
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.load(sums + row * parts + part, mask=exists, other=0.0) * tl.exp(each - base)
        total = tl.sum(total, 0)
        # The best token adds 1, so that only a row of -inf has less. NaN stays, and shows in every value.
        shift = tl.log(tl.where(total < 1.0, 1.0, total))
    else:
        base = shift
    token = tl.load(token_ids + row)
    tl.store(ranks + row, tl.sum(tl.load(above + row * parts + part, mask=exists, other=0), 0) + 1)
    tl.store(out_ids + row * (wanted + 1), token.to(tl.int32))
    tl.store(out_values + row * (wanted + 1), tl.load(logits + token).to(tl.float32) - base - shift)
    lane = tl.arange(0, K)
    kept = lane < wanted
    tl.store(values + lane, tl.full([K], -float("inf"), tl.float32))
    tl.store(ids + lane, tl.zeros([K], tl.int32))
    if (wanted > 0) & (tl.abs(top) < float("inf")):
        tile = tl.arange(0, TILES)
        inside = tile < tiles
        highest = tl.load(best + row * tiles + tile, mask=inside, other=-float("inf"))
        ones = tl.full([TILES], 1, tl.int64)
        goal = tl.zeros_like(row) + wanted
        low = key_of(tl.zeros_like(top) + LOWEST)
        low = bisect(highest, inside, ones, goal, tl.zeros_like(row), low, key_of(top) + 1)
        count = list_tiles(listed, highest, inside, value_of(low))
        threshold = search(
            logits, listed, count, vocab, 1.0, top, found + row * CAP, goal, top, low, None, False, STEP, TILE, CAP
        )  # fmt: skip
        count = list_tiles(listed, highest, inside, threshold)
        _collect(logits, listed, count, vocab, threshold, wanted, values, ids, STEP, TILE)
    tl.debug_barrier()
    value = tl.load(values + lane, mask=kept, other=-float("inf"))
    chosen = tl.load(ids + lane, mask=kept, other=2147483647)
    others = tl.load(values + lane, mask=kept, other=-float("inf"))
    other_ids = tl.load(ids + lane, mask=kept, other=2147483647)
    higher = others[None, :] > value[:, None]
    lower_id = (other_ids[None, :] < chosen[:, None]) | (
        (other_ids[None, :] == chosen[:, None]) & (lane[None, :] < lane[:, None])
    )
    earlier = higher | ((others[None, :] == value[:, None]) & lower_id)
    column = tl.sum(earlier.to(tl.int32), 1) + 1
    tl.store(out_ids + row * (wanted + 1) + column, chosen, mask=kept)
    tl.store(out_values + row * (wanted + 1) + column, value - base - shift, mask=kept)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `frame.core.ops.logits.top_logprobs`."""
    rows, vocab = logits.shape
    narrow = k <= MAX_NARROW
    width = k if narrow else 0
    device = logits.device
    tiles = triton.cdiv(vocab, TILE)
    parts = triton.cdiv(tiles, _PART_TILES)
    best, listed = (torch.empty((rows, tiles), dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    tops, sums = (torch.empty((rows, parts), dtype=torch.float32, device=device) for _ in range(2))
    above = torch.empty((rows, parts), dtype=torch.int32, device=device)
    ids = torch.empty((rows, width + 1), dtype=torch.int32, device=device)
    values = torch.empty((rows, width + 1), dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        _survey[(rows, parts)](
            logits, token_ids, best, tops, sums, above, vocab, logits.stride(0), tiles, parts,
            PART_TILES=_PART_TILES, STEP=STEP, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip
        scratch = (
            listed,
            torch.empty((rows, CAP), dtype=torch.float32, device=device),
            torch.empty((rows, MAX_NARROW), dtype=torch.float32, device=device),
            torch.empty((rows, MAX_NARROW), dtype=torch.int32, device=device),
        )
        _top[(rows,)](
            logits, token_ids, (best, tops, sums, above), scratch, (ids, values, ranks),
            vocab, logits.stride(0), tiles, parts, width,
            NORMALIZE=normalize, STEP=STEP, TILE=TILE, CAP=CAP, TILES=triton.next_power_of_2(tiles),
            PARTS=triton.next_power_of_2(parts), K=MAX_NARROW, num_warps=WARPS,
        )  # fmt: skip
    if narrow:
        return ids, values, ranks
    best_of_all = (logits.log_softmax(-1, dtype=torch.float32) if normalize else logits.float()).topk(k, -1)
    ids = torch.cat([ids, best_of_all.indices.to(torch.int32)], -1)
    return ids, torch.cat([values, best_of_all.values], -1), ranks
