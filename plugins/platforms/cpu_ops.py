"""Ops for host memory: index work in numpy on the tensors' own memory, and fewer passes over activations.

An operation of torch on a few elements costs several of numpy's, and a decode step is made of little else. Everything
here means what its reference in `frame.ops` means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from frame.interfaces import SILU, Gating
from frame.kernels.native.nibbles import NibbleWeight
from frame.kernels.native.rows import NativeRows, begin, native_rows
from frame.ops import (
    NO_BIASES,
    AdapterWeights,
    CodedWeights,
    ExpertBiases,
    Ops,
    Positions,
    RowParts,
    ScanWeights,
    SlotGroups,
    StateRows,
    StepBuffers,
    StepSizes,
    gated,
    gated_delta_chunked,
    ssd_scan_chunked,
)

from .cpu_codes import byte_linear, linear_in_parts, multiplies_bytes
from .cpu_linear import is_packed, packed, product
from .cpu_pages import large_pages_later
from .invariant_ops import each_row, fused_experts_invariant, linear_invariant

#: Rows of fewer tokens are scanned token by token.
LEAST_CHUNK = 4
#: What a byte of a bitmask keeps of the bits of its eight logits, and the bits of minus infinity.
_KEPT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int32) * -1
_NEVER = np.float32(-np.inf).view(np.int32)
#: Bytes of a bitmask worked on at once: eight logits of four bytes for each stay in a processor's cache.
_MASK_CHUNK = 1 << 12


class CpuOps(Ops):
    """The reference ops, with quicker versions of those that every step runs.

    While `invariant` is set, sums and functions that libraries compute in another way at the end of a tensor are taken
    in pieces of one size; sums, products and roots of elements round the same everywhere and need no care.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        self._compiled = compiled
        #: how many weights were packed, each of which lies elsewhere since
        self.packed_count = 0
        if compiled:
            begin()

    @cached_property
    def native(self) -> NativeRows | None:
        """The kernels in C, where they are wanted and can be compiled; the first access waits for that."""
        return native_rows() if self._compiled else None

    def lookup(self, ids: Tensor, table: Tensor) -> Tensor:
        out = None if self.native is None else self.native.lookup(ids, table)
        return Ops.lookup(ids, table) if out is None else out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.invariant:
            return linear_invariant(x, weight, bias, product if weight.is_mkldnn else functional.linear)
        if weight.is_mkldnn and self.native is not None:
            out = self.native.packed_linear(x, weight, bias)
            if out is not None:
                return out
        return product(x, weight, bias)

    def linear_into(self, out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return out.copy_(self.linear(x, weight))

    def packs(self, weight: Tensor) -> bool:
        return is_packed(weight, read=self.native is not None)

    def packed(self, weight: Tensor) -> Tensor | None:
        found = packed(weight, read=self.native is not None)
        self.packed_count += 1
        if found is not None:
            large_pages_later(found)
        if found is not None and self.native is not None:
            self.native.learn(weight, found)
        return found

    def scaled_linear(
        self, x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None = None,
        zeros: Tensor | None = None, input_scale: Tensor | None = None, *, rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        of_bytes = codes.dtype == torch.int8 and block[0] == 1 and zeros is None
        by_rows = of_bytes and scales.shape[1] == 1 and scales.dtype == torch.float32
        grouped = of_bytes and block[1] == 32 and scales.dtype == torch.float16
        if (by_rows or grouped) and self.native is not None and not self.invariant:
            out = self.native.byte_linear(x, codes, scales)
            if out is not None:
                return out if bias is None else out.add_(bias)
        if by_rows and not self.invariant and x.numel() and multiplies_bytes():
            return byte_linear(x, codes, scales, bias)
        if self.invariant or not x.numel():
            return super().scaled_linear(x, codes, scales, block, bias, zeros, input_scale, rounds=rounds)
        per = block[0]

        def weight(rows: slice) -> Tensor:
            units = slice(rows.start // per, -(-rows.stop // per))
            return self.dequantize(codes[rows], scales[units], block, None if zeros is None else zeros[units])

        return linear_in_parts(x, (len(codes), codes.shape[1]), weight, bias, per)

    def packed_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        if self.invariant or not x.numel():
            return super().packed_linear(x, packed, scales, zeros, bias)
        if self.native is not None and (coded := NibbleWeight(packed, scales, zeros=zeros)).fits:
            out = self.native.nibble_linear(x, coded)
            if out is not None:
                return out if bias is None else out.add_(bias)

        def weight(rows: slice) -> Tensor:
            return self.dequantize_packed(packed[rows], scales[rows], None if zeros is None else zeros[rows])

        return linear_in_parts(x, (len(packed), x.shape[-1]), weight, bias)

    def table_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.invariant or not x.numel():
            return super().table_linear(x, packed, scales, table, numbers, bias)

        def weight(rows: slice) -> Tensor:
            return self.dequantize_table(packed[rows], scales[rows], table, None if numbers is None else numbers[rows])

        return linear_in_parts(x, (len(packed), x.shape[-1]), weight, bias)

    def coded_experts(
        self, hidden: Tensor, gate_up: CodedWeights, down: CodedWeights, weights: Tensor, ids: Tensor, *,
        of_all: int = 0, first: int = 0, parts: RowParts | None = None, gating: Gating = SILU,
        biases: ExpertBiases = NO_BIASES, rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        given = hidden, gate_up, down, weights, ids
        # the reference rounds weights to 16 bits, which what is more exact differs from where large terms cancel
        parted = gate_up.columns is not None or down.columns is not None
        if self.invariant or parted or hidden.dtype != torch.float32:
            how: dict[str, Any] = {"of_all": of_all, "first": first, "parts": parts, "gating": gating, "biases": biases}
            return super().coded_experts(*given, **how, rounds=rounds)
        out, (inner_bias, outer_bias) = torch.zeros_like(hidden), biases
        for expert in torch.unique(ids - first).tolist():
            if not 0 <= expert < len(gate_up.codes):
                continue
            token, choice = torch.where(ids == expert + first)
            inner = self._coded(hidden[token], gate_up, expert, None if inner_bias is None else inner_bias[expert])
            value = self._coded(gated(inner, gating), down, expert, None if outer_bias is None else outer_bias[expert])
            out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
        if parts is not None:
            for rows in parts.rows:
                parts.done(out, rows)
        return out

    def _coded(self, x: Tensor, coded: CodedWeights, expert: int, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b of one expert."""
        zeros, numbers = (None if one is None else one[expert] for one in (coded.zeros, coded.numbers))
        codes, scales = coded.codes[expert], coded.scales[expert]
        if coded.table is not None:
            return self.table_linear(x, codes, scales, coded.table, numbers, bias)
        if codes.dtype == torch.int32:
            return self.packed_linear(x, codes, scales, zeros, bias)
        return self.scaled_linear(x, codes, scales, coded.block, bias, zeros)

    def add_adapters(self, y: Tensor, x: Tensor, weights: AdapterWeights, groups: SlotGroups) -> Tensor:
        if not self.invariant:
            return Ops.add_adapters(y, x, weights, groups)
        for token in range(len(x)):  # a product's rows would depend on how many tokens have the slot
            alone = replace(groups, slots=groups.slots[token : token + 1])
            Ops.add_adapters(y[token : token + 1], x[token : token + 1], weights, alone)
        return y

    def map_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return each_row(function, x) if self.invariant else function(x)

    def silu_mul(self, x: Tensor) -> Tensor:
        out = None if self.native is None else self.native.silu_mul(x)
        return self.map_rows(Ops.silu_mul, x) if out is None else out

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return self.map_rows(Ops.gelu_tanh_mul, x)

    def fused_experts(
        self, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, *, of_all: int = 0,
        first: int = 0, parts: RowParts | None = None, gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:  # fmt: skip
        del of_all
        given = hidden, gate_up, down, weights, ids
        if self.invariant:
            return fused_experts_invariant(*given, first=first, gating=gating, biases=biases)
        return Ops.fused_experts(*given, first=first, parts=parts, gating=gating, biases=biases)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        out = None if self.native is None else self.native.rms_norm(x, weight, eps, offset)
        if out is not None:
            return out
        if x.dtype != torch.float32:
            return Ops.rms_norm(x, weight, eps, offset)
        return torch.rms_norm(x, (x.shape[-1],), weight + offset if offset else weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        both = None if self.native is None else self.native.add_rms_norm(x, residual, weight, eps, offset)
        if both is not None:
            return both
        total = x + residual
        return self.rms_norm(total, weight, eps, offset), total

    @staticmethod
    def apply_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
        if len(rows) and rows.min() < 0:
            rows, words = rows[rows >= 0], words[rows >= 0]
        whole = len(rows) == len(logits) and np.array_equal(rows.numpy(), np.arange(len(logits)))
        part = logits if whole else logits[rows]
        _forbid(part.numpy(), words.numpy().view(np.uint8))
        if not whole:
            logits[rows] = part

    def rotary(
        self, query: Tensor, key: Tensor, positions: Positions, cos_sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.native is not None and isinstance(positions, Tensor) and not interleaved:
            both = self.native.rotary(query, key, positions, cos_sin)
            if both is not None:
                return both
        whole = cos_sin.shape[-1] == query.shape[-1] and query.dtype == cos_sin.dtype
        if not isinstance(positions, Tensor) or interleaved or self.invariant or not whole:
            return Ops.rotary(query, key, positions, cos_sin, interleaved)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        doubled = torch.cat((cos, cos), dim=-1)
        return _rotate(query, doubled, sin), _rotate(key, doubled, sin)

    def norm_rotary(
        self,
        query: Tensor,
        key: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        offset: float,
        positions: Positions,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if self.native is not None and isinstance(positions, Tensor) and not interleaved:
            both = self.native.rotary(query, key, positions, cos_sin, weights, eps, offset)
            if both is not None:
                return both
        query, key = self.rms_norm(query, weights[0], eps, offset), self.rms_norm(key, weights[1], eps, offset)
        return self.rotary(query, key, positions, cos_sin, interleaved)

    def ssd_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights, state: Tensor, rows: StateRows
    ) -> Tensor:
        plain = self.invariant or rows.max_query_len < LEAST_CHUNK
        return (Ops.ssd_scan if plain else ssd_scan_chunked)(x, dt, b, c, weights, state, rows)

    def gated_delta(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        plain = self.invariant or rows.max_query_len < LEAST_CHUNK
        return (Ops.gated_delta if plain else gated_delta_chunked)(query, key, value, decay, beta, state, rows)

    def draw(
        self, logits: Tensor, temperature: Tensor, streams: Tensor, positions: Tensor, *filters: Tensor | None
    ) -> Tensor:
        if not self.invariant or len(logits) < 2:
            return Ops.draw(logits, temperature, streams, positions, *filters)
        rows = [slice(row, row + 1) for row in range(len(logits))]
        return torch.cat(
            [Ops.draw(logits[row], temperature[row], streams[row], positions[row], *_cut(filters, row)) for row in rows]
        )

    def best_of_part(self, logits: Tensor, first: int, *draw: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if not self.invariant or len(logits) < 2:
            return Ops.best_of_part(logits, first, *draw)
        rows = [slice(row, row + 1) for row in range(len(logits))]
        best = [Ops.best_of_part(logits[row], first, *_cut(draw, row)) for row in rows]
        scores, token_ids, values = (torch.cat(parts) for parts in zip(*best, strict=True))
        return scores, token_ids, values

    def keep_threshold(self, scores: Tensor, *filters: Tensor | None) -> Tensor:
        if not self.invariant or len(scores) < 2:
            return Ops.keep_threshold(scores, *filters)
        rows = [slice(row, row + 1) for row in range(len(scores))]
        return torch.cat([Ops.keep_threshold(scores[row], *_cut(filters, row)) for row in rows])

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        in_prompt: Tensor,
        output_counts: Tensor,
        repetition: Tensor | None,
        frequency: Tensor | None,
        presence: Tensor | None,
    ) -> None:
        penalties = (repetition, frequency, presence)
        if not self.invariant:
            return Ops.penalize(logits, rows, in_prompt, output_counts, *penalties)
        for row in range(len(rows)):
            one = slice(row, row + 1)
            Ops.penalize(logits, rows[one], in_prompt[one], output_counts[one], *_cut(penalties, one))
        return None

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.native is not None and (both := self.native.greedy(logits)) is not None:
            return both
        if logits.dtype != torch.float32:
            return Ops.greedy(logits)
        values = logits.numpy()
        best = values.argmax(-1)
        return torch.from_numpy(best.astype(np.int32)), torch.from_numpy(values[np.arange(len(best)), best])

    @staticmethod
    def write_rows(table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
        rows, source, first = table.numpy(), values.numpy(), 0
        if len(source) == len(slots) and (lengths.numpy() == 1).all():
            rows[slots.numpy(), starts.numpy()] = source
            return
        for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            rows[slot, start : start + length] = source[first : first + length]
            first += length

    @staticmethod
    def write_values(vector: Tensor, slots: Tensor, values: Tensor) -> None:
        places, given = slots.numpy(), values.numpy()
        if (kept := places >= 0).all():
            vector.numpy()[places] = given
        else:
            vector.numpy()[places[kept]] = given[kept]

    def build_inputs(
        self, buffers: StepBuffers, token_ids: Tensor, tables: Sequence[Tensor], rows: Tensor, sizes: StepSizes
    ) -> None:
        if self.native is not None and self.native.one_token_each(rows, sizes.padded_tokens, token_ids, *tables):
            made = buffers.input_ids, buffers.positions, buffers.query_start, buffers.seq_lens
            self.native.step_rows(rows, token_ids, *made)
            groups = zip(sizes.block_sizes, tables, buffers.tables, buffers.slot_mapping, strict=True)
            for size, table, own, mapping in groups:
                self.native.step_blocks(rows, size, table, own, mapping)
            return
        slots, computed, counts = rows.numpy()
        batch, padded = len(slots), sizes.padded_tokens
        row, ends = np.arange(batch), counts.cumsum()
        num_tokens = int(ends[-1])
        if num_tokens == batch and np.count_nonzero(counts) == batch:
            owner, positions = slots, computed
        else:
            row = row.repeat(counts)
            owner, positions = slots[row], np.arange(num_tokens) + (computed - ends + counts)[row]
        _fill(buffers.positions.numpy(), positions, padded, 0)
        _fill(buffers.input_ids.numpy(), token_ids.numpy()[owner, positions], padded, 0)
        buffers.query_start.numpy()[1 : batch + 1] = ends
        buffers.seq_lens.numpy()[:batch] = computed + counts
        known = 0
        parts = zip(tables, buffers.tables, buffers.slot_mapping, sizes.max_blocks, sizes.block_sizes, strict=True)
        for table, own, mapping, width, size in parts:
            if size != known:
                known, block = size, positions // size
                offset = positions - block * size
            found = table.numpy()[slots, :width]
            own.numpy()[:batch, :width] = found
            _fill(mapping.numpy(), found[row, block].astype(np.int64) * size + offset, padded, -1)

    def join_drawn(self, token_ids: Tensor, drawn: Tensor) -> Tensor:
        return Ops.join_drawn(token_ids, drawn) if self.native is None else self.native.join_drawn(token_ids, drawn)

    def advance(self, token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
        if self.native is not None and self.native.advance(token_ids, slots, lengths, sampled):
            return
        tokens, rows, columns = sampled.numpy(), slots.numpy(), lengths.numpy()
        kept = (tokens >= 0) & (columns > 0) & (rows >= 0)
        if np.count_nonzero(kept) < len(kept):
            tokens, rows, columns = tokens[kept], rows[kept], columns[kept]
        token_ids.numpy()[rows, columns] = tokens


def _cut(values: Sequence[Tensor | None], rows: slice) -> list[Tensor | None]:
    return [None if value is None else value[rows] for value in values]


def _forbid(logits: np.ndarray, masks: np.ndarray) -> None:
    """Sets to -inf, in place, the float32 `logits` [N, V] whose bit in `masks` uint8 [N, at least V / 8] is 0.

    On the bits, ((x ^ never) & kept) ^ never: a quarter of the time that filling by a mask of booleans takes, and exact
    for NaN and infinity, which a sum or a minimum would not be.
    """
    vocab = logits.shape[1]
    bits, width = logits.view(np.int32), -(-vocab // 8)
    step = max(1, _MASK_CHUNK // width)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        kept = _KEPT.take(masks[rows, :width], axis=0, mode="clip").reshape(-1, 8 * width)[:, :vocab]
        part = bits[rows]
        part ^= _NEVER
        part &= kept
        part ^= _NEVER


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
