"""Attention by frame's Triton kernels: CUDA, and the CPU under Triton's interpreter (for tests).

A plan is nothing but launch sizes chosen from what the host knows, so planning neither waits for the device nor
copies to it. Knows no model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec, LayerParams
from frame.kernels import attention as kernels

from .reasons import Capabilities, reasons

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: A split shorter than this costs more to join than it saves.
MIN_SPLIT_LENGTH = 256
MAX_SPLITS = 64


@dataclass(frozen=True)
class TritonPlan:
    """The batch, the sizes that all layers launch with, and whether rows own every token."""

    batch: AttentionBatch
    launch: kernels.Launch
    covers_all: bool


class TritonAttention(AttentionBackend):
    """See the module."""

    def __init__(self, spec: AttentionSpec, *, config: Any, options: Any = None, ops: Any) -> None:
        super().__init__(spec, config=config, options=options, ops=ops)
        # Two programs per multiprocessor hide the latency of a decode step's loads.
        self._programs = 2 * _num_multiprocessors(spec.device_type)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        # The interpreter multiplies bfloat16 as if its bits were integers.
        dtypes = FLOATS if spec.device_type == "cuda" or not interpreted else FLOATS[1:]
        devices = ("cuda", "cpu") if interpreted else ("cuda",)
        can = Capabilities(devices=devices, dtypes=dtypes, kv_dtypes=dtypes, max_head_dim=256)
        return "; ".join(reasons(spec, can)) or None

    @classmethod
    def preference(cls, spec: AttentionSpec) -> int | None:
        """The provider's own on CUDA; last where only the interpreter runs it."""
        return None if spec.device_type == "cuda" else -1

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        spec = self.spec
        groups = spec.num_heads // spec.num_kv_heads
        decode = batch.max_query_len <= 1
        invariant = spec.deterministic or batch.deterministic
        splits = self._splits(len(batch.host_seq_lens), batch.max_seq_len) if decode and not invariant else 1
        launch = kernels.launch_for(
            spec.head_dim, groups, spec.dtype, decode=decode, splits=splits, invariant=invariant
        )
        return TritonPlan(batch, launch, int(batch.host_query_lens.sum()) == batch.num_tokens)

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: TritonPlan
    ) -> Tensor:
        spec, batch = layer.spec, plan.batch
        kernels.write_kv(key, value, kv_cache, batch.slot_mapping)
        make = torch.empty if plan.covers_all else torch.zeros
        return kernels.paged_attention(
            query,
            kv_cache,
            batch.query_start,
            batch.seq_lens,
            batch.block_table,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=layer.sinks,
            alibi_slopes=layer.alibi_slopes,
            launch=plan.launch,
            out=make(query.shape, dtype=query.dtype, device=query.device),
        )

    def _splits(self, num_rows: int, max_seq_len: int) -> int:
        """Parts of a row's keys, a power of two: enough programs to fill the device, none too short."""
        length = min(max_seq_len, self.spec.window) if self.spec.window else max_seq_len
        wanted = -(-self._programs // max(1, num_rows * self.spec.num_kv_heads))
        useful = min(wanted, length // MIN_SPLIT_LENGTH, MAX_SPLITS)
        return 1 << max(0, useful.bit_length() - 1)


def _num_multiprocessors(device_type: str) -> int:
    if device_type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
