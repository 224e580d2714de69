"""The best of all ranks' parts of the vocabulary in Triton; the reference is `frame.core.ops.sampling.join_parts`.

Every rank has a score, a token id and a logit of each row. Either they were gathered before, or the ranks write them
into each other's memory in packets (kernels/packets.py) and join what came in the same launch. Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .all_reduce import MAX_PROGRAMS, PeerBuffers, received, send
from .chain import await_previous, chained
from .packets import words_awaited

#: Rows of a program, which are few where little is to be done for each.
_ROWS, _WARPS = 128, 4


@triton.jit
def _better(top, token, logit, score, other_token, other_logit, FIRST: tl.constexpr):
    """The better of two of each row, all as words: the higher score, the first of equals, and NaN before all."""
    mine, other = top.to(tl.float32, bitcast=True), score.to(tl.float32, bitcast=True)
    wins = (other > mine) | ((other != other) & (mine == mine)) | FIRST
    return tl.where(wins, score, top), tl.where(wins, other_token, token), tl.where(wins, other_logit, logit)


@triton.jit(do_not_specialize=["rows"])
def _join_parts(came, tokens, logits, rows, SIZE: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < rows
    top = tl.zeros([ROWS], tl.int32)
    token, logit = top, top
    await_previous(CHAINED)
    for rank in tl.static_range(SIZE):
        source = came + rank * 3 * rows + row
        score = tl.load(source, mask=kept, other=0)
        other_token = tl.load(source + rows, mask=kept, other=0)
        other_logit = tl.load(source + 2 * rows, mask=kept, other=0)
        top, token, logit = _better(top, token, logit, score, other_token, other_logit, rank == 0)
    tl.store(tokens + row, token, mask=kept)
    tl.store(logits + row, logit, mask=kept)


def join_parts(came: Tensor) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.sampling.join_parts`, in one launch."""
    size, _, rows = came.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=came.device)
    logits = torch.empty(rows, dtype=torch.float32, device=came.device)
    if rows:
        _join_parts[(triton.cdiv(rows, _ROWS),)](
            came.contiguous(), tokens, logits.view(torch.int32), rows,
            SIZE=size, ROWS=_ROWS, num_warps=_WARPS, **chained(came.device),
        )  # fmt: skip
    return tokens, logits


@triton.jit(do_not_specialize=["rows"])
def _exchange(
    scores, ids, values, tokens, logits, peers, state, rows, at, part_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, AWAITED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Each program has every `num_programs`th block of rows; a call is one of `all_reduce`, by number and memory."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    await_previous(CHAINED)
    if rows > 0:  # else the launch is a rehearsal, which other ranks may not take
        epoch = tl.load(state, volatile=True) + 1
        own = tl.multiple_of(tl.load(peers + RANK), 16) + at
        for first in range(program * ROWS, rows, programs * ROWS):
            lane = tl.arange(0, ROWS)
            row = first + lane
            kept = row < rows
            score = tl.load(scores + row, mask=kept, other=0)
            own_token = tl.load(ids + row, mask=kept, other=0)
            own_logit = tl.load(values + row, mask=kept, other=0)
            if SENDS:
                send(score, peers, epoch, row, kept, at, part_words, RANK, SIZE, True)
                send(own_token, peers, epoch, rows + row, kept, at, part_words, RANK, SIZE, True)
                send(own_logit, peers, epoch, 2 * rows + row, kept, at, part_words, RANK, SIZE, True)
            if RECEIVES:
                top, token, logit = score, own_token, own_logit
                for rank in tl.static_range(SIZE):
                    came, came_token, came_logit = score, own_token, own_logit
                    if rank != RANK:
                        came = received(own, epoch, first, lane, kept, part_words, rank, SIZE, True, AWAITED)
                        came_token = received(
                            own, epoch, rows + first, lane, kept, part_words, rank, SIZE, True, AWAITED
                        )
                        came_logit = received(
                            own, epoch, 2 * rows + first, lane, kept, part_words, rank, SIZE, True, AWAITED
                        )
                    top, token, logit = _better(top, token, logit, came, came_token, came_logit, rank == 0)
                tl.store(tokens + row, token, mask=kept)
                tl.store(logits + row, logit, mask=kept)
        if RECEIVES:
            if tl.atomic_add(state + 1, 1) == programs - 1:  # the last program: nobody reads the number any more
                tl.store(state + 1, 0)
                tl.store(state, epoch)


def takes(rows: int, buffers: PeerBuffers) -> bool:
    """Whether the ranks' packets of so many rows fit their buffers."""
    return 3 * 4 * rows <= buffers.packed_bytes


def exchange_best(
    scores: Tensor, token_ids: Tensor, values: Tensor, buffers: PeerBuffers, *, rehearsed: bool = False
) -> tuple[Tensor, Tensor]:
    """As `join_parts` of what all ranks give, each [N] and contiguous, in one launch; `takes` says of how many rows.

    `rehearsed`: launches the kernel without doing anything.
    """
    tokens, logits = torch.empty_like(token_ids), torch.empty_like(values)
    _launch((scores, token_ids, values), (tokens, logits), buffers, rehearsed=rehearsed)
    return tokens, logits


def _launch(given, out, buffers, *, sends=True, receives=True, rehearsed=False):
    rows = len(given[0])
    if not rows:
        return
    as_words = [one.view(torch.int32) for one in (*given, *out)]
    device = given[0].device
    _exchange[(min(triton.cdiv(rows, _ROWS), MAX_PROGRAMS),)](
        *as_words, buffers.addresses, buffers.state,
        0 if rehearsed else rows, buffers.packed_at, buffers.packed_bytes // 4,
        RANK=buffers.rank, SIZE=buffers.size, ROWS=_ROWS, SENDS=sends, RECEIVES=receives,
        AWAITED=words_awaited(_ROWS, _WARPS, device), num_warps=_WARPS, **chained(device),
    )  # fmt: skip
