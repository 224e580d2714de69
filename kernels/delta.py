"""The gated delta rule over packed rows in Triton; the reference is `frame.core.ops.states.gated_delta`.

A program owns some columns of the state of a head. Rows of one token take one update; longer ones go chunk by chunk:
what a chunk's tokens change depends on one another through a unit triangular matrix, I + A with A below the diagonal,
whose inverse (I - A)(I + A²)(I + A⁴)… ends with the size of the chunk (Yang et al. 2024, section 3). Where rows are
longer, that is computed once for all columns (kernels/delta_tables.py), unless keys fade by feature. Segments of long
rows are computed at once (kernels/segments.py): the state behind one is M S + B, where S is the state before it, and
neither the matrix M nor B depends on that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .convolution import row_of, step_rows
from .delta_tables import CHUNK as WIDE_CHUNK, Tables, chunk_tables, unit_rows
from .scans import Operand, precision
from .segments import WHOLE, num_pieces, piece_of, segment_for, span_of

#: Tokens of a chunk: `_inverse` squares as often as this size asks for.
CHUNK = 16
#: Tokens of a segment of long rows: what it does to a state takes twice as many products as the state itself.
SEGMENT = 1024
#: The widest keys, padded, whose rows are computed in segments: the square matrix of wider ones fits no shared memory.
MOST_MOVED = 128
#: Columns of a state that one program keeps in registers, of a single token and of longer rows.
STEP_COLUMNS, COLUMNS = 32, 32
#: Numbers of a state that a program of a single token keeps in registers at most.
STEP_NUMBERS = 4096
#: Bytes of the widest inputs that chunks with tables suit: products of float32 are sums in registers.
MOST_BYTES = 2
_WIDE_WARPS, _WIDE_STAGES = 4, 1


@triton.jit
def _delta_step(
    query, key, value, decay, beta, state, stride_block, rows, out, num_tokens, heads, width, size, share, scale,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the state of a head, of a row of one token; zeros for padding tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, WIDTH)
    in_width, in_size = lane < width, column < size
    await_previous(CHAINED)
    start, count, block, goes_on = row_of(rows, row)
    if count == 0:
        nothing = tl.zeros((COLUMNS,), out.dtype.element_ty)
        tl.store(out + (row.to(tl.int64) * heads + head) * size + column, nothing, in_size & (row < num_tokens))
    else:
        token = start.to(tl.int64)
        own = (head // share) * width + lane
        q = unit_rows(query.source + token * query.stride + own, in_width) * scale
        k = unit_rows(key.source + token * key.stride + own, in_width)
        v = tl.load(value.source + token * value.stride + head * size + column, in_size, other=0.0).to(tl.float32)
        if FEATURES:
            fade = tl.exp(tl.load(decay.source + token * decay.stride + head * width + lane, in_width, other=0.0))
        else:
            fade = tl.exp(tl.load(decay.source + token * decay.stride + head)) + tl.zeros((WIDTH,), tl.float32)
        kept = in_width[:, None] & in_size[None, :]
        where = state + block * stride_block + (head * width + lane)[:, None] * size + column[None, :]
        held = tl.load(where, kept & goes_on, other=0.0).to(tl.float32) * fade[:, None]
        strength = tl.load(beta.source + token * beta.stride + head).to(tl.float32)
        change = (v - tl.sum(held * k[:, None], 0)) * strength
        held += k[:, None] * change[None, :]
        tl.store(where, held, kept)
        total = tl.sum(held * q[:, None], 0)
        tl.store(out + (token * heads + head) * size + column, total.to(out.dtype.element_ty), in_size)


@triton.jit
def _inverse(below, CHUNK: tl.constexpr):
    """The inverse of the unit triangular matrix I + below, [16, 16]."""
    tl.static_assert(CHUNK == 16)
    place = tl.arange(0, CHUNK)
    unit = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    second = tl.dot(below, below, input_precision="ieee")
    fourth = tl.dot(second, second, input_precision="ieee")
    eighth = tl.dot(fourth, fourth, input_precision="ieee")
    found = tl.dot(unit - below, unit + second, input_precision="ieee")
    found = tl.dot(found, unit + fourth, input_precision="ieee")
    return tl.dot(found, unit + eighth, input_precision="ieee")


@triton.jit
def _pairs(one, key, logs, CHUNK: tl.constexpr):
    """Σ_k one[i, k] key[j, k] exp(logs[i, k] - logs[j, k]) for j <= i; a quotient of exponentials might overflow."""
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    place = tl.arange(0, CHUNK)
    for j in tl.static_range(CHUNK):
        mine = place[:, None] == j
        other_key, other_log = tl.sum(tl.where(mine, key, 0.0), 0), tl.sum(tl.where(mine, logs, 0.0), 0)
        between = tl.exp(tl.minimum(logs - other_log[None, :], 0.0))
        score = tl.sum(one * other_key[None, :] * between, 1)
        found += tl.where((place[None, :] == j) & (place[:, None] >= j), score[:, None], 0.0)
    return found


@triton.jit
def _delta_chunk(
    held, query, key, value, decay, beta, out, tables, low, first, high, head, lane, column, in_size, heads, width,
    size, share, scale,
    FEATURES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A chunk of tokens from `first` on, those in [low, high): what becomes of columns `held` of a state.

    Columns that are not `in_size` have no values: the state's part in the change alone.
    """
    place, in_width, own = tl.arange(0, CHUNK), lane < width, (head // share) * width + lane
    strictly, behind = place[:, None] > place[None, :], place[:, None] >= place[None, :]
    token = (first + place).to(tl.int64)
    used = (token >= low) & (token < high)
    some, mine = used[:, None] & in_width[None, :], used[:, None] & in_size[None, :]
    k = unit_rows(key.source + token[:, None] * key.stride + own[None, :], some)
    v = value.source + token[:, None] * value.stride + head * size + column[None, :]
    v = tl.load(v, mine, other=0.0).to(tl.float32)
    strength = tl.load(beta.source + token * beta.stride + head, used, other=0.0).to(tl.float32)[:, None]
    listed = (token[:, None] * heads + head) * CHUNK + place[None, :]
    if FEATURES:
        fades = decay.source + token[:, None] * decay.stride + (head * width + lane)[None, :]
        fades = tl.load(fades, some, other=0.0)
        logs, whole = tl.cumsum(fades, 0), tl.sum(fades, 0)[:, None]
        left = tl.trans(k * tl.exp(tl.sum(fades, 0)[None, :] - logs))
        scores, between = _pairs(k, k, logs, CHUNK), logs
    else:
        fades = tl.load(decay.source + token * decay.stride + head, used, other=0.0)
        one, whole = tl.cumsum(fades, 0), tl.sum(fades, 0)
        logs, left = one[:, None], tl.trans(k * tl.exp(whole - one)[:, None])
        if tables.inverse is None:
            between = tl.exp(tl.where(behind, one[:, None] - one[None, :], -float("inf")))
            scores = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
    if tables.inverse is None:
        inverse = _inverse(tl.where(strictly, strength * scores, 0.0), CHUNK)
    else:
        inverse = tl.load(tables.inverse + listed, used[:, None], other=0.0)
    grown = tl.exp(logs)
    seen = tl.dot(k * grown, held, input_precision=PRECISION)
    change = tl.dot(inverse, strength * (v - seen), input_precision=PRECISION)
    if OUTPUTS:
        q = unit_rows(query.source + token[:, None] * query.stride + own[None, :], some) * scale
        if tables.inverse is not None:
            reads = tl.load(tables.reads + listed, used[:, None], other=0.0)
        elif FEATURES:
            reads = _pairs(q, k, logs, CHUNK)
        else:
            reads = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        total = tl.dot(q * grown, held, input_precision=PRECISION)
        total += tl.dot(tl.where(behind, reads, 0.0), change, input_precision=PRECISION)
        target = out + (token[:, None] * heads + head) * size + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mine)
    return held * tl.exp(whole) + tl.dot(left, change, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "segment"])
