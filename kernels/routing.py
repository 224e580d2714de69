"""Choosing experts, placing and sorting pairs of tokens and experts, in Triton; the references of `route` and
`place_experts` are in `frame.core.ops.layers`.

All leave everything on the device: no count reaches the host. Knows no weights of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

#: So many pairs at most are sorted by one kernel, each program of which looks at all of them. A power of two itself, so
#: that a warm-up with powers of two of tokens meets the build for the numbers between it and the power below.
_FEW_PAIRS = 16384
_CHUNK = 512  # pairs that a program places where there are many


@triton.jit
def _keep_groups(merit, lane, GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """`merit` with -inf for the experts of all but the best groups, of which there are GROUPS with GROUP experts."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    best = tl.full(group.shape, -float("inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        own = tl.where(lane // GROUP == number, merit, -float("inf"))
        first = tl.max(own, 0)
        if TOP2:
            place = tl.min(tl.where(own == first, lane, GROUPS * GROUP - 1), 0)
            first += tl.max(tl.where(lane == place, -float("inf"), own), 0)
        best = tl.where(group == number, first, best)
    kept = lane < 0
    for _ in tl.static_range(TOP_GROUPS):
        place = tl.min(tl.where(best == tl.max(best, 0), group, GROUPS - 1), 0)
        kept = kept | (lane // GROUP == place)
        best = tl.where(group == place, -float("inf"), best)
    return tl.where(kept, merit, -float("inf"))


@triton.jit
def choose_best(
    value, row, lane, bias, weights, ids, experts, scale, least_sum, reach,
    TOP_K: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    LEAST: tl.constexpr, MIXER: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of a row from its logits `value` float32 [lanes], -inf beyond the experts."""
    inside = lane < experts
    if MIXER:
        finite = tl.sum(tl.where(inside, value, 0.0), 0)
        total = 1.0
    elif SIGMOID:
        value = 1.0 / (1.0 + tl.exp(-value))
        finite = tl.sum(tl.where(inside, value, 0.0), 0)
        total = 1.0
    else:
        value = tl.exp(value - tl.max(value, 0))
        total = tl.sum(value, 0)
        finite = total
        if BIASED:  # which is in units of shares of one
            value = value / total
            total = 1.0
    merit = value
    if BIASED:
        merit += tl.load(bias + lane, mask=inside, other=0.0)
    merit = tl.where(inside, merit, -float("inf"))
    if GROUPS > 1:
        merit = _keep_groups(merit, lane, GROUPS, GROUP, TOP_GROUPS, TOP2)
    kept = 1e-20
    choice = tl.arange(0, triton.next_power_of_2(TOP_K))
    share = tl.zeros(choice.shape, tl.float32)
    chosen = tl.zeros(choice.shape, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(merit, 0)
        place = tl.min(tl.where(merit == best, lane, experts - 1), 0)
        if BIASED:
            best = tl.sum(tl.where(lane == place, value, 0.0), 0)
        if MIXER:  # a softmax over those not yet chosen that are near enough
            far = tl.div_rn(best - value, tl.maximum(tl.abs(value), best)) > reach
            best = 1.0 / tl.sum(tl.where(far | (merit == -float("inf")), 0.0, tl.exp(merit - best)), 0)
        share = tl.where(choice == k, best, share)
        chosen = tl.where(choice == k, place, chosen)
        kept += best
        merit = tl.where(lane == place, -float("inf"), merit)
    if LEAST:
        kept = tl.maximum(kept, least_sum)
    # a logit that is not a number must show in the output, and not only as odd choices
    share = tl.where(finite == finite, share / (kept if NORM else total) * scale, finite)
    tl.store(weights + row * TOP_K + choice, share, mask=choice < TOP_K)
    tl.store(ids + row * TOP_K + choice, chosen, mask=choice < TOP_K)


@triton.jit
def _route(
    logits, bias, weights, ids, experts, stride, scale, least_sum, reach,
    TOP_K: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    EXPERTS: tl.constexpr, CHAINED: tl.constexpr, LEAST: tl.constexpr, MIXER: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    value = tl.load(logits + row * stride + lane, mask=lane < experts, other=-float("inf")).to(tl.float32)
    choose_best(
        value, row, lane, bias, weights, ids, experts, scale, least_sum, reach,
        TOP_K, NORM, SIGMOID, BIASED, GROUPS, GROUP, TOP_GROUPS, TOP2, LEAST, MIXER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _place(
    ids, slots_of, num_replicas, loads, mapping, out, pairs, experts, width,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    token = pair // TOP_K
    expert = tl.load(ids + pair, mask=inside, other=-1)
    counted = (expert >= 0) & (expert < experts)
    count = tl.load(num_replicas + expert, mask=counted, other=1)
    slot = tl.load(slots_of + expert * width + token % count, mask=counted, other=-1)
    tl.store(out + pair, slot, mask=inside)
    if MAPPED:
        counted = counted & (tl.load(mapping + token, mask=inside, other=-1) >= 0)
    tl.atomic_add(loads + slot, 1, mask=counted, sem="relaxed")


@triton.jit
def _close(slots, block_experts, num_blocks, pairs, expert, counts, block_m, FILL: tl.constexpr):
    """Marks the blocks of an expert and fills the last of them; returns its pairs and its first slot."""
    each = tl.arange(0, counts.shape[0])
    blocks = (counts + block_m - 1) // block_m
    first_block = tl.sum(tl.where(each < expert, blocks, 0), 0)
    mine = tl.sum(tl.where(each == expert, counts, 0), 0)
    my_blocks = (mine + block_m - 1) // block_m
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
        tl.store(num_blocks + 1, 0)
    for block in range(0, my_blocks):
        tl.store(block_experts + first_block + block, expert)
    start = first_block * block_m
    rest = start + mine + tl.arange(0, FILL)
    tl.store(slots + rest, tl.zeros([FILL], tl.int32) + pairs, mask=rest < start + my_blocks * block_m)
    return mine, start


@triton.jit(do_not_specialize=["pairs", "first", "block_m"])
def _align(
    ids, slots, block_experts, num_blocks, places, pairs, experts, first, block_m,
    EXPERTS: tl.constexpr, SCAN: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Few pairs: program e sorts those of expert e, of all SCAN that there may be."""
    expert = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    chosen = tl.load(ids + lane, mask=lane < pairs, other=-1) - first
    inside = (chosen >= 0) & (chosen < experts)
    counts = tl.histogram(tl.where(inside, chosen, 0), EXPERTS, mask=inside)
    mine, start = _close(slots, block_experts, num_blocks, pairs, expert, counts, block_m, FILL)
    if mine > 0:
        own = (chosen == expert).to(tl.int32)
        slot = start + tl.cumsum(own, 0) - 1
        tl.store(slots + slot, lane, mask=own > 0)
        tl.store(places + lane, slot, mask=own > 0)


@triton.jit(do_not_specialize=["pairs", "first"])
def _count(ids, counts, pairs, experts, first, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Many pairs: how many of a chunk each expert has."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
    inside = (chosen >= 0) & (chosen < experts)
    found = tl.histogram(tl.where(inside, chosen, 0), EXPERTS, mask=inside)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["pairs", "chunks", "first", "block_m"])
def _sort(
    ids, counts, slots, block_experts, num_blocks, places, pairs, chunks, experts, first, block_m,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Many pairs: a program places those of a chunk, behind the chunks before it; one for each expert follows."""
    chunk = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    some = tl.arange(0, PIECE)
    total = tl.zeros([EXPERTS], tl.int32)
    before = total
    for at in range(0, chunks, PIECE):
        found = tl.load(
            counts + (at + some)[:, None] * EXPERTS + each[None, :], mask=(at + some < chunks)[:, None], other=0
        )
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((at + some < chunk)[:, None], found, 0), 0)
    if chunk >= chunks:
        _close(slots, block_experts, num_blocks, pairs, chunk - chunks, total, block_m, FILL)
    else:
        blocks = (total + block_m - 1) // block_m
        starts = (tl.cumsum(blocks, 0) - blocks) * block_m + before
        lane = tl.arange(0, CHUNK)
        pair = chunk * CHUNK + lane
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
        earlier = tl.zeros([PIECE, CHUNK], tl.int32)  # pairs of the chunk with the same expert
        for at in range(0, CHUNK, PIECE):
            other = tl.load(ids + chunk * CHUNK + at + some, mask=chunk * CHUNK + at + some < pairs, other=-1) - first
            equal = (other[:, None] == chosen[None, :]) & ((at + some)[:, None] < lane[None, :])
            earlier += equal.to(tl.int32)
        inside = (chosen >= 0) & (chosen < experts)
        slot = tl.gather(starts, tl.where(inside, chosen, 0), 0) + tl.sum(earlier, 0)
        tl.store(slots + slot, pair, mask=inside)
        tl.store(places + pair, slot, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _spread(x, ids, places, out, experts, first, size, stride_x, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride_x + lane, mask=lane < size, other=0.0)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + k) - first
        inside = (expert >= 0) & (expert < experts)
        place = tl.load(places + token * TOP_K + k, mask=inside, other=0).to(tl.int64)
        tl.store(out + place * size + lane, value, mask=(lane < size) & inside)


@dataclass(frozen=True)
class Blocks:
    """Pairs sorted by expert, on the device.

    `slots` [blocks, block_m] int32 holds pair numbers, the number of pairs where a block is not full; `experts`
    [blocks] int32 each block's expert; `used` [2] int32 how many blocks hold anything, beyond which nothing is written,
    and a counter for who takes which of them, at 0 between kernels. `places` [pairs] int32 says which slot of all
    blocks' holds a pair, and means nothing for those that are left out.
    """

    slots: Tensor
    experts: Tensor
    used: Tensor
    places: Tensor
    num_pairs: int


def route(logits: Tensor, spec: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.layers.route` for logits [T, experts], the last dimension contiguous; ties: lowest id first.

    `spec` is a `RouterSpec`. One program a row: a row's bits do not depend on the batch.
    """
    rows, experts = logits.shape
    weights = torch.empty((rows, spec.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, spec.top_k), dtype=torch.int32, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, logits if bias is None else bias, weights, ids, experts, logits.stride(0), float(spec.scale),
            float(spec.least_sum), 2.0 * spec.jitter,
            **router_constants(spec, biased=bias is not None), num_warps=1, **chained(logits.device),
        )  # fmt: skip
    return weights, ids


def router_constants(spec: Any, *, biased: bool) -> dict[str, Any]:
    """What `choose_best` is compiled for, and the lanes EXPERTS of its row."""
    return {
        "TOP_K": spec.top_k, "NORM": spec.renormalize, "SIGMOID": spec.score == "sigmoid", "BIASED": biased,
        "GROUPS": spec.num_groups, "GROUP": spec.num_experts // spec.num_groups, "TOP_GROUPS": spec.top_groups,
        "TOP2": spec.group_score == "top2", "EXPERTS": triton.next_power_of_2(spec.num_experts),
        "LEAST": spec.least_sum > 0, "MIXER": spec.score == "sparsemixer",
    }  # fmt: skip


def place_experts(
    ids: Tensor, slots_of: Tensor, num_replicas: Tensor, loads: Tensor, mapping: Tensor | None = None
) -> Tensor:
    """As `frame.core.ops.layers.place_experts`; ids [T, top_k], `slots_of` and `loads` contiguous."""
    slots = torch.empty_like(ids)
    pairs, (experts, width) = ids.numel(), slots_of.shape
    if pairs:
        block = min(1024, max(128, triton.next_power_of_2(pairs)))
        _place[(triton.cdiv(pairs, block),)](
            ids, slots_of, num_replicas, loads, loads if mapping is None else mapping, slots, pairs, experts, width,
            TOP_K=ids.shape[1], MAPPED=mapping is not None, BLOCK=block, **chained(ids.device),
        )  # fmt: skip
    return slots


def align(ids: Tensor, held: range, block_m: int) -> Blocks:
    """Sorts the pairs of ids [T, top_k] into blocks of one expert each, in the order of their numbers.

    Room is for the worst case, known without a look at the ids; ids outside `held` are left out, and the first expert
    of `held` has the number 0.
    """
    pairs, num_experts, first = ids.numel(), len(held), held.start
    most = min(pairs, (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m)
    slots = torch.empty((most, block_m), dtype=torch.int32, device=ids.device)
    experts = torch.empty(most, dtype=torch.int32, device=ids.device)
    used = torch.empty(2, dtype=torch.int32, device=ids.device)
    places = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    each, fill = max(32, triton.next_power_of_2(num_experts)), max(128, triton.next_power_of_2(block_m))
    if pairs <= _FEW_PAIRS:
        scan = max(128, triton.next_power_of_2(pairs))
        _align[(num_experts,)](
            ids, slots, experts, used, places, pairs, num_experts, first, block_m,
            EXPERTS=each, SCAN=scan, FILL=fill, num_warps=8 if scan > 1024 else 4,
        )  # fmt: skip
    else:
        chunks = triton.cdiv(pairs, _CHUNK)
        counts = torch.empty((chunks, each), dtype=torch.int32, device=ids.device)
        _count[(chunks,)](ids, counts, pairs, num_experts, first, EXPERTS=each, CHUNK=_CHUNK)
        _sort[(chunks + num_experts,)](
            ids, counts, slots, experts, used, places, pairs, chunks, num_experts, first, block_m,
            EXPERTS=each, CHUNK=_CHUNK, PIECE=32, FILL=fill, num_warps=16,
        )  # fmt: skip
    return Blocks(slots, experts, used, places, pairs)


def spread(x: Tensor, ids: Tensor, held: range, blocks: Blocks) -> Tensor:
    """[slots of all blocks, N]: the row of x [T, N] that belongs to each slot's pair; other rows are not written."""
    tokens, top_k = ids.shape
    size = x.shape[1]
    out = torch.empty((blocks.slots.numel(), size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _spread[(tokens, triton.cdiv(size, block))](
        x, ids, blocks.places, out, len(held), held.start, size, x.stride(0), TOP_K=top_k, BLOCK=block
    )
    return out
