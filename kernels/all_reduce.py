"""Sums over the GPUs of a machine through memory that they share, alone or with the residual sum and norm that follow.

Each rank writes its values into the memory of the others and reads what they wrote into its own: one pass over the
links, and no second meeting. Where rows are few, every four bytes of values travel with the number of the call in one
store of eight, so that whoever sees the number has the values (the idea of NCCL's LL protocol): nothing waits for a
fence. Where they are many, the values travel alone, and a flag for each program follows them.

A call uses the half of the memory that the one before did not use. It may, because to end a call a rank must have heard
of all others in it, so that they have ended the call before. Sums are float32, in order of rank, so that all ranks get
equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .packets import as_packets, awaited, words_awaited

#: Programs of a launch at most. Each waits for its like on the other ranks, which has begun, or begins when programs
#: before it end: devices begin programs in order.
MAX_PROGRAMS = 512
#: Programs of a launch, and warps of all together, that a Hopper chip begins at the same time; others begin some later.
_FEW_PROGRAMS, _WARPS = 128, 4096
#: Elements of four bytes in a part of a tensor that is summed without a norm.
_PART_WORDS = 1024


@dataclass(frozen=True)
class PeerBuffers:
    """Memory of one rank that its peers write to: `parts(size, packed)` says how the bytes of each rank are divided.

    `addresses` int64 [size] are the ranks' buffers as this device sees them, its own among them; `state` int64 [2] are
    the number of the last call, and how many programs have ended the one that runs. Everything begins as zeros.
    """

    rank: int
    size: int
    addresses: Tensor
    state: Tensor
    packed_bytes: int
    plain_bytes: int

    @property
    def flags_at(self) -> int:
        """Where the flags begin, in bytes: int64 [size, MAX_PROGRAMS]."""
        return 0

    @property
    def packed_at(self) -> int:
        """Where values with numbers begin: [2, size, 2 * packed_bytes]."""
        return 8 * self.size * MAX_PROGRAMS

    @property
    def plain_at(self) -> int:
        """Where values alone begin: [2, size, plain_bytes]."""
        return self.packed_at + 4 * self.size * self.packed_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's buffer."""
        return self.plain_at + 2 * self.size * self.plain_bytes


@triton.jit
def low_half(word, DTYPE: tl.constexpr):
    return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def high_half(word, DTYPE: tl.constexpr):
    return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def joined(low, high):
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return upper | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def scaled(value, gain, scale, offset, OFFSET: tl.constexpr):
    """As `norm.normalized`, whose scale is known."""
    wide = value.to(tl.float32) * scale
    if OFFSET:
        row = (wide * (gain.to(tl.float32) + offset)).to(value.dtype)
    else:
        row = gain * wide.to(value.dtype)
    return row