def _delta_rows(
    query, key, value, decay, beta, state, stride_block, rows, out, between, moves, tables, num_rows, segment, heads,
    width, size, share, scale,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    LATER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the state of a head, over the tokens of a row in a segment.

    First those at the beginning of a row; of others what they add to a state, which lies `between` segments behind
    them, and by programs of further columns the matrix that `moves` a state before that. LATER all but the beginnings.
    """
    piece, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, WIDTH)
    await_previous(CHAINED)
    row, number = piece_of(rows, num_rows, piece, segment)
    start, count, block, goes_on = row_of(rows, row)
    low, high = span_of(start, count, number, segment)
    begins, ends = low == start, high == start + count
    groups = tl.cdiv(size, COLUMNS)
    moving = group >= groups
    works = low < high
    if LATER:
        works = works & (begins == 0)
    else:
        works = works & ((begins & (moving == 0)) | ((begins == 0) & (ends == 0)))
    if works:
        column = tl.where(moving, group - groups, group) * COLUMNS + tl.arange(0, COLUMNS)
        in_size = (column < size) & (moving == 0)
        kept = (lane < width)[:, None] & (column < tl.where(moving, width, size))[None, :]
        where = state + block * stride_block + (head * width + lane)[:, None] * size + column[None, :]
        border = number.to(tl.int64) * heads + head
        inside = between + (border * width + lane[:, None]) * size + column[None, :]
        if LATER:
            held = tl.load(inside - heads * width * size, kept, other=0.0).to(tl.float32)
        else:
            held = tl.load(where, kept & goes_on & begins, other=0.0).to(tl.float32)
            held = tl.where(moving & (lane[:, None] == column[None, :]), 1.0, held)
        origin = low
        if tables.inverse is not None:
            origin = low // CHUNK * CHUNK
        if LATER | begins:
            for first in range(origin, high, CHUNK):
                held = _delta_chunk(
                    held, query, key, value, decay, beta, out, tables, low, first, high, head, lane, column, in_size,
                    heads, width, size, share, scale, FEATURES, CHUNK, PRECISION, True,
                )  # fmt: skip
        else:
            for first in range(origin, high, CHUNK):
                held = _delta_chunk(
                    held, query, key, value, decay, beta, out, tables, low, first, high, head, lane, column, in_size,
                    heads, width, size, share, scale, FEATURES, CHUNK, PRECISION, False,
                )  # fmt: skip
        if ends:
            tl.store(where, held, kept)
        elif LATER == 0:
            move = moves + (border * width + lane[:, None]) * width + column[None, :]
            tl.store(tl.where(moving, move, inside), held, kept)


@triton.jit(do_not_specialize=["segment"])
def _pass_moved(
    between, moves, rows, segment, heads, width, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some columns of a head's state, over the borders of segments that a row goes over."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, lane = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    await_previous(CHAINED)
    start, count, _, _ = row_of(rows, row)
    first, last = start // segment, (start + count - 1) // segment
    if first + 1 < last:
        in_width = lane < width
        kept, square = in_width[:, None] & (column < size)[None, :], in_width[:, None] & in_width[None, :]
        border = first.to(tl.int64) * heads + head
        held = tl.load(between + (border * width + lane[:, None]) * size + column[None, :], kept, other=0.0)
        for _later in range(first + 1, last):
            border += heads
            move = tl.load(moves + (border * width + lane[:, None]) * width + lane[None, :], square, other=0.0)
            where = between + (border * width + lane[:, None]) * size + column[None, :]
            held = tl.dot(move, held, input_precision=PRECISION) + tl.load(where, kept, other=0.0)
            tl.store(where, held, kept)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: Any
) -> Tensor:
    """As `frame.core.ops.states.gated_delta`; of each tensor what belongs to a token, and a block, is contiguous."""
    num_tokens, heads, size = value.shape
    width, given = query.shape[2], step_rows(rows)
    lanes = max(16, triton.next_power_of_2(width))
    sizes = (heads, width, size, heads // key.shape[1], width**-0.5)
    inputs = [Operand(one, one.stride(0)) for one in (query, key, value, decay, beta)]
    options = {"WIDTH": lanes, "FEATURES": decay.dim() == 3, **chained(value.device)}
    if rows.max_query_len == 1:
        out = torch.empty((num_tokens, heads, size), dtype=value.dtype, device=value.device)
        columns = min(STEP_COLUMNS, STEP_NUMBERS // lanes, triton.next_power_of_2(size))
        _delta_step[(max(num_tokens, rows.blocks.shape[0]), heads, triton.cdiv(size, columns))](
            *inputs, state, state.stride(0), given, out, num_tokens, *sizes, COLUMNS=columns, num_warps=2, **options
        )
        return out
    out = torch.zeros((num_tokens, heads, size), dtype=value.dtype, device=value.device)
    _whole_rows(inputs, state, out, rows, sizes, {**options, "PRECISION": precision(value)})
    return out


def _whole_rows(
    inputs: list[Operand], state: Tensor, out: Tensor, rows: Any, sizes: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Fills `out` [T, H, V] and moves `state` on, for rows of any length."""
    (num_tokens, heads, size), width, num_rows = out.shape, sizes[1], rows.blocks.shape[0]
    given = step_rows(rows)
    columns = max(16, min(COLUMNS, triton.next_power_of_2(size)))
    segment = segment_for(rows.max_query_len, SEGMENT) if options["WIDTH"] <= MOST_MOVED else WHOLE
    borders, groups = num_tokens // segment, triton.cdiv(size, columns)
    between = moves = state  # not written where rows are whole
    if borders:
        between = torch.empty((borders, heads, width, size), dtype=torch.float32, device=out.device)
        moves = torch.empty((borders, heads, width, width), dtype=torch.float32, device=out.device)
    pieces = num_pieces(num_tokens, num_rows, segment), heads
    tables, how = Tables(None, None), {**options, "COLUMNS": columns, "CHUNK": CHUNK, "num_warps": 4}
    if rows.max_query_len > WIDE_CHUNK and not options["FEATURES"] and out.dtype.itemsize <= MOST_BYTES:
        tables = chunk_tables(inputs, given, num_rows, out, sizes, options)
        how |= {"CHUNK": WIDE_CHUNK, "num_warps": _WIDE_WARPS, "num_stages": _WIDE_STAGES}
    arguments = (*inputs, state, state.stride(0), given, out, between, moves, tables, num_rows, segment, *sizes)
    moved = triton.cdiv(width, columns) if borders else 0
    _delta_rows[(*pieces, groups + moved)](*arguments, LATER=False, **how)
    if borders:
        _pass_moved[(num_rows, heads, groups)](
            between, moves, given, segment, heads, width, size,
            WIDTH=options["WIDTH"], COLUMNS=columns, PRECISION=options["PRECISION"], num_warps=8,
            num_stages=1, **chained(out.device),
        )  # fmt: skip
        _delta_rows[(*pieces, groups)](*arguments, LATER=True, **how)
