"""Attention within chunks of a row (Llama 4): each backend is given every chunk as a row of its own, from its start.

So no backend has to know of chunks, and steps of one token a row read their lengths on the device alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..interfaces.attention import AttentionBackend, GroupBatch


class ChunkPlanner:
    """Plans for layers whose tokens see those of their own run of `chunk` tokens, by a `backend` that sees all.

    Raises `ValueError` where a chunk is no whole number of the backend's blocks.
    """

    def __init__(self, backend: AttentionBackend, chunk: int) -> None:
        size = backend.spec.block_size
        if size and chunk % size:
            raise ValueError(
                f"chunks of {chunk} tokens cannot be cut into blocks of {size}; choose a block size for it"
            )
        self.backend, self.needs_python = backend, backend.needs_python
        self._chunk, self._block_size = chunk, size

    def plan(self, batch: GroupBatch) -> Any:
        """The backend's plan for the chunks of the rows."""
        most = min(batch.max_seq_len, self._chunk)
        if batch.max_query_len <= 1:
            begins = (batch.seq_lens - 1).clamp(min=0) // self._chunk * self._chunk
            table = self._cut(batch.block_table, begins, most)
            host_lens = np.minimum(batch.host_seq_lens, self._chunk)
            changed: dict[str, Any] = {"seq_lens": batch.seq_lens - begins, "block_table": table}
            return self.backend.plan(replace(batch, **changed, host_seq_lens=host_lens, max_seq_len=most, prefix=None))
        pieces = self._pieces(batch)
        counts, lengths = pieces[2:]
        count = len(counts)
        packed = np.zeros((5, (count + 4) // 4 * 4), np.int32)  # rows begin at 16 bytes, for which kernels are compiled
        packed[:4, :count], packed[4, 1 : count + 1] = pieces, counts.cumsum()
        host = torch.from_numpy(packed)
        # without a wait for launched steps: the driver takes the values over at once
        there = torch.empty(host.shape, dtype=host.dtype, device=batch.seq_lens.device).copy_(host, non_blocking=True)
        index, begun, _, seq_lens, starts = there[:, : count + 1]
        table = self._cut(batch.block_table[index[:count]], begun[:count], most)
        changed = {"query_start": starts, "seq_lens": seq_lens[:count], "block_table": table, "max_seq_len": most}
        return self.backend.plan(replace(batch, **changed, host_query_lens=counts, host_seq_lens=lengths, prefix=None))

    def _pieces(self, batch: GroupBatch) -> np.ndarray:
        """int32 [4, chunks with query tokens]: row, first position, query tokens, and tokens up to the last of them."""
        known = batch.exact_lens or (batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing())
        seq_lens = batch.host_seq_lens if known else batch.seq_lens.cpu().numpy()
        found: list[tuple[int, int, int, int]] = []
        for row, (count, end) in enumerate(zip(batch.host_query_lens.tolist(), seq_lens.tolist(), strict=True)):
            place = max(0, end - count)
            if not count:
                found.append((row, 0, 0, 0))
            while count:
                begin = place // self._chunk * self._chunk
                taken = min(count, begin + self._chunk - place)
                found.append((row, begin, taken, place + taken - begin))
                place, count = place + taken, count - taken
        return np.ascontiguousarray(np.array(found, np.int32).reshape(-1, 4).T)

    def _cut(self, table: Tensor, begins: Tensor, most: int) -> Tensor:
        """The blocks of the `table` [B, X] from position begins[i] of row i on, as many as hold `most` tokens."""
        size = self._block_size
        width = min(table.shape[1], -(-most // size))
        columns = (begins // size)[:, None] + torch.arange(width, dtype=begins.dtype, device=begins.device)
        return table.gather(1, columns.clamp(max=table.shape[1] - 1).long())
