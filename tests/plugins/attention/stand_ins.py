"""Backends around foreign functions, with functions of the same signatures that compute by the reference ops on a CPU.

They check every argument's type, so that what the real ones would refuse fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frame.core.ops import Ops
from frame.plugins.attention.cudnn import CudnnAttention
from frame.plugins.attention.flash import FlashAttention
from frame.plugins.attention.flash_libraries import FlashFour, FlashThree, FlashTwo
from frame.plugins.attention.torch import FLOATS, TorchAttention


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """FlashAttention 3: queries by running sums, keys by lengths and a page table."""
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal, window_size,
                   softcap, None)  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """FlashAttention 2: queries and keys by running sums."""
    assert block_table is not None
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_q > 1 or len(q) == len(lengths)  # of single tokens it takes one of each row
    assert max_seqlen_k >= int(lengths.max())
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    return _attend(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, causal, window_size, softcap,
                   alibi_slopes)  # fmt: skip


def flash_attn_four(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """FlashAttention 4, a part of its arguments: queries by running sums, keys by lengths and a page table."""
    assert seqused_k is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert window_size == (None, None)
    return _attend(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, (-1, -1), softcap, None), None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    soft_cap: float,
    slopes: Tensor | None,
) -> Tensor:
    assert starts.dtype == lengths.dtype == table.dtype == torch.int32
    assert starts.dim() == lengths.dim() == 1
    assert len(starts) == len(lengths) + 1 == len(table) + 1
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.dim() == 4  # pages, tokens, heads, features
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[2] == 0
    assert causal
    assert window == (-1, -1) or (window[0] >= 0 and window[1] == 0)
    assert scale is not None
    out = Ops.paged_attention(
        q, torch.stack((k, v)), starts, lengths, table,
        scale=scale, window=window[0] + 1, soft_cap=soft_cap, alibi_slopes=slopes,
    )  # fmt: skip
    out[int(starts[-1]) :] = float("nan")  # the real ones leave what no row owns as it was
    return out


class StandInThree(FlashThree):
    def load(self) -> Callable[..., Any]:
        return flash_attn_with_kvcache

    def capability(self) -> tuple[int, int]:
        return 9, 0


class StandInFour(FlashFour):
    def load(self) -> Callable[..., Any]:
        return flash_attn_four

    def capability(self) -> tuple[int, int]:
        return 9, 0


class StandInTwo(FlashTwo):
    def load(self) -> Callable[..., Any]:
        return flash_attn_varlen_func


class FlashThreeOnCpu(FlashAttention):
    devices = ("cpu",)
    libraries = (StandInThree(),)


class FlashFourOnCpu(FlashAttention):
    devices = ("cpu",)
    libraries = (StandInFour(),)


class FlashTwoOnCpu(FlashAttention):
    devices = ("cpu",)
    libraries = (StandInTwo(),)


class CudnnOnCpu(CudnnAttention):
    """scaled_dot_product_attention with what torch has on a CPU, for rows as short as the suite's."""

    devices = ("cpu",)
    dtypes = FLOATS
    min_length = 4
    inner = TorchAttention
