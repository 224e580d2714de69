"""What the tokens of a chunk of the delta rule do to one another, in Triton, once for all columns of a state.

Within a chunk the changes of tokens depend on those of earlier ones through a unit triangular matrix I + A, where A has
strength_i · (k_i · k_j) · fade_ij below the diagonal, and outputs read them by (q_i · k_j) · fade_ij on it and below
(Yang et al. 2024, section 3). Its inverse is found by forward substitution, which stays exact where keys are alike and
the powers of A would cancel. Chunks are aligned runs of the step's tokens, so that each token has a row of both tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .convolution import StepRows, row_of
from .segments import num_pieces, piece_of, span_of

#: Tokens of a chunk that has tables.
CHUNK = 64
_UNIT_EPS = tl.constexpr(1e-6)


class Tables(NamedTuple):
    """Both float32 [T, H, 64], of each token its row, by the places of a chunk; None where there are none."""

    inverse: Any
    reads: Any


@triton.jit
def unit_rows(source, there):
    """Rows, or a vector, float32 and scaled to length 1; zeros where they are not `there`."""
    given = tl.load(source, there, other=0.0).to(tl.float32)
    axis: tl.constexpr = len(given.shape) - 1
    return given * tl.rsqrt(tl.sum(given * given, axis, keep_dims=True) + _UNIT_EPS)


@triton.jit(do_not_specialize=["num_rows"])
def _chunk_tables(
    query, key, decay, beta, tables, rows, num_rows, heads, width, share, scale,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: the tables of a head, of what a row has in a chunk."""
    piece, head = tl.program_id(0), tl.program_id(1)
    await_previous(CHAINED)
    row, number = piece_of(rows, num_rows, piece, CHUNK)
    start, count, _, _ = row_of(rows, row)
    low, high = span_of(start, count, number, CHUNK)
    if low < high:
        place, lane = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
        token = (number * CHUNK + place).to(tl.int64)
        used = (token >= low) & (token < high)
        some, own = used[:, None] & (lane < width)[None, :], (head // share) * width + lane[None, :]
        k = unit_rows(key.source + token[:, None] * key.stride + own, some)
        strength = tl.load(beta.source + token * beta.stride + head, used, other=0.0).to(tl.float32)
        logs = tl.cumsum(tl.load(decay.source + token * decay.stride + head, used, other=0.0), 0)
        behind = place[:, None] >= place[None, :]
        fades = tl.exp(tl.where(behind, logs[:, None] - logs[None, :], -float("inf")))
        scores = tl.dot(k, tl.trans(k), input_precision=PRECISION) * fades
        below = tl.where(place[:, None] > place[None, :], strength[:, None] * scores, 0.0)
        found = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for i in range(1, CHUNK):  # row i of the inverse, from those before it
            mine = (place == i)[:, None]
            factors = tl.sum(tl.where(mine, below, 0.0), 0)
            found -= tl.where(mine, tl.sum(factors[:, None] * found, 0)[None, :], 0.0)
        target = (token[:, None] * heads + head) * CHUNK + place[None, :]
        tl.store(tables.inverse + target, found, used[:, None])
        q = unit_rows(query.source + token[:, None] * query.stride + own, some) * scale
        reads = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fades
        tl.store(tables.reads + target, reads, used[:, None])


def chunk_tables(
    inputs: list[Any], rows: StepRows, num_rows: int, out: Tensor, sizes: tuple[Any, ...], options: Any
) -> Tables:
    """The tables of a step's rows, for `inputs` (query, key, value, decay, beta) as kernels take them.

    `out` [T, H, V] and `sizes` (heads, width, size, share, scale) are those of the rule.
    """
    (num_tokens, heads, _), (_, width, _, share, scale) = out.shape, sizes
    query, key, _, decay, beta = inputs
    shape = (num_tokens, heads, CHUNK)
    tables = Tables(*(torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2)))
    _chunk_tables[(num_pieces(num_tokens, num_rows, CHUNK), heads)](
        query, key, decay, beta, tables, rows, num_rows, heads, width, share, scale,
        WIDTH=options["WIDTH"], CHUNK=CHUNK, PRECISION=options["PRECISION"], num_warps=4, **chained(out.device),
    )  # fmt: skip
    return tables
