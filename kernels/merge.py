"""Joins attention over disjoint sets of keys, in Triton; the reference is `frame.core.ops.attention.merge_parts`.

out = Σ exp(lse_i - peak) part_i / Σ exp(lse_i - peak), in float32. Memory-bound; one pass over the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows, each a token's head, of one program.
_ROWS = 8


@triton.jit
def _merge(
    out, whole_lse, parts, lses, num_rows, num_heads, stride_part, stride_token, stride_head,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, dim = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    real = row < num_rows
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    place = row // num_heads * stride_token + row % num_heads * stride_head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        peak = tl.maximum(peak, tl.load(lses + part * num_rows + row, real, other=float("-inf")))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses + part * num_rows + row, real, other=float("-inf")) - base)
        # an empty part's output is not looked at
        x = tl.load(
            parts + part * stride_part + place[:, None] + dim[None, :], within & (weight > 0.0)[:, None], other=0.0
        )
        acc += x.to(tl.float32) * weight[:, None]
        total += weight
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), within)
    tl.store(whole_lse + row, tl.where(empty, float("-inf"), base + tl.log(total)), real)


def merge_parts(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. The last axis of `parts` [N, T, H, D] must be dense."""
    count, num_tokens, num_heads, head_dim = parts.shape
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    whole_lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=parts.device)
    num_rows = num_tokens * num_heads
    if num_rows:
        _merge[(triton.cdiv(num_rows, _ROWS),)](
            out, whole_lse, parts, lses.contiguous(), num_rows, num_heads, *parts.stride()[:3],
            PARTS=count, HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), ROWS=_ROWS,
        )  # fmt: skip
    return out, whole_lse


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "num_rows"], do_not_specialize_on_alignment=["query_start"])
def _join_rows(
    out, whole_lse, parts, lses, query_start, num_parts, num_tokens, num_rows, num_heads,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_merge`, of as many parts as there are, for the tokens that rows own."""
    origin = tl.load(query_start)
    row, dim = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    real = row < (tl.load(query_start + num_rows) - origin) * num_heads
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    peak, at = tl.full([ROWS], float("-inf"), tl.float32), row
    for _ in range(num_parts):
        peak = tl.maximum(peak, tl.load(lses + at, real, other=float("-inf")))
        at += num_tokens * num_heads
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([ROWS], tl.float32)
    acc, at = tl.zeros([ROWS, DIM], tl.float32), row
    for _ in range(num_parts):
        weight = tl.exp(tl.load(lses + at, real, other=float("-inf")) - base)
        acc += tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], within, other=0.0) * weight[:, None]
        total += weight
        at += num_tokens * num_heads
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    row += origin.to(tl.int64) * num_heads
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), within)
    if whole_lse is not None:
        tl.store(whole_lse + row, tl.where(empty, float("-inf"), base + tl.log(total)), real)


def join_rows(parts: Tensor, lses: Tensor, query_start: Tensor, *, out: Tensor, lse: Tensor | None) -> None:
    """Joins float32 `parts` [N, T, H, D] by their log-sum-exps [N, T, H] into `out`, and `lse` if it is given.

    Token i of the parts is token query_start[0] + i of `out`; those from query_start[-1] on are left as they are.
    """
    num_parts, num_tokens, num_heads, head_dim = parts.shape
    _join_rows[(triton.cdiv(num_tokens * num_heads, _ROWS),)](
        out, lse, parts, lses, query_start, num_parts, num_tokens, len(query_start) - 1, num_heads,
        HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), ROWS=_ROWS,
    )  # fmt: skip
