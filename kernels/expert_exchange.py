"""Moves tokens to the GPUs of a machine that hold their experts, and sums what comes back, through memory they share.

For few tokens. A rank writes each token's experts and weights into the memory of every other rank, and the token itself
to those that hold one of its experts; `combine` writes what the experts gave back to where the token came from. All
words travel with the number of the call (`packets`), so that nothing waits for a fence, and no count is read on the
host: a launch can be captured and replayed. Places are fixed by source rank and token, so nobody counts tokens either.

Memory is not used in turns, as `dispatch` and `combine` are. To end one of them, a rank must have heard of all others
in it (by the experts of their tokens, and by a signal of `combine`), and they begin it only when they have ended the
other one, after which nobody reads what they now write over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .all_reduce import DTYPES as _DTYPES, high_half, joined, low_half
from .chain import await_previous, chained
from .packets import as_packets, awaited, words_awaited


@dataclass(frozen=True)
class ExchangeBuffers:
    """Memory of one rank that its peers write to: room for `max_tokens` of each of `size` ranks.

    `addresses` int64 [size] are the ranks' memory as this device sees it; `state` int64 [4] is the number of the last
    call of `dispatch`, how many programs have ended the one that runs, and the same of `combine`. All begins as zeros.
    A token has `top_k` experts and `words` times four bytes. Rank r holds the slots from (r * `stride` + `offset`) *
    `slots`, so many as `slots`.
    """

    rank: int
    size: int
    addresses: Tensor
    state: Tensor
    max_tokens: int
    top_k: int
    words: int
    slots: int
    stride: int = 1
    offset: int = 0

    @property
    def tokens_at(self) -> int:
        """Where tokens begin, in bytes: packets [size, max_tokens, 2 * top_k + words]."""
        return 0

    @property
    def results_at(self) -> int:
        """Where what experts of each rank gave begins: packets [size, max_tokens, words]."""
        return 8 * self.size * self.max_tokens * (2 * self.top_k + self.words)

    @property
    def signals_at(self) -> int:
        """Where signals begin: packets [size]."""
        return self.results_at + 8 * self.size * self.max_tokens * self.words

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's memory."""
        return self.signals_at + 8 * self.size


@triton.jit
def _held(chosen, is_id, RANK: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr):
    """Which of the chosen slots a rank holds, and its first one."""
    first = (RANK * STRIDE + OFFSET) * SLOTS
    return is_id & (chosen >= first) & (chosen < first + SLOTS), first


@triton.jit
def _choice(ids, weights, token, is_token, pick, TOP_K: tl.constexpr):
    """A token's slots, then its weights as integers; -1 for what is no token."""
    is_id, is_weight = pick < TOP_K, (pick >= TOP_K) & (pick < 2 * TOP_K)
    chosen = tl.load(ids + token * TOP_K + pick, mask=is_id & is_token, other=-1)
    weight = tl.load(weights + token * TOP_K + pick - TOP_K, mask=is_weight & is_token, other=0)
    return tl.where(is_weight, weight, chosen)


@triton.jit
def _end(state, epoch, programs):
    """Called by every program when it ends: the last one, after which nobody reads the number, counts the call."""
    if tl.atomic_add(state + 1, 1) == programs - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)


