"""Multi-head latent attention by frame's Triton kernels: CUDA, and the CPU under Triton's interpreter (for tests).

Single tokens, and rows of few new tokens, are attended absorbed, as rows of their own. Long rows are attended expanded:
over what the step brings, then over what is cached, in pieces that fit a fixed workspace, those of all rows together.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import BackendSetup, GroupBatch, LatentBackend, LatentParams, LatentSpec
from frame.kernels import latent_decode as decode_kernels
from frame.kernels.hopper import hopper_kernel
from frame.kernels.latent_decode import LatentLaunch, latent_decode, write_latents
from frame.kernels.latent_prefill import latent_prefill

from .latent import least_expanded, packed, unpacked
from .latent_reasons import is_interpreted, kernel_reasons, num_multiprocessors
from .triton import converts_e4m3

#: Of keys and values of cached tokens that are expanded at once, those of all rows together.
WORKSPACE_BYTES = 128 << 20
#: A part of a row shorter than this costs more to join than it saves.
MIN_PART = 256
#: The Hopper kernels, for few heads and for more: heads of a program, and the most parts that a row is read in (128
#: cost more to join than they save). Measured on an H200 (`benchmarks/kernels/latent_sweep.py`).
HOPPER_KERNELS = (("latent_few", 16, 96), ("latent_hopper", 64, decode_kernels.MAX_PARTS))


@dataclass(frozen=True)
class Piece:
    """Cached tokens that are expanded together: their `places` (blocks [S], offsets [S]) in the cache.

    Each row has `lens` of them from `starts` on.
    """

    places: tuple[Tensor, Tensor]
    starts: Tensor
    lens: Tensor


@dataclass(frozen=True)
class Absorbed:
    """Tokens of rows with few new ones, as rows of their own: places in the batch, lengths, rows of the block table.

    `slots` are -1, since these tokens are stored before.
    """

    tokens: Tensor
    slots: Tensor
    seq_lens: Tensor
    table_rows: Tensor
    launch: LatentLaunch


@dataclass(frozen=True)
class Expanded:
    """Rows behind the single tokens: where their new tokens begin, their number (0: absorbed), and what is cached."""

    starts: Tensor
    lens: Tensor
    pieces: list[Piece]


@dataclass(frozen=True)
class LatentStep:
    """The batch. Its first `num_decodes` rows have one token each; what is behind them is `few` or `long`.

    Unless the rows cover all tokens, those that no row owns are padding.
    """

    batch: GroupBatch
    num_decodes: int
    decode: LatentLaunch | None
    few: Absorbed | None
    long: Expanded | None
    covers_all: bool = False


class TritonLatent(LatentBackend):
    """Latent attention by Triton kernels."""

    needs_python = False

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._least_expanded = least_expanded(self.spec)
        self._multiprocessors = num_multiprocessors(self.spec.device_type)
        # captured steps keep the one that they were captured with
        self._counted = [torch.arange(1024, dtype=torch.int32, device=self.spec.device_type)]
        numbers = self.spec.num_heads * (self.spec.nope_dim + self.spec.value_dim)
        self._workspace = max(1024, WORKSPACE_BYTES // (numbers * self.spec.dtype.itemsize))

    @classmethod
    def supports(cls, spec: LatentSpec) -> str | None:
        eight = spec.kv_dtype == torch.float8_e4m3fn and not (is_interpreted() or converts_e4m3())
        old = "KV-cache dtype float8_e4m3fn not supported before compute capability 8.9" if eight else ""
        sparse = "sparse attention not supported (triton-sparse serves it)" if spec.top_k else ""
        alike = "deterministic steps not supported" if spec.deterministic else ""
        return "; ".join(kernel_reasons(spec, old, sparse, alike)) or None

    @classmethod
    def preference(cls, spec: LatentSpec) -> int | None:
        """The provider's own on CUDA; last where only the interpreter runs it."""
        return None if spec.device_type == "cuda" else -1

    def plan(self, batch: GroupBatch) -> LatentStep:
        lens = batch.host_query_lens
        longer = np.flatnonzero(lens != 1)
        first = int(longer[0]) if len(longer) else len(lens)
        if not lens[first:].any():
            return LatentStep(batch, first, self._launch(first, batch.host_seq_lens[:first]), None, None)
        decode = self._launch(first, batch.host_seq_lens[:first]) if first else None
        cached = np.maximum(batch.host_seq_lens - lens, 0)
        rows = np.arange(len(lens)) >= first
        long = rows & (lens > 0) & ((lens >= self._least_expanded) | (cached == 0))
        few = rows & (lens > 0) & ~long
        return LatentStep(
            batch,
            first,
            decode,
            self._few(batch, few) if few.any() else None,
            self._long(batch, first, long, cached) if long.any() else None,
            covers_all=int(lens.sum()) == batch.num_tokens,
        )

    def _few(self, batch: GroupBatch, chosen: np.ndarray) -> Absorbed:
        lens, device = batch.host_query_lens, batch.seq_lens.device
        starts = lens.cumsum() - lens
        rows = np.repeat(np.flatnonzero(chosen), lens[chosen])
        within = np.concatenate([np.arange(count) for count in lens[chosen]])
        table_rows = _int32(rows, device)
        behind = _int32(lens[rows] - 1 - within, device)
        tokens = _staged((starts[rows] + within).astype(np.int64), device)
        launch = self._launch(len(rows), batch.host_seq_lens[chosen])
        slots = torch.full_like(tokens, -1)
        return Absorbed(tokens, slots, batch.seq_lens[table_rows.long()] - behind, table_rows, launch)

    def _long(self, batch: GroupBatch, first: int, chosen: np.ndarray, cached: np.ndarray) -> Expanded:
        lens, device = batch.host_query_lens, batch.seq_lens.device
        starts = (lens.cumsum() - lens)[first:] - first
        own = np.where(chosen, lens, 0)[first:]
        known = (batch.seq_lens - (batch.query_start[1:] - batch.query_start[:-1])).clamp(min=0)
        pieces = [
            self._piece(batch, known, part, first) for part in pieces_of(np.where(chosen, cached, 0), self._workspace)
        ]
        return Expanded(_int32(starts, device), _int32(own, device), pieces)

    def _piece(self, batch: GroupBatch, known: Tensor, part: list[tuple[int, int, int]], first: int) -> Piece:
        """`part` holds (row, first token, last token + 1); `known` [B] tokens are in the cache before the step."""
        device, size = known.device, self.spec.block_size
        starts, firsts, lasts = (np.zeros(len(known), np.int32) for _ in range(3))
        rows, places, count = list[np.ndarray](), list[np.ndarray](), 0
        for row, low, high in part:
            starts[row], firsts[row], lasts[row] = count, low, high
            rows.append(np.full(high - low, row))
            places.append(np.arange(low, high))
            count += high - low
        of_row, position = (_staged(np.concatenate(one), device) for one in (rows, places))
        position = torch.minimum(position, (known[of_row] - 1).clamp(min=0))  # nothing behind a row's end is read
        found = batch.block_table[of_row, position // size].long(), position % size
        lengths = (torch.minimum(_int32(lasts, device), known) - _int32(firsts, device)).clamp(min=0)
        return Piece(found, _int32(starts[first:], device), lengths[first:].to(torch.int32))

    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        del chosen
        spec, step, n = self.spec, plan, plan.num_decodes
        batch: GroupBatch = step.batch
        if step.decode is not None and n == len(query):
            return self._decode(layer, query, latent, kv_cache, step)
        make = query.new_empty if step.covers_all else query.new_zeros
        out = make((*query.shape[:2], spec.value_dim))
        if step.few is not None or step.long is not None:
            # First: of two equal prompts in one step, the second has one token left and reads what the first stores.
            write_latents(latent[n:], kv_cache, batch.slot_mapping[n:], spec.rank)
        if step.decode is not None:
            out[:n] = self._decode(layer, query, latent, kv_cache, step)
        if step.few is not None:
            few = step.few
            mixed = latent_decode(
                layer.absorb(query[few.tokens]), latent, kv_cache, few.slots, few.seq_lens, few.table_rows,
                batch.block_table,
                rank=spec.rank, scale=spec.scale, launch=few.launch,
            )  # fmt: skip
            out[few.tokens] = layer.values_of(mixed)
        if step.long is not None:
            self._attend_long(layer, query, latent[n:], kv_cache, step, out)
        return out

    def _decode(self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, step: LatentStep) -> Tensor:
        """[n, H, value_dim] of the single tokens, which are stored."""
        batch, n, launch = step.batch, step.num_decodes, step.decode
        if launch is None:
            raise ValueError("a step without single tokens has no launch for them")
        absorbed = layer.absorb(query[:n])
        given = latent[:n], kv_cache, batch.slot_mapping[:n], batch.seq_lens[:n], self._numbers(n, query.device)
        if (hopper := self._by_hopper(absorbed, kv_cache)) is not None:
            kernel, splits = hopper
            return layer.values_of(
                kernel(absorbed, *given, batch.block_table[:n], scale=self.spec.scale, splits=splits(batch.max_seq_len))
            )
        mixed = latent_decode(
            absorbed, *given, batch.block_table[:n], rank=self.spec.rank, scale=self.spec.scale, launch=launch
        )
        return layer.values_of(mixed)

    def _by_hopper(
        self, absorbed: Tensor, kv_cache: Tensor
    ) -> tuple[Callable[..., Tensor], Callable[[int], int]] | None:
        """The Hopper kernel for so many heads, and how many parts rows of a length have.

        A multiprocessor runs one program at a time.
        """
        count, heads, _ = absorbed.shape
        few, many = HOPPER_KERNELS
        module, each, parts = few if heads <= few[1] else many
        serves, kernel = (hopper_kernel(absorbed.device, module, name) for name in ("serves", "latent_decode"))
        if serves is None or kernel is None or not serves(absorbed, kv_cache, self.spec.rank):
            return None
        most = min(parts, self._multiprocessors // (count * -(-heads // each)))
        return kernel, lambda length: max(1, min(most, length // MIN_PART))

    def _attend_long(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, step: LatentStep, out: Tensor
    ) -> None:
        """Fills the long rows' parts of `out`; `latent` are those behind the single tokens."""
        spec, long, query_start = self.spec, step.long, step.batch.query_start[step.num_decodes :]
        if long is None:
            return
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        how: dict[str, Any] = {"scale": spec.scale, "out": out, "lse": lse}
        latent = unpacked(packed(latent, spec), spec)  # a token's result does not depend on how its prompt is cut
        key, value = layer.expand(latent)
        keys = key, latent[:, spec.rank :], value
        latent_prefill(query, keys, query_start, long.starts, long.lens, causal=True, merges=False, **how)
        for piece in long.pieces:
            cached = unpacked(kv_cache[piece.places], spec)
            key, value = layer.expand(cached)
            keys = key, cached[:, spec.rank :], value
            latent_prefill(query, keys, query_start, piece.starts, piece.lens, causal=False, merges=True, **how)

    def _numbers(self, count: int, device: torch.device) -> Tensor:
        """int32 0 .. `count` or more."""
        if len(self._counted[-1]) < count:
            self._counted.append(torch.arange(2 * count, dtype=torch.int32, device=device))
        return self._counted[-1]

    def _launch(self, num_rows: int, seq_lens: np.ndarray) -> LatentLaunch:
        """Sizes for so many rows of one token, the longest of which has as many tokens as `seq_lens` says."""
        spec = self.spec
        whole = decode_kernels.launch_for(spec.num_heads, spec.dtype)
        programs = max(1, num_rows * -(-spec.num_heads // whole.block_h))
        each = 2 if whole.block_h < 64 else 1  # programs that run on a multiprocessor at once
        parts = min(
            decode_kernels.MAX_PARTS, int(seq_lens.max(initial=0)) // MIN_PART, each * self._multiprocessors // programs
        )
        return decode_kernels.launch_for(spec.num_heads, spec.dtype, 1 << (max(1, parts).bit_length() - 1))


def pieces_of(cached: np.ndarray, most: int) -> list[list[tuple[int, int, int]]]:
    """Runs of cached tokens, (row, first, last + 1), in pieces of up to `most` tokens; row i has cached[i] of them."""
    pieces, left = list[list[tuple[int, int, int]]](), 0
    for row, count in enumerate(cached.tolist()):
        first = 0
        while first < count:
            if left == 0:
                pieces.append([])
                left = most
            last = min(count, first + left)
            pieces[-1].append((row, first, last))
            left -= last - first
            first = last
    return pieces


def _int32(values: np.ndarray, device: torch.device) -> Tensor:
    return _staged(values.astype(np.int32), device)


def _staged(values: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for the steps that were launched: the driver takes the values over at once."""
    host = torch.from_numpy(values)
    return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host, non_blocking=True)
