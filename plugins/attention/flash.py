"""Attention by FlashAttention, where the user has installed it: version 3 or 4 on Hopper, else version 2.

Both read the paged cache in place. `flash_libraries` says which version serves a layer and why another cannot.
Only keys and values are stored by a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from frame.interfaces import AttentionBackend, AttentionSpec, BackendSetup, GroupBatch, LayerParams

from .cache_write import store
from .flash_libraries import LIBRARIES, FlashLibrary
from .reasons import Capabilities, reasons

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlashPlan:
    """The batch, and which of its tokens are padding: bool [T, 1, 1], None where none is and none can be."""

    batch: GroupBatch
    padding: Tensor | None


class FlashAttention(AttentionBackend):
    """Attention by the library, which splits rows by their lengths on the device and by the longest row."""

    needs_python = False
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    libraries: ClassVar[Sequence[FlashLibrary]] = LIBRARIES

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._library = next(library for library in self.libraries if not library.reasons(self.spec))
        self._attend = self._library.load()

    @classmethod
    def block_multiple(cls, spec: AttentionSpec) -> int:
        """The number of tokens of which the library that serves the layer needs a block to be a multiple."""
        return next((library.block_multiple for library in cls.libraries if not library.reasons(spec)), 1)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        can = Capabilities(
            devices=cls.devices,
            dtypes=_HALVES,
            kv_dtypes=_HALVES,
            max_head_dim=256,
            head_multiple=8,
            converts=False,
            sinks=False,
            deterministic=False,
        )
        refused = [(library.name, library.reasons(spec)) for library in cls.libraries]
        own = [f"{name}: {', '.join(found)}" for name, found in refused if found]
        return "; ".join(reasons(spec, can) + (own if len(own) == len(refused) else [])) or None

    def plan(self, batch: GroupBatch) -> FlashPlan:
        # a CUDA graph of a decode step may be replayed with padding rows that its capture did not have
        whole = batch.max_query_len > 1 and int(batch.host_query_lens.sum()) == batch.num_tokens
        return FlashPlan(batch, None if whole else (batch.slot_mapping < 0)[:, None, None])

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: FlashPlan
    ) -> Tensor:
        store(key, value, kv_cache, plan.batch.slot_mapping)
        if not plan.batch.max_query_len:
            return torch.zeros_like(query)
        # a library takes one token for each row of a decode step; what is left of tokens or rows is padding
        taken = query
        if plan.batch.max_query_len == 1:
            taken = _of_length(query, len(plan.batch.host_query_lens))
        out = _of_length(self._library.attend(self._attend, layer, taken, kv_cache, plan.batch), len(query))
        return out if plan.padding is None else out.masked_fill_(plan.padding, 0)


def _of_length(tokens: Tensor, length: int) -> Tensor:
    """`tokens` [T, H, D] cut or filled with zeros to `length`."""
    if length <= len(tokens):
        return tokens[:length]
    return pad(tokens, (0, 0, 0, 0, 0, length - len(tokens)))