@triton.jit
def send(
    word, peers, epoch, place, kept, at, part_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Writes words into the memory of every other rank."""
    place += ((epoch & 1) * SIZE + RANK) * part_words
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            base = tl.multiple_of(tl.load(peers + peer) + at, 16)
            if PACKED:
                tl.store(base.to(tl.pointer_type(tl.int64)) + place, as_packets(word, epoch), mask=kept)
            else:
                tl.store(base.to(tl.pointer_type(tl.int32)) + place, word, mask=kept)


@triton.jit
def received(
    own, epoch, start, lane, kept, part_words,
    PEER: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, AWAITED: tl.constexpr,
):  # fmt: skip
    """The words that `PEER` wrote into this rank's memory from `start` on, once they are there.

    AWAITED words of a thread are waited for by that thread alone; 0: all of a program's by all of its threads.
    """
    start += ((epoch & 1) * SIZE + PEER) * part_words
    if PACKED:
        word = awaited(own, epoch, start, lane, kept, AWAITED)
    else:
        word = tl.load(own.to(tl.pointer_type(tl.int32)) + start + lane, mask=kept, other=0, cache_modifier=".cg")
    return word


@triton.jit
def _finish(
    mine, before, gain, out, total, own, epoch, start, lane, kept, part_words, words, eps, offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
    PACKED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, AWAITED: tl.constexpr,
):  # fmt: skip
    """Sums a row over ranks and writes it, or its sum with the residual `before` and the norm of that."""
    place = start + lane
    if tl.float32 == DTYPE:
        value = tl.zeros(mine.shape, tl.float32)
        for peer in tl.static_range(SIZE):
            word = mine
            if peer != RANK:
                word = received(own, epoch, start, lane, kept, part_words, peer, SIZE, PACKED, AWAITED)
            value += word.to(tl.float32, bitcast=True)
        if NORM:
            value += before.to(tl.float32, bitcast=True)
            tl.store(total + place, value.to(tl.int32, bitcast=True), mask=kept)
            scale = tl.rsqrt(tl.sum(value * value) / words + eps)
            value = scaled(value, gain.to(tl.float32, bitcast=True), scale, offset, OFFSET)
        tl.store(out + place, value.to(tl.int32, bitcast=True), mask=kept)
    else:
        low = tl.zeros(mine.shape, tl.float32)
        high = tl.zeros(mine.shape, tl.float32)
        for peer in tl.static_range(SIZE):
            word = mine
            if peer != RANK:
                word = received(own, epoch, start, lane, kept, part_words, peer, SIZE, PACKED, AWAITED)
            low += low_half(word, DTYPE).to(tl.float32)
            high += high_half(word, DTYPE).to(tl.float32)
        first, second = low.to(DTYPE), high.to(DTYPE)
        if NORM:
            first += low_half(before, DTYPE)
            second += high_half(before, DTYPE)
            tl.store(total + place, joined(first, second), mask=kept)
            low, high = first.to(tl.float32), second.to(tl.float32)
            scale = tl.rsqrt(tl.sum(low * low + high * high) / (2 * words) + eps)
            first = scaled(first, low_half(gain, DTYPE), scale, offset, OFFSET)
            second = scaled(second, high_half(gain, DTYPE), scale, offset, OFFSET)
        tl.store(out + place, joined(first, second), mask=kept)


@triton.jit(do_not_specialize=["rows", "num_words"])
def _sum(
    x, residual, weight, out, total, peers, state,
    rows, words, num_words, at, part_words, eps, offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr,
    PACKED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr, PROGRAMS: tl.constexpr, AWAITED: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Rows of `words` times four bytes, `num_words` in all; each program has every `num_programs`th of them.

    AHEAD: no program has two rows, values travel alone, and each loads all of its row before it waits.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, WORDS)
    gain = lane
    if NORM:
        gain = tl.load(weight + lane, mask=lane < words, other=0)
    await_previous(CHAINED)
    if rows > 0:  # else the launch is a rehearsal, which other ranks may not take
        epoch = tl.load(state, volatile=True) + 1
        own = tl.multiple_of(tl.load(peers + RANK), 16)
        if AHEAD:  # what this rank has of the program's only row arrives while the others' values travel
            place = program * words + lane
            kept = (lane < words) & (place < num_words)
            mine = tl.load(x + place, mask=kept, other=0)
            before = mine
            if NORM:
                before = tl.load(residual + place, mask=kept, other=0)
        if not PACKED:
            if SENDS:
                if AHEAD:
                    send(mine, peers, epoch, place, kept, at, part_words, RANK, SIZE, PACKED)
                else:
                    for row in range(program, rows, programs):
                        place = row * words + lane
                        kept = (lane < words) & (place < num_words)
                        word = tl.load(x + place, mask=kept, other=0)
                        send(word, peers, epoch, place, kept, at, part_words, RANK, SIZE, PACKED)
                tl.debug_barrier()  # all threads have written what the flag says is there
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        flag = tl.load(peers + peer).to(tl.pointer_type(tl.int64)) + RANK * PROGRAMS + program
                        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
            if RECEIVES:
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        flag = own.to(tl.pointer_type(tl.int64)) + peer * PROGRAMS + program
                        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
                            pass
                tl.debug_barrier()
        if AHEAD:
            if RECEIVES:
                _finish(
                    mine, before, gain, out, total, own + at, epoch, program * words, lane, kept, part_words,
                    words, eps, offset, RANK, SIZE, DTYPE, PACKED, NORM, OFFSET, AWAITED,
                )  # fmt: skip
        else:
            for row in range(program, rows, programs):
                place = row * words + lane
                kept = (lane < words) & (place < num_words)
                mine = tl.load(x + place, mask=kept, other=0)
                before = mine
                if NORM:
                    before = tl.load(residual + place, mask=kept, other=0)
                if PACKED:
                    if SENDS:
                        send(mine, peers, epoch, place, kept, at, part_words, RANK, SIZE, PACKED)
                if RECEIVES:
                    _finish(
                        mine, before, gain, out, total, own + at, epoch, row * words, lane, kept, part_words,
                        words, eps, offset, RANK, SIZE, DTYPE, PACKED, NORM, OFFSET, AWAITED,
                    )  # fmt: skip
        if RECEIVES:
            if tl.atomic_add(state + 1, 1) == programs - 1:  # the last program: nobody reads the number any more
                tl.store(state + 1, 0)
                tl.store(state, epoch)


DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def why_not_reduced(tensor: Tensor, buffers: PeerBuffers) -> str | None:
    """None where the kernels can sum `tensor`, else why not."""
    if tensor.dtype not in DTYPES:
        return f"it is {tensor.dtype}"
    if tensor.nbytes > max(buffers.packed_bytes, buffers.plain_bytes):
        return f"{tensor.nbytes} bytes are more than the {buffers.plain_bytes} of the buffers"
    if tensor.nbytes % 4 or tensor.data_ptr() % 16 or not tensor.is_contiguous():
        return "it is not contiguous in words of four bytes"
    return None


def all_reduce(x: Tensor, buffers: PeerBuffers, *, rehearsed: bool = False) -> Tensor:
    """The sum of x over ranks, which all get the same; `why_not_reduced` says what cannot be summed.

    `rehearsed`: launches the kernel without doing anything.
    """
    out = torch.empty_like(x)
    num_words = x.nbytes // 4
    rows = triton.cdiv(num_words, _PART_WORDS)
    _launch(x, None, None, out, None, buffers, rows, _PART_WORDS, num_words, 0.0, 0.0, rehearsed=rehearsed)
    return out


def all_reduce_normed(
    x: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float, float],
    buffers: PeerBuffers,
    *,
    rehearsed: bool = False,
    packed: bool | None = None,
    ahead: bool = True,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) for total = the sum of x over ranks + residual, all contiguous [T, dim], dim even.

    `norm` is (weight, eps, offset); `rehearsed` as for `all_reduce`; `packed`, for measurements: how values travel.
    `ahead`, for measurements, too: whether programs of one row may load all of it before they wait.
    """
    weight, eps, offset = norm
    out, total = torch.empty_like(x), torch.empty_like(x)
    words = x.shape[-1] * x.dtype.itemsize // 4
    sizes = len(x), words, x.nbytes // 4, eps, offset
    _launch(x, residual, weight, out, total, buffers, *sizes, rehearsed=rehearsed, packed=packed, ahead=ahead)
    return out, total


def _launch(
    x, residual, weight, out, total, buffers, rows, words, num_words, eps, offset,
    *, sends=True, receives=True, rehearsed=False, packed=None, ahead=True,
):  # fmt: skip
    if not rows:
        return
    packed = x.nbytes <= buffers.packed_bytes if packed is None else packed
    size = triton.next_power_of_2(words)
    warps = max(4, min(32 if rows <= _FEW_PROGRAMS else 16, size // 128))
    programs = min(rows, MAX_PROGRAMS, max(_FEW_PROGRAMS, _WARPS // warps))
    as_words = [None if one is None else one.view(-1).view(torch.int32) for one in (x, residual, weight, out, total)]
    _sum[(programs,)](
        *as_words, buffers.addresses, buffers.state,
        0 if rehearsed else rows, words, num_words,
        buffers.packed_at if packed else buffers.plain_at,
        (buffers.packed_bytes if packed else buffers.plain_bytes) // 4, eps, offset,
        RANK=buffers.rank, SIZE=buffers.size, WORDS=size, DTYPE=DTYPES[x.dtype],
        PACKED=packed, NORM=weight is not None, OFFSET=offset != 0.0,
        SENDS=sends, RECEIVES=receives, PROGRAMS=MAX_PROGRAMS, AWAITED=words_awaited(size, warps, x.device),
        AHEAD=ahead and not packed and rows <= programs,
        num_warps=warps, **chained(x.device),
    )  # fmt: skip