@triton.jit(do_not_specialize=["count", "room"])
def _dispatch(
    x, ids, weights, values, kept_weights, kept_slots, peers, state, count, room, words, max_tokens, at,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, WORDS: tl.constexpr, ALONE: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, AWAITED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Of the `room` places of each source rank; this rank has `count` tokens."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane, pick = tl.arange(0, WORDS), tl.arange(0, PICKS)
    in_row, in_choice = lane < words, pick < 2 * TOP_K
    packets = words + 2 * TOP_K
    await_previous(CHAINED)
    if room > 0:  # else the launch is a rehearsal, which other ranks may not take
        epoch = tl.load(state, volatile=True) + 1
        own = tl.multiple_of(tl.load(peers + RANK) + at, 16)
        if SENDS:
            for token in range(program, room, programs):
                chosen = _choice(ids, weights, token, token < count, pick, TOP_K)
                word = tl.load(x + token * words + lane, mask=in_row & (token < count), other=0)
                place = (RANK * max_tokens + token) * packets
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        base = tl.multiple_of(tl.load(peers + peer) + at, 16).to(tl.pointer_type(tl.int64)) + place
                        tl.store(base + pick, as_packets(chosen, epoch), mask=in_choice)
                        held, _ = _held(chosen, pick < TOP_K, peer, SLOTS, STRIDE, OFFSET)
                        goes = tl.max(held.to(tl.int32)) > 0
                        tl.store(base + 2 * TOP_K + lane, as_packets(word, epoch), mask=in_row & goes)
        if RECEIVES:
            for row in range(program, SIZE * room, programs):
                source, token = row // room, row % room
                place = (source * max_tokens + token) * packets
                if source == RANK:
                    chosen = _choice(ids, weights, token, token < count, pick, TOP_K)
                else:
                    chosen = awaited(own, epoch, place, pick, in_choice, ALONE)
                held, first = _held(chosen, pick < TOP_K, RANK, SLOTS, STRIDE, OFFSET)
                tl.store(kept_slots + row * TOP_K + pick, tl.where(held, chosen - first, -1), mask=pick < TOP_K)
                tl.store(kept_weights + row * TOP_K + pick - TOP_K, chosen, mask=(pick >= TOP_K) & in_choice)
                if tl.max(held.to(tl.int32)) > 0:
                    if source == RANK:
                        word = tl.load(x + token * words + lane, mask=in_row, other=0)
                    else:
                        word = awaited(own, epoch, place + 2 * TOP_K, lane, in_row, AWAITED)
                    tl.store(values + row * words + lane, word, mask=in_row)
            _end(state, epoch, programs)


@triton.jit
def _added(low, high, word, DTYPE: tl.constexpr):
    """Sums in float32 of the lower and upper halves of words, or of whole ones in `low`."""
    if tl.float32 == DTYPE:
        low += word.to(tl.float32, bitcast=True)
    else:
        low += low_half(word, DTYPE).to(tl.float32)
        high += high_half(word, DTYPE).to(tl.float32)
    return low, high


@triton.jit(do_not_specialize=["count", "room"])
def _combine(
    given, kept_slots, ids, out, peers, state, count, room, words, max_tokens, at, signals_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, AWAITED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As `_dispatch`, the other way: `given` [SIZE * room] rows go back, and `count` sums come out."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane, pick = tl.arange(0, WORDS), tl.arange(0, PICKS)
    in_row, is_id = lane < words, pick < TOP_K
    await_previous(CHAINED)
    if room > 0:
        epoch = tl.load(state, volatile=True) + 1
        own = tl.multiple_of(tl.load(peers + RANK), 16)
        if SENDS:
            if program == 0:  # this rank has ended its dispatch, so that the others may begin another one
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        signal = (tl.load(peers + peer) + signals_at).to(tl.pointer_type(tl.int64)) + RANK
                        tl.store(signal, epoch << 32)
            for row in range(program, SIZE * room, programs):
                source = row // room
                if source != RANK:
                    slot = tl.load(kept_slots + row * TOP_K + pick, mask=is_id, other=-1)
                    if tl.max(slot) >= 0:
                        word = tl.load(given + row * words + lane, mask=in_row, other=0)
                        base = tl.multiple_of(tl.load(peers + source) + at, 16).to(tl.pointer_type(tl.int64))
                        place = (RANK * max_tokens + row % room) * words
                        tl.store(base + place + lane, as_packets(word, epoch), mask=in_row)
        if RECEIVES:
            for token in range(program, count, programs):
                chosen = tl.load(ids + token * TOP_K + pick, mask=is_id, other=-1)
                low, high = tl.zeros(lane.shape, tl.float32), tl.zeros(lane.shape, tl.float32)
                for peer in tl.static_range(SIZE):
                    held, _ = _held(chosen, is_id, peer, SLOTS, STRIDE, OFFSET)
                    if tl.max(held.to(tl.int32)) > 0:
                        if peer == RANK:
                            word = tl.load(given + (RANK * room + token) * words + lane, mask=in_row, other=0)
                        else:
                            place = (peer * max_tokens + token) * words
                            word = awaited(own + at, epoch, place, lane, in_row, AWAITED)
                        low, high = _added(low, high, word, DTYPE)
                if tl.float32 == DTYPE:
                    summed = low.to(tl.int32, bitcast=True)
                else:
                    summed = joined(low.to(DTYPE), high.to(DTYPE))
                tl.store(out + token * words + lane, summed, mask=in_row)
            if program == 0:
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        signal = (own + signals_at).to(tl.pointer_type(tl.int64)) + peer
                        while (tl.load(signal, volatile=True) >> 32) != ((epoch << 32) >> 32):
                            pass
            _end(state, epoch, programs)


#: Programs of a launch: all of them are on the device at the same time, as they wait for each other's like.
_MAX_PROGRAMS = 128
DTYPES = tuple(_DTYPES)


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, room: int, buffers: ExchangeBuffers, *, rehearsed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of all ranks, their weights, and the slots of this rank: [N, H], float32 [N, k], int32 [N, k].

    N = size * room: of each rank `room` places, as many as its tokens or more; room > 0 is the same on all ranks. x [T,
    H], int32 ids and float32 weights [T, k] are contiguous, T <= room. A slot of another rank comes as -1. Rows of
    values without any slot of this rank hold anything. `rehearsed`: launches the kernel without doing anything.
    """
    rows = buffers.size * room
    values = x.new_empty(rows, x.shape[1])
    kept_weights, kept_slots = weights.new_empty(rows, buffers.top_k), ids.new_empty(rows, buffers.top_k)
    launch_dispatch((x, ids, weights), (values, kept_weights, kept_slots), room, buffers, rehearsed=rehearsed)
    return values, kept_weights, kept_slots


def combine(
    given: Tensor, kept_slots: Tensor, ids: Tensor, room: int, buffers: ExchangeBuffers, *, rehearsed: bool = False
) -> Tensor:
    """The sums [T, H] of what the experts of all ranks gave for this rank's tokens, in float32 and in order of rank.

    `given` [N, H] are those of this rank for what `dispatch` gave, with `kept_slots`; ids [T, k] went into it.
    """
    out = given.new_empty(len(ids), given.shape[1])
    launch_combine((given, kept_slots, ids), out, room, buffers, rehearsed=rehearsed)
    return out


def launch_dispatch(inputs, outputs, room, buffers, *, sends=True, receives=True, rehearsed=False):
    """One kernel; where ranks cannot run at the same time, first all send, then all receive."""
    x, ids, weights = inputs
    values, kept_weights, kept_slots = outputs
    as_words = [_words(x), ids, _words(weights), _words(values), _words(kept_weights), kept_slots]
    _dispatch[(min(buffers.size * room, _MAX_PROGRAMS),)](
        *as_words, buffers.addresses, buffers.state,
        len(x), 0 if rehearsed else room, buffers.words, buffers.max_tokens, buffers.tokens_at,
        PICKS=triton.next_power_of_2(2 * buffers.top_k), ALONE=int(x.device.type == "cuda"),
        SENDS=sends, RECEIVES=receives, **_constants(x, buffers),
    )  # fmt: skip


def launch_combine(inputs, out, room, buffers, *, sends=True, receives=True, rehearsed=False):
    """As `launch_dispatch`."""
    given, kept_slots, ids = inputs
    _combine[(min(buffers.size * room, _MAX_PROGRAMS),)](
        _words(given), kept_slots, ids, _words(out), buffers.addresses, buffers.state[2:],
        len(out), 0 if rehearsed else room, buffers.words, buffers.max_tokens, buffers.results_at, buffers.signals_at,
        PICKS=triton.next_power_of_2(buffers.top_k), DTYPE=_DTYPES[given.dtype],
        SENDS=sends, RECEIVES=receives, **_constants(given, buffers),
    )  # fmt: skip


def _words(tensor):
    return tensor.view(-1).view(torch.int32)


def _constants(x, buffers):
    size = triton.next_power_of_2(buffers.words)
    warps = max(4, min(32, size // 128))
    return {
        "RANK": buffers.rank, "SIZE": buffers.size, "TOP_K": buffers.top_k, "WORDS": size,
        "SLOTS": buffers.slots, "STRIDE": buffers.stride, "OFFSET": buffers.offset,
        "AWAITED": words_awaited(size, warps, x.device), "num_warps": warps, **chained(x.device),
    }  # fmt: skip
