"""Attention by FlashAttention, where the user has installed it: version 3 on Hopper, else version 2.

Both read the paged cache as it lies. Which one serves a layer, and why not, is in `flash_libraries`. Knows no kernel of
ours but the one that stores keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec, LayerParams

from .cache_write import store
from .flash_libraries import LIBRARIES, FlashLibrary
from .reasons import Capabilities, reasons

_HALVES = (torch.bfloat16, torch.float16)


class FlashAttention(AttentionBackend):
    """See the module. A plan is the batch: what the library splits, it decides from lengths on the device."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    libraries: ClassVar[Sequence[FlashLibrary]] = LIBRARIES

    def __init__(self, spec: AttentionSpec, *, config: Any, options: Any = None, ops: Any) -> None:
        super().__init__(spec, config=config, options=options, ops=ops)
        self._library = next(library for library in self.libraries if not library.reasons(spec))
        self._attend = self._library.load()

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

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: AttentionBatch
    ) -> Tensor:
        store(key, value, kv_cache, plan.slot_mapping)
        owned = int(plan.host_query_lens.sum())
        if not owned:
            return torch.zeros_like(query)
        out = self._library.attend(self._attend, layer, query, kv_cache, plan)
        out[owned:] = 0
        return out
