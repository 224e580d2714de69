"""Choosing experts in Triton, and sorting what they get; `route` has its reference in `frame.core.ops.experts`.

Both leave everything on the device: no count reaches the host. Knows no weights of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

_SCAN = 4096  # ids that one step of the sorting looks at


@triton.jit
def _route(
    logits, weights, ids, experts, stride,
    TOP_K: tl.constexpr, NORM: tl.constexpr, EXPERTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    value = tl.load(logits + row * stride + lane, mask=lane < experts, other=-float("inf")).to(tl.float32)
    top = tl.max(value, 0)
    value = tl.exp(value - top)
    total = tl.sum(value, 0)
    left = tl.where(lane < experts, value, -1.0)
    kept = 0.0
    choice = tl.arange(0, triton.next_power_of_2(TOP_K))
    share = tl.zeros(choice.shape, tl.float32)
    chosen = tl.zeros(choice.shape, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        place = tl.min(tl.where(left == best, lane, experts - 1), 0)
        share = tl.where(choice == k, best, share)
        chosen = tl.where(choice == k, place, chosen)
        kept += best
        left = tl.where(lane == place, -1.0, left)
    # a logit that is not finite must show in the output, and not only as odd choices
    share = tl.where(total == total, share / (kept if NORM else total), total)
    tl.store(weights + row * TOP_K + choice, share, mask=choice < TOP_K)
    tl.store(ids + row * TOP_K + choice, chosen, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _align(
    ids, slots, block_experts, num_blocks, places, pairs, experts,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, SCAN: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    each = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, pairs, SCAN):
        chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=-1)
        inside = (chosen >= 0) & (chosen < experts)
        counts += tl.histogram(tl.where(inside, chosen, 0), EXPERTS, mask=inside)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(each < expert, blocks, 0), 0)
    mine = tl.sum(tl.where(each == expert, counts, 0), 0)
    my_blocks = (mine + BLOCK_M - 1) // BLOCK_M
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    for block in range(0, my_blocks):
        tl.store(block_experts + first_block + block, expert)
    written = first_block * BLOCK_M
    rest = written + mine + tl.arange(0, BLOCK_M)
    tl.store(slots + rest, tl.zeros([BLOCK_M], tl.int32) + pairs, mask=rest < written + my_blocks * BLOCK_M)
    if mine > 0:
        for first in range(0, pairs, SCAN):
            own = (tl.load(ids + first + lane, mask=first + lane < pairs, other=-1) == expert).to(tl.int32)
            at = written + tl.cumsum(own, 0) - 1
            tl.store(slots + at, first + lane, mask=own > 0)
            if PLACED:
                tl.store(places + first + lane, at, mask=own > 0)
            written += tl.sum(own, 0)


@triton.jit
def _spread(x, ids, places, out, experts, size, stride_x, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride_x + lane, mask=lane < size, other=0.0)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + k)
        inside = (expert >= 0) & (expert < experts)
        place = tl.load(places + token * TOP_K + k, mask=inside, other=0).to(tl.int64)
        tl.store(out + place * size + lane, value, mask=(lane < size) & inside)


@dataclass(frozen=True)
class Blocks:
    """Pairs sorted by expert, on the device.

    `slots` [blocks, block_m] int32 holds pair numbers, the number of pairs where a block is not full; `experts`
    [blocks] int32 each block's expert; `used` [1] int32 how many blocks hold anything: what lies beyond is not written.
    `places` [pairs] int32, where asked for, says which slot, of all blocks', holds a pair; nothing for those left out.
    """

    slots: Tensor
    experts: Tensor
    used: Tensor
    num_pairs: int
    places: Tensor | None = None


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.experts.route` for logits [T, experts], the last dimension contiguous; ties: lowest id first.

    One program a row: a row's bits do not depend on the batch.
    """
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, weights, ids, experts, logits.stride(0),
            TOP_K=top_k, NORM=renormalize, EXPERTS=triton.next_power_of_2(experts), num_warps=1,
            **chained(logits.device),
        )  # fmt: skip
    return weights, ids


def align(ids: Tensor, num_experts: int, block_m: int, *, placed: bool = False) -> Blocks:
    """Sorts the pairs of ids [T, top_k] into blocks of one expert each, in the order of their numbers.

    Room is for the worst case, known without a look at the ids; ids outside [0, num_experts) are left out.
    """
    pairs = ids.numel()
    most = min(pairs, (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m)
    slots = torch.empty((most, block_m), dtype=torch.int32, device=ids.device)
    experts = torch.empty(most, dtype=torch.int32, device=ids.device)
    used = torch.empty(1, dtype=torch.int32, device=ids.device)
    places = torch.empty(pairs, dtype=torch.int32, device=ids.device) if placed else None
    scan = min(_SCAN, max(128, triton.next_power_of_2(pairs)))
    _align[(num_experts,)](
        ids, slots, experts, used, places, pairs, num_experts,
        BLOCK_M=block_m, EXPERTS=max(32, triton.next_power_of_2(num_experts)), SCAN=scan, PLACED=placed,
        num_warps=8 if scan > 1024 else 4,
    )  # fmt: skip
    return Blocks(slots, experts, used, pairs, places)


def spread(x: Tensor, ids: Tensor, num_experts: int, blocks: Blocks) -> Tensor:
    """[slots of all blocks, N]: the row of x [T, N] that belongs to each slot's pair; other rows are not written."""
    tokens, top_k = ids.shape
    size = x.shape[1]
    out = torch.empty((blocks.slots.numel(), size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _spread[(tokens, triton.cdiv(size, block))](
        x, ids, blocks.places, out, num_experts, size, x.stride(0), TOP_K=top_k, BLOCK=block
    )
    return out
