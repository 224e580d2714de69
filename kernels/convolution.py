"""Short causal convolutions over packed rows in Triton; the reference is `frame.core.ops.states.causal_conv`.

A step of single tokens takes one launch, which also moves the window of newest inputs on. In longer rows a program
computes a run of tokens of some channels, and a second launch stores the windows, once none is read any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

#: Channels of a program, and tokens of one where rows have several.
CHANNELS, TOKENS = 256, 32


class StepRows(NamedTuple):
    """`StateRows` as kernels take it, with the number of rows of a step of single tokens.

    Other kernels ask of no row behind the last: None, or each would be compiled for one row, for 16 and for others.
    """

    query_start: Any
    blocks: Any
    begins: Any
    number: Any


class Window(NamedTuple):
    """The newest inputs [blocks, channels, width - 1] of requests, and its strides in elements."""

    state: Any
    stride_block: Any
    stride_channel: Any


def step_rows(rows: Any) -> StepRows:
    """What kernels are given of a step's `StateRows`."""
    number = rows.blocks.shape[0] if rows.max_query_len == 1 else None
    return StepRows(rows.query_start, rows.blocks, rows.begins, number)


@triton.jit
def row_of(rows, row):
    """(first token, tokens, block, whether it goes on from a state) of a row; no tokens behind the last row."""
    there = row >= 0
    if rows.number is not None:
        there = row < rows.number
    start = tl.load(rows.query_start + row, there, other=0)
    count = tl.load(rows.query_start + row + 1, there, other=0) - start
    block = tl.load(rows.blocks + row, there, other=0).to(tl.int64)
    goes_on = tl.load(rows.begins + row, there, other=1) == 0
    return start, count, block, goes_on


@triton.jit
def _input(x, stride, window, place, start, channel, back, goes_on, kept, WIDTH: tl.constexpr):
    """The input `back` tokens behind the row's token number `place` (both may be vectors), float32."""
    at = place - back
    new = tl.load(x + (start + at).to(tl.int64) * stride + channel, kept & (at >= 0), other=0.0)
    old = window.state + channel * window.stride_channel + (WIDTH - 1 + at)
    return new.to(tl.float32) + tl.load(old, kept & (at < 0) & goes_on, other=0.0).to(tl.float32)


@triton.jit
def _conv_step(
    x, stride, weight, bias, window, rows, out, num_tokens, channels,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some channels of a row of one token, whose window moves on by it; zeros for padding tokens."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    kept = channel < channels
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if count == 0:
        nothing = tl.zeros((CHANNELS,), out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * channels + channel, nothing, kept & (row < num_tokens))
    else:
        at = window.state + block * window.stride_block + channel * window.stride_channel
        newest = tl.load(x + start.to(tl.int64) * stride + channel, kept, other=0.0)
        total = newest.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, kept, other=0.0).to(tl.float32)
        for i in tl.static_range(WIDTH - 1):
            seen = tl.load(at + i, kept & goes_on, other=0.0)
            total += seen.to(tl.float32) * tl.load(weight + channel * WIDTH + i, kept, other=0.0).to(tl.float32)
            if i > 0:
                tl.store(at + i - 1, seen, kept)
        tl.store(at + WIDTH - 2, newest, kept)
        if bias is not None:
            total += tl.load(bias + channel, kept, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + start.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), kept)


@triton.jit
def _conv_rows(
    x, stride, weight, bias, window, rows, out, channels,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some channels of a run of a row's tokens."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    place = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if tl.program_id(2) * TOKENS < count:
        kept = (channel < channels) & (place < count)
        mine = Window(window.state + block * window.stride_block, window.stride_block, window.stride_channel)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for i in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + i, channel < channels, other=0.0).to(tl.float32)
            total += factor * _input(x, stride, mine, place, start, channel, WIDTH - 1 - i, goes_on, kept, WIDTH)
        if bias is not None:
            total += tl.load(bias + channel, channel < channels, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        where = out + (start + place).to(tl.int64) * channels + channel
        tl.store(where, total.to(out.dtype.element_ty), kept)


@triton.jit
def _keep_windows(
    x, stride, window, rows, channels, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CHAINED: tl.constexpr
):
    """One program: the newest inputs of some channels of a row."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    kept = channel < channels
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if count > 0:
        mine = Window(window.state + block * window.stride_block, window.stride_block, window.stride_channel)
        for i in tl.static_range(WIDTH - 1):  # each place is read, if at all, before a later one is written over it
            newest = _input(x, stride, mine, count - 1, start, channel, WIDTH - 2 - i, goes_on, kept, WIDTH)
            where = mine.state + channel * window.stride_channel + i
            tl.store(where, newest.to(window.state.dtype.element_ty), kept)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Any, *, silu: bool = True
) -> Tensor:
    """As `frame.core.ops.states.causal_conv` for its `StateRows`; the channels of a token contiguous."""
    (num_tokens, channels), width, number = x.shape, weight.shape[1], rows.blocks.shape[0]
    window, given, blocks = Window(state, *state.stride()[:2]), step_rows(rows), triton.cdiv(channels, CHANNELS)
    options = {"WIDTH": width, "CHANNELS": CHANNELS, **chained(x.device)}
    if rows.max_query_len == 1:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _conv_step[(max(num_tokens, number), blocks)](
            x, x.stride(0), weight, bias, window, given, out, num_tokens, channels, SILU=silu, num_warps=2, **options
        )
        return out
    out = torch.zeros((num_tokens, channels), dtype=x.dtype, device=x.device)
    _conv_rows[(number, blocks, triton.cdiv(rows.max_query_len, TOKENS))](
        x, x.stride(0), weight, bias, window, given, out, channels, SILU=silu, TOKENS=TOKENS, num_warps=8, **options
    )
    _keep_windows[(number, blocks)](x, x.stride(0), window, given, channels, num_warps=2, **options)
    return out
