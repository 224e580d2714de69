"""The recurrences of Mamba-2 and Mamba-1 over packed rows in Triton; references are in `frame.core.ops.states`.

A program owns a part of a row's state that no other program touches, so that it is read once, kept in registers over
all of the row's tokens, and written back in place. Rows of one token take one update; longer ones go chunk by chunk,
inside which a few products of matrices do what a loop over tokens would (Dao & Gu 2024). Where rows of Mamba-2 are
long, their segments are computed at once (kernels/segments.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .convolution import row_of, step_rows
from .segments import num_pieces, piece_of, segment_for, span_of

#: Tokens of a chunk, and of a segment of long rows.
CHUNK, SEGMENT = 32, 256
#: Numbers of a state that one program keeps in registers.
STATE_PART = 8192


class Steps(NamedTuple):
    """What makes the steps of a scan: dt and its stride, `decay`, and what may be None: `bias` and `skip`."""

    dt: Any
    stride: Any
    decay: Any
    bias: Any
    skip: Any
    least: Any
    most: Any


class Operand(NamedTuple):
    """Heads [T, heads, size] with a stride for tokens, heads side by side."""

    source: Any
    stride: Any


@triton.jit
def _step_of(steps, raw, index, kept):
    """The steps made from `raw` dt of heads or channels number `index`."""
    size = raw.to(tl.float32)
    if steps.bias is not None:
        size += tl.load(steps.bias + index, kept, other=0.0)
        grown = tl.exp(tl.minimum(size, 20.0))
        few = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0)))  # where 1 + grown would round it off
        size = tl.where(size > 20.0, size, tl.where(grown < 0.01, few, tl.log(1.0 + grown)))
        size = tl.minimum(tl.maximum(size, steps.least), steps.most)
    return size


@triton.jit
def _ssd_step(
    x, b, c, steps, state, stride_block, rows, out, num_tokens, heads, size, width, share,
    PART: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some rows of the state of a head, of a row of one token; zeros for padding tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2) * PART + tl.arange(0, PART)
    lane = tl.arange(0, WIDTH)
    in_part, in_width = part < size, lane < width
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if count == 0:
        nothing = tl.zeros((PART,), out.dtype.element_ty)
        tl.store(out + (row.to(tl.int64) * heads + head) * size + part, nothing, in_part & (row < num_tokens))
    else:
        token = start.to(tl.int64)
        raw = tl.load(steps.dt + token * steps.stride + head)
        step = _step_of(steps, raw, head, True)
        value = tl.load(x.source + token * x.stride + head * size + part, in_part, other=0.0).to(tl.float32)
        group = (head // share) * width + lane
        into = tl.load(b.source + token * b.stride + group, in_width, other=0.0).to(tl.float32)
        read = tl.load(c.source + token * c.stride + group, in_width, other=0.0).to(tl.float32)
        kept = in_part[:, None] & in_width[None, :]
        where = state + block * stride_block + (head * size + part)[:, None] * width + lane[None, :]
        held = tl.load(where, kept & goes_on, other=0.0).to(tl.float32)
        held = held * tl.exp(step * tl.load(steps.decay + head)) + (step * value)[:, None] * into[None, :]
        tl.store(where, held, kept)
        total = tl.sum(held * read[None, :], 1)
        if steps.skip is not None:
            total += value * tl.load(steps.skip + head)
        tl.store(out + (token * heads + head) * size + part, total.to(out.dtype.element_ty), in_part)


@triton.jit
def _ssd_chunk(
    held, gone, x, b, c, steps, out, first, high, head, part, lane, heads, size, width, share,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One chunk of tokens, from `first` to before `high`: what becomes of a state `held` and of its faded logarithm."""
    place = tl.arange(0, CHUNK)
    in_part, in_width = part < size, lane < width
    decay, group = tl.load(steps.decay + head), (head // share) * width + lane
    used = first + place < high
    token = (first + place).to(tl.int64)
    raw = tl.load(steps.dt + token * steps.stride + head, used, other=0.0)
    step = tl.where(used, _step_of(steps, raw, head, True), 0.0)
    some = used[:, None] & in_width[None, :]
    into = tl.load(b.source + token[:, None] * b.stride + group[None, :], some, other=0.0).to(tl.float32)
    mine = used[:, None] & in_part[None, :]
    value = x.source + token[:, None] * x.stride + head * size + part[None, :]
    value = tl.load(value, mine, other=0.0).to(tl.float32)
    moved = step[:, None] * value
    logs = tl.cumsum(step * decay, 0)
    if OUTPUTS:
        read = tl.load(c.source + token[:, None] * c.stride + group[None, :], some, other=0.0).to(tl.float32)
        behind = place[:, None] >= place[None, :]
        fades = tl.exp(tl.where(behind, logs[:, None] - logs[None, :], -float("inf")))
        scores = tl.dot(read, tl.trans(into), input_precision=PRECISION) * fades
        total = tl.dot(scores, moved, input_precision=PRECISION)
        total += tl.dot(read * tl.exp(logs)[:, None], tl.trans(held), input_precision=PRECISION)
        if steps.skip is not None:
            total += value * tl.load(steps.skip + head)
        target = out + (token[:, None] * heads + head) * size + part[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mine)
    whole = tl.sum(step * decay, 0)
    added = tl.dot(tl.trans(moved * tl.exp(whole - logs)[:, None]), into, input_precision=PRECISION)
    return held * tl.exp(whole) + added, gone + whole


@triton.jit(do_not_specialize=["num_rows", "segment"])
def _ssd_rows(
    x, b, c, steps, state, stride_block, rows, out, between, faded, num_rows, segment, heads, size, width,
    share,
    PART: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, LATER: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some rows of the state of a head, over the tokens of a row in a segment.

    First those at the beginning of a row, and of others what they add to a state, which lies `between` segments behind
    them with what a state has `faded` by; LATER all but the beginnings, from the states between.
    """
    piece, head = tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2) * PART + tl.arange(0, PART)
    lane = tl.arange(0, WIDTH)
    await_previous(CHAINED)
    row, number = piece_of(rows, num_rows, piece, segment)
    start, count, block, goes_on = row_of(rows, row)
    low, high = span_of(start, count, number, segment)
    begins, ends = low == start, high == start + count
    works = low < high
    if LATER:
        works = works & (begins == 0)
    else:
        works = works & (begins | (ends == 0))
    if works:
        kept = (part < size)[:, None] & (lane < width)[None, :]
        inside = (head * size + part)[:, None] * width + lane[None, :]
        border = between + number.to(tl.int64) * heads * size * width + inside
        where = state + block * stride_block + inside
        gone = 0.0
        if LATER:
            held = tl.load(border - heads * size * width, kept, other=0.0).to(tl.float32)
        else:
            held = tl.load(where, kept & goes_on & begins, other=0.0).to(tl.float32)
        if LATER | begins:
            for first in range(low, high, CHUNK):
                held, gone = _ssd_chunk(
                    held, gone, x, b, c, steps, out, first, high, head, part, lane, heads, size, width, share,
                    CHUNK, PRECISION, True,
                )  # fmt: skip
        else:
            for first in range(low, high, CHUNK):
                held, gone = _ssd_chunk(
                    held, gone, x, b, c, steps, out, first, high, head, part, lane, heads, size, width, share,
                    CHUNK, PRECISION, False,
                )  # fmt: skip
        if ends:
            tl.store(where, held, kept)
        elif LATER == 0:
            tl.store(border, held, kept)
            tl.store(faded + number * heads + head, gone, tl.program_id(2) == 0)


@triton.jit(do_not_specialize=["segment"])
def _pass_states(between, faded, rows, segment, heads, size, PART: tl.constexpr, CHAINED: tl.constexpr):
    """One program: some of the `size` numbers of a head's state, over the borders of segments that a row goes over."""
    row, head = tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2) * PART + tl.arange(0, PART)
    await_previous(CHAINED)
    start, count, _, _ = row_of(rows, row)
    first, last = start // segment, (start + count - 1) // segment
    if first + 1 < last:
        each = heads * size
        border = between + first.to(tl.int64) * each + head * size + part
        held = tl.load(border, part < size, other=0.0)
        for number in range(first + 1, last):
            border += each
            held = held * tl.exp(tl.load(faded + number * heads + head)) + tl.load(border, part < size, other=0.0)
            tl.store(border, held, part < size)


@triton.jit
def _selective_rows(
    x, b, c, steps, state, stride_block, rows, out, channels, width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some channels, over all tokens of a row; zeros for tokens behind the last row come with `out`."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    lane = tl.arange(0, WIDTH)
    there, in_width = channel < channels, lane < width
    kept = there[:, None] & in_width[None, :]
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if count > 0:
        place = channel[:, None] * width + lane[None, :]
        held = tl.load(state + block * stride_block + place, kept & goes_on, other=0.0).to(tl.float32)
        decay = tl.load(steps.decay + place, kept, other=0.0)
        skip = tl.load(steps.skip + channel, there, other=0.0)
        for at in range(0, count):
            token = (start + at).to(tl.int64)
            raw = tl.load(steps.dt + token * steps.stride + channel, there, other=0.0)
            step = _step_of(steps, raw, channel, there)
            value = tl.load(x.source + token * x.stride + channel, there, other=0.0).to(tl.float32)
            into = tl.load(b.source + token * b.stride + lane, in_width, other=0.0).to(tl.float32)
            read = tl.load(c.source + token * c.stride + lane, in_width, other=0.0).to(tl.float32)
            held = held * tl.exp(step[:, None] * decay) + (step * value)[:, None] * into[None, :]
            total = tl.sum(held * read[None, :], 1) + value * skip
            tl.store(out + token * channels + channel, total.to(out.dtype.element_ty), there)
        tl.store(state + block * stride_block + place, held, kept)


def ssd_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: Any, state: Tensor, rows: Any) -> Tensor:
    """As `frame.core.ops.states.ssd_scan`; of each tensor what belongs to a token, and a block, is contiguous."""
    num_tokens, heads, size = x.shape
    width, number, given = b.shape[2], rows.blocks.shape[0], step_rows(rows)
    lanes = triton.next_power_of_2(width)
    part = min(triton.next_power_of_2(size), max(16, STATE_PART // lanes))
    sizes = (heads, size, width, heads // b.shape[1])
    inputs = (*(Operand(one, one.stride(0)) for one in (x, b, c)), _steps(dt, weights), state, state.stride(0), given)
    options = {"PART": part, "WIDTH": lanes, **chained(x.device)}
    if rows.max_query_len == 1:
        out = torch.empty((num_tokens, heads, size), dtype=x.dtype, device=x.device)
        _ssd_step[(max(num_tokens, number), heads, triton.cdiv(size, part))](
            *inputs, out, num_tokens, *sizes, num_warps=4, **options
        )
        return out
    out = torch.zeros((num_tokens, heads, size), dtype=x.dtype, device=x.device)
    lanes = max(16, lanes)
    options |= {"WIDTH": lanes, "PART": max(16, min(options["PART"], STATE_PART // 2 // lanes))}
    options |= {"CHUNK": CHUNK, "PRECISION": precision(x), "num_warps": 4}
    segment = segment_for(rows.max_query_len, SEGMENT)
    borders = num_tokens // segment
    between, faded = state, weights.decay  # not written where rows are whole
    if borders:
        between = torch.empty((borders, heads, size, width), dtype=torch.float32, device=x.device)
        faded = torch.empty((borders, heads), dtype=torch.float32, device=x.device)
    grid = (num_pieces(num_tokens, number, segment), heads, triton.cdiv(size, options["PART"]))
    places = (out, between, faded, number, segment)
    _ssd_rows[grid](*inputs, *places, *sizes, LATER=False, **options)
    if borders:
        _pass_states[(number, heads, triton.cdiv(size * width, STATE_PART))](
            between, faded, given, segment, heads, size * width, PART=STATE_PART, num_warps=8, **chained(x.device)
        )
        _ssd_rows[grid](*inputs, *places, *sizes, LATER=True, **options)
    return out


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: Any, state: Tensor, rows: Any) -> Tensor:
    """As `frame.core.ops.states.selective_scan`, with a `skip`; what belongs to a token, and a block, is contiguous."""
    (num_tokens, channels), width, given = x.shape, b.shape[1], step_rows(rows)
    lanes, some = triton.next_power_of_2(width), 32
    out = torch.zeros((num_tokens, channels), dtype=x.dtype, device=x.device)
    inputs = (*(Operand(one, one.stride(0)) for one in (x, b, c)), _steps(dt, weights), state, state.stride(0), given)
    _selective_rows[(rows.blocks.shape[0], triton.cdiv(channels, some))](
        *inputs, out, channels, width, CHANNELS=some, WIDTH=lanes, num_warps=1, **chained(x.device)
    )
    return out


def precision(x: Tensor) -> str:
    """How products of float32 are rounded: not at all where activations are float32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _steps(dt: Tensor, weights: Any) -> Steps:
    decay, skip, bias, (least, most) = weights
    return Steps(dt, dt.stride(0), decay, bias, skip, float(least), float(most))
