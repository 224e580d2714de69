"""Prompts that begin at their first token by torch's scaled_dot_product_attention with cuDNN; the rest by our kernels.

cuDNN attends to dense keys and values only, so it takes the rows at the end of a batch that have nothing in the cache:
their keys are those of the step. cuDNN builds a plan for each new shape, which takes tens of milliseconds, so lengths
are padded (by less than an eighth) and a call takes a power of two of rows of one length, which leaves few shapes. The
outputs of padded queries are dropped; no query sees a padded key, since those come after it. Contains no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from frame.interfaces import AttentionBackend, AttentionSpec, BackendSetup, BlockFormat, GroupBatch, LayerParams

from .cache_write import store
from .reasons import Capabilities, reasons
from .triton import TritonAttention

_HALVES = (torch.bfloat16, torch.float16)
#: Most rows of one call.
MAX_ROWS = 16


@dataclass(frozen=True)
class Prompts:
    """`count` rows of `length` tokens from token `start` of the batch on, or at `tokens` int64 [count · length].

    `kept` int64 lists which of those `tokens` are real; each row's last token stands for its padding.
    """

    count: int
    length: int
    start: int
    tokens: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class CudnnPlan:
    """The other backend attends to the first `num_rows` rows, of `num_tokens` tokens, by `inner`; cuDNN to the rest."""

    batch: GroupBatch
    num_rows: int
    num_tokens: int
    inner: Any
    prompts: list[Prompts]


class CudnnAttention(AttentionBackend):
    """Prompts without cached tokens by cuDNN, all other rows by the other backend."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = _HALVES
    #: Shorter rows go to the other backend; lengths are padded to multiples of it, or of a power of two above.
    min_length: ClassVar[int] = 128
    #: The backend of all other rows; it decides the layout of the cache.
    inner: ClassVar[type[AttentionBackend]] = TritonAttention

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._inner = self.inner(setup)
        self.needs_python = self._inner.needs_python  # the other backend attends to all rows of one token

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        can = Capabilities(
            devices=cls.devices,
            dtypes=cls.dtypes,
            kv_dtypes=cls.dtypes,
            max_head_dim=256,
            head_multiple=8,
            converts=False,
            window=False,
            soft_cap=False,
            sinks=False,
            alibi=False,
            deterministic=False,
        )
        found = reasons(spec, can)
        if "cuda" in cls.devices and spec.device_type == "cuda" and not torch.backends.cudnn.is_available():
            found.append("this torch has no cuDNN")
        return "; ".join(found) or None

    @classmethod
    def kv_format(cls, spec: AttentionSpec) -> BlockFormat:
        return cls.inner.kv_format(spec)

    def plan(self, batch: GroupBatch) -> CudnnPlan:
        lens = batch.host_query_lens
        mine = (lens >= self.min_length) & (lens == batch.host_seq_lens) | (lens == 0)
        others = np.flatnonzero(~mine)
        first = int(others[-1]) + 1 if len(others) else 0
        if not lens[first:].any():
            return CudnnPlan(batch, len(lens), batch.num_tokens, self._inner.plan(batch), [])
        tokens = int(lens[:first].sum())
        rest = replace(
            batch,
            num_tokens=tokens,
            query_start=batch.query_start[: first + 1],
            seq_lens=batch.seq_lens[:first],
            block_table=batch.block_table[:first],
            slot_mapping=batch.slot_mapping[:tokens],
            host_query_lens=lens[:first],
            host_seq_lens=batch.host_seq_lens[:first],
        )
        prompts = list(_groups(lens, first, self.min_length, batch.slot_mapping.device))
        return CudnnPlan(batch, first, tokens, self._inner.plan(rest) if first else None, prompts)

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: CudnnPlan
    ) -> Tensor:
        n = plan.num_tokens
        if not plan.prompts:
            return cast("Tensor", self._inner.forward(layer, query, key, value, kv_cache, plan.inner))
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        # First: a row of the other backend may read blocks of an equal prompt that this step computes.
        store(key[n:], value[n:], kv_cache, plan.batch.slot_mapping[n:])
        if plan.num_rows:
            found = self._inner.forward(layer, query[:n], key[:n], value[:n], kv_cache, plan.inner)
            out[:n] = cast("Tensor", found)
        chosen = sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if query.is_cuda else nullcontext()
        with chosen:
            for rows in plan.prompts:
                q, k, v = (_rows(x, rows) for x in (query, key, value))
                found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.spec.scale, enable_gqa=True)
                _put(out, found.transpose(1, 2).flatten(0, 1), rows)
        return out


def padded(length: int, least: int) -> int:
    """`length` padded to a multiple of `least` or of a sixteenth of the next power of two."""
    step = max(least, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def _groups(lens: np.ndarray, first: int, least: int, device: torch.device) -> Iterator[Prompts]:
    """The rows from `first` on, by padded length, in powers of two up to MAX_ROWS."""
    starts = lens.cumsum(dtype=np.int64) - lens
    live = first + np.flatnonzero(lens[first:])
    lengths = np.array([padded(int(length), least) for length in lens[live]])
    for length in np.unique(lengths).tolist():
        rows = live[lengths == length]
        while len(rows):
            count = min(1 << (len(rows).bit_length() - 1), MAX_ROWS)
            yield _prompts(starts[rows[:count]], lens[rows[:count]], length, device)
            rows = rows[count:]


def _prompts(starts: np.ndarray, lens: np.ndarray, length: int, device: torch.device) -> Prompts:
    count = len(starts)
    if (lens == length).all() and (np.diff(starts) == length).all():
        return Prompts(count, length, int(starts[0]))
    places = np.arange(length)
    tokens = starts[:, None] + np.minimum(places, lens[:, None] - 1)
    kept = np.flatnonzero((places < lens[:, None]).ravel())
    listed = torch.from_numpy(np.stack((tokens.ravel(), np.resize(kept, tokens.size)))).to(device)
    return Prompts(count, length, int(starts[0]), listed[0], listed[1, : len(kept)])


def _rows(x: Tensor, rows: Prompts) -> Tensor:
    """[count, heads, length, D] of x [T, heads, D]."""
    if rows.tokens is None:
        found = x[rows.start : rows.start + rows.count * rows.length]
    else:
        found = x.index_select(0, rows.tokens)
    return found.view(rows.count, rows.length, *x.shape[1:]).transpose(1, 2)


def _put(out: Tensor, found: Tensor, rows: Prompts) -> None:
    """Writes `found` [count · length, H, D] where it belongs in `out` [T, H, D]."""
    if rows.tokens is None or rows.kept is None:
        out[rows.start : rows.start + len(found)] = found
    else:
        out.index_copy_(0, rows.tokens.index_select(0, rows.kept), found.index_select(0, rows.kept))
