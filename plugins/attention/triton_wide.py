"""Prompts over a cache of 8-bit floats, by a kernel that reads pages of 16 bits: those are made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import AttentionSpec, GroupBatch, LayerParams
from frame.kernels.widen import widen

#: Bytes that the pages of a step take at most, a third of what the platform keeps free beside the largest step; longer
#: rows are read by the kernel that converts as it reads.
MOST_BYTES = 128 << 20


@dataclass(frozen=True)
class WidePages:
    """Where the blocks of a step's prompts lie once they are copied: int32 [rows] and [rows, most blocks of a row]."""

    firsts: Tensor
    table: Tensor
    num_pages: int


def wide_pages(spec: AttentionSpec, batch: GroupBatch, first_row: int) -> WidePages | None:
    """The pages of the rows from `first_row` on; None where they would take too much memory."""
    lens = np.asarray(batch.host_seq_lens[first_row:], np.int64)
    blocks = -(-lens // spec.block_size)
    num_pages, most = int(blocks.sum()), int(blocks.max(initial=0))
    page_bytes = 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    if not num_pages or num_pages * page_bytes > MOST_BYTES:
        return None
    own = batch.seq_lens[first_row : first_row + len(lens)]
    ends = torch.cumsum((own + (spec.block_size - 1)) // spec.block_size, 0, dtype=torch.int32)
    firsts = torch.cat((ends.new_zeros(1), ends[:-1]))
    table = firsts[:, None] + torch.arange(most, dtype=torch.int32, device=own.device)
    return WidePages(firsts, table.clamp_(max=num_pages - 1), num_pages)


def attend_wide(
    prefill: Callable[..., Tensor],
    layer: LayerParams,
    query: Tensor,
    kv_cache: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    pages: WidePages,
    out: Tensor,
    **features: object,
) -> None:
    """As `prefill`, over copies of what `rows` (query starts, lengths, block table) read of the cache."""
    query_start, seq_lens, block_table = rows
    count = len(pages.firsts)
    copied = widen(
        kv_cache, seq_lens[:count], block_table, pages.firsts, num_pages=pages.num_pages,
        max_pages=pages.table.shape[1], dtype=query.dtype, key_scale=layer.key_scale, value_scale=layer.value_scale,
    )  # fmt: skip
    prefill(query, copied, query_start[: count + 1], seq_lens[:count], pages.table, out=out, **features)
