"""Sparse latent attention and its index by frame's Triton kernels: CUDA, and the CPU under the interpreter (for tests).

Every token is computed as a row of its own, a decode like a token of a prompt, in runs whose workspace is bounded.
Sizes of launches follow from the number of tokens and from bounds that the host knows, so that decode steps can be
captured.
Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import (
    BackendSetup,
    GroupBatch,
    IndexBackend,
    IndexSpec,
    LatentBackend,
    LatentParams,
    LatentSpec,
)
from frame.kernels import latent_decode as decode_kernels, latent_index as index_kernels
from frame.kernels.latent_decode import LatentLaunch, write_latents
from frame.kernels.latent_index import choose_best, index_scores
from frame.kernels.latent_sparse import latent_sparse, token_rows

from .latent_reasons import kernel_reasons, num_multiprocessors

#: Of scores, or of queries and sums of latents, that are held at once.
WORKSPACE_BYTES = 128 << 20
#: Runs are of a multiple of so many tokens, so that what belongs to one begins at a multiple of 16 bytes.
RUN = 16
#: A part of a list shorter than this costs more to join than it saves.
MIN_PART = 256


@dataclass(frozen=True)
class SparseStep:
    """The batch, of each token its row and how many tokens it sees (int32 [T]), and the most that one may see."""

    batch: GroupBatch
    table_rows: Tensor
    seen: Tensor
    longest: int

    @classmethod
    def of(cls, batch: GroupBatch) -> SparseStep:
        """The step of a batch; reads nothing of the device on the host."""
        found = token_rows(batch.query_start, batch.seq_lens, batch.num_tokens)
        return cls(batch, *found, max(1, int(batch.host_seq_lens.max(initial=0))))

    def runs(self, token_bytes: int) -> list[slice]:
        """The tokens of the step in runs, each of which takes so many bytes of the workspace."""
        size, count = max(RUN, WORKSPACE_BYTES // token_bytes // RUN * RUN), self.batch.num_tokens
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class TritonSparse(LatentBackend):
    """Attention of tokens to the latents that are chosen for each, absorbed."""

    needs_python = False

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._multiprocessors = num_multiprocessors(self.spec.device_type)

    @classmethod
    def supports(cls, spec: LatentSpec) -> str | None:
        dense = "" if spec.top_k else "attention to all tokens not supported (triton-latent serves it)"
        eight = "latents of 8 bits not supported (set kv_cache_dtype to auto)" if spec.kv_dtype.itemsize == 1 else ""
        alike = "deterministic steps not supported" if spec.deterministic else ""
        return "; ".join(kernel_reasons(spec, dense, eight, alike)) or None

    @classmethod
    def preference(cls, spec: LatentSpec) -> int | None:
        """The provider's own on CUDA; last where only the interpreter runs it."""
        return None if spec.device_type == "cuda" else -1

    def plan(self, batch: GroupBatch) -> SparseStep:
        return SparseStep.of(batch)

    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        spec, step = self.spec, plan
        if chosen is None:
            raise ValueError("sparse attention needs the tokens that each token attends to")
        write_latents(latent, kv_cache, step.batch.slot_mapping, spec.rank)
        runs = step.runs(spec.num_heads * (spec.width + spec.rank) * spec.dtype.itemsize)
        outs = [self._attend(layer, query, kv_cache, step, chosen, run) for run in runs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(
        self, layer: LatentParams, query: Tensor, kv_cache: Tensor, step: SparseStep, chosen: Tensor, run: slice
    ) -> Tensor:
        """[n, H, value_dim] of a run of tokens."""
        mixed = latent_sparse(
            layer.absorb(query[run]), kv_cache, step.table_rows[run], step.seen[run], step.batch.block_table,
            chosen[run],
            rank=self.spec.rank, scale=self.spec.scale, launch=self._launch(run.stop - run.start, step.longest),
        )  # fmt: skip
        return layer.values_of(mixed)

    def _launch(self, num_tokens: int, longest: int) -> LatentLaunch:
        """Sizes for so many tokens, of which none sees more than `longest`."""
        spec = self.spec
        whole = decode_kernels.launch_for(spec.num_heads, spec.dtype)
        programs = max(1, num_tokens * -(-spec.num_heads // whole.block_h))
        each = 2 if whole.block_h < 64 else 1  # programs that run on a multiprocessor at once
        most = min(spec.top_k, longest) // MIN_PART
        parts = max(1, min(decode_kernels.MAX_PARTS, most, each * self._multiprocessors // programs))
        return decode_kernels.launch_for(spec.num_heads, spec.dtype, 1 << (parts.bit_length() - 1))


class TritonIndex(IndexBackend):
    """Scores of what each token sees, and of these the best; deterministic, since no sum depends on other tokens."""

    needs_python = False

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._multiprocessors = num_multiprocessors(self.spec.device_type)

    @classmethod
    def supports(cls, spec: IndexSpec) -> str | None:
        return "; ".join(kernel_reasons(spec)) or None

    @classmethod
    def preference(cls, spec: IndexSpec) -> int | None:
        """The provider's own on CUDA; last where only the interpreter runs it."""
        return None if spec.device_type == "cuda" else -1

    def plan(self, batch: GroupBatch) -> SparseStep:
        return SparseStep.of(batch)

    def forward(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, key: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        step = plan
        write_latents(key, kv_cache, step.batch.slot_mapping, spec.head_dim)
        chosen = torch.empty((len(query), spec.top_k), dtype=torch.int32, device=query.device)
        scores = torch.empty((1, RUN), dtype=torch.float32, device=query.device)  # of a step where all is chosen
        for run in step.runs(4 * step.longest):
            seen = step.seen[run]
            if step.longest > spec.top_k:
                count = run.stop - run.start
                scores = index_scores(
                    query[run], weights[run], kv_cache, step.table_rows[run], seen, step.batch.block_table,
                    top_k=spec.top_k, longest=step.longest, scale=spec.scale,
                    launch=index_kernels.launch_for(count, step.longest, self._multiprocessors, spec.dtype),
                )  # fmt: skip
            choose_best(scores, seen, chosen[run])
        return chosen
