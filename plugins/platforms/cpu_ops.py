"""Ops for host memory: index work in numpy on the tensors' own memory, and fewer passes over activations.

An operation of torch on a few elements costs several of numpy's, and a decode step is made of little else. Everything
here means what its reference in `frame.ops` means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from frame.core.ops import Ops
from frame.core.ops.step import StepBuffers, StepSizes

#: Where W xᵀ is 1.2 to 2 times as fast as x Wᵀ (MKL, float32, one thread or two): this many rows, and weights of at
#: least this many elements.
SWAPPED_ROWS = range(8, 49)
SWAPPED_WEIGHT = 1 << 20


class CpuOps(Ops):
    """The reference ops, with quicker ones for what every step does."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        small = weight.numel() < SWAPPED_WEIGHT or x.dim() != 2 or x.shape[0] not in SWAPPED_ROWS
        if small or x.dtype != torch.float32:
            return Ops.linear(x, weight, bias)
        product = torch.mm(weight, x.t()).t().contiguous()
        return product if bias is None else product.add_(bias)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        if x.dtype != torch.float32:
            return Ops.rms_norm(x, weight, eps, offset)
        return torch.rms_norm(x, (x.shape[-1],), weight + offset if offset else weight, eps)

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return CpuOps.rms_norm(total, weight, eps, offset), total

    @staticmethod
    def apply_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(bits == 0)
        if np.array_equal(rows.numpy(), np.arange(len(logits))):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    @staticmethod
    def rotary(
        query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        if interleaved or cos_sin.shape[-1] != query.shape[-1] or query.dtype != cos_sin.dtype:
            return Ops.rotary(query, key, positions, cos_sin, interleaved)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        doubled = torch.cat((cos, cos), dim=-1)
        return _rotate(query, doubled, sin), _rotate(key, doubled, sin)

    @staticmethod
    def norm_rotary(
        query: Tensor,
        key: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        offset: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        query, key = CpuOps.rms_norm(query, weights[0], eps, offset), CpuOps.rms_norm(key, weights[1], eps, offset)
        return CpuOps.rotary(query, key, positions, cos_sin, interleaved)

    @staticmethod
    def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return Ops.greedy(logits)
        values = logits.numpy()
        best = values.argmax(-1)
        return torch.from_numpy(best.astype(np.int32)), torch.from_numpy(values[np.arange(len(best)), best])

    @staticmethod
    def write_rows(table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
        rows, source, first = table.numpy(), values.numpy(), 0
        if len(source) == len(slots):
            rows[slots.numpy(), starts.numpy()] = source
            return
        for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            rows[slot, start : start + length] = source[first : first + length]
            first += length

    @staticmethod
    def write_values(vector: Tensor, slots: Tensor, values: Tensor) -> None:
        vector.numpy()[slots.numpy()] = values.numpy()

    @staticmethod
    def build_inputs(
        buffers: StepBuffers, token_ids: Tensor, tables: Sequence[Tensor], rows: Tensor, sizes: StepSizes
    ) -> None:
        slots, computed, counts = rows.numpy()
        batch, num_tokens, padded, size = len(slots), sizes.num_tokens, sizes.padded_tokens, sizes.block_size
        ends = counts.cumsum()
        row = np.arange(batch)
        if num_tokens == batch and np.count_nonzero(counts) == batch:
            positions = computed
        else:
            row = row.repeat(counts)
            positions = np.arange(num_tokens) + (computed - ends + counts)[row]
        _fill(buffers.positions.numpy(), positions, padded, 0)
        _fill(buffers.input_ids.numpy(), token_ids.numpy()[slots[row], positions], padded, 0)
        _fill(buffers.query_start.numpy()[1:], ends, sizes.padded_rows, num_tokens)
        _fill(buffers.seq_lens.numpy(), computed + counts, sizes.padded_rows, 0)
        block = positions // size
        offset = positions - block * size
        for table, own, mapping in zip(tables, buffers.tables, buffers.slot_mapping, strict=True):
            found = table.numpy()[slots, : sizes.max_blocks]
            own.numpy()[:batch, : sizes.max_blocks] = found
            _fill(mapping.numpy(), found[row, block].astype(np.int64) * size + offset, padded, -1)

    @staticmethod
    def advance(token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
        tokens, rows, columns = sampled.numpy(), slots.numpy(), lengths.numpy()
        kept = tokens >= 0
        if np.count_nonzero(kept) < len(kept):
            tokens, rows, columns = tokens[kept], rows[kept], columns[kept]
        token_ids.numpy()[rows, columns] = tokens


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] turned by cosines [T, 1, D] (both halves alike) and sines [T, 1, D / 2]."""
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def _fill(buffer: np.ndarray, values: np.ndarray, padded: int, padding: int) -> None:
    """`values` at the start of `buffer` [≥ padded], then `padding` up to `padded`."""
    buffer[: len(values)] = values
    if padded > len(values):
        buffer[len(values) : padded] = padding
