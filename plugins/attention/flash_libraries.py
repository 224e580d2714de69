"""FlashAttention's versions: how each is found, what it cannot do, and how it wants its arguments.

Facts of the packages' own documentation: `flash_attn_interface` (3) and `flash_attn.cute` (4) take
lengths and a page table of any page size; `flash_attn` (2) takes running sums of lengths and pages of a multiple of 256
tokens. Knows no step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import AttentionSpec, GroupBatch, LayerParams


class FlashLibrary(ABC):
    """One version. `attend` calls `function` of `module`, for blocks of a multiple of `block_multiple` tokens."""

    name: ClassVar[str]
    module: ClassVar[str]
    function: ClassVar[str]
    block_multiple: ClassVar[int] = 1
    alibi: ClassVar[bool] = False
    windows: ClassVar[bool] = True
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ()

    def load(self) -> Callable[..., Any]:
        """Imports the library's function; raises `ImportError`, or what else a broken package raises."""
        found: Callable[..., Any] = getattr(import_module(self.module), self.function)
        return found

    def capability(self) -> tuple[int, int]:
        """Compute capability of the current device."""
        return torch.cuda.get_device_capability()

    def reasons(self, spec: AttentionSpec) -> list[str]:
        """Every reason why this version cannot serve the layer here. Never raises."""
        found = []
        if spec.alibi and not self.alibi:
            found.append("ALiBi not supported")
        if spec.window and not self.windows:
            found.append("sliding windows not supported: what lies before a window in its first tile must be numbers")
        try:
            self.load()
        except ModuleNotFoundError as error:
            found.append(f"package {error.name!r} is not installed")
        except Exception as error:  # a package built for another torch raises whatever its loader does
            found.append(f"{self.module} cannot be imported ({type(error).__name__})")
        else:
            if self.capabilities and self.capability() not in self.capabilities:
                found.append("this GPU's compute capability not supported")
        return found

    @abstractmethod
    def attend(
        self, foreign: Callable[..., Any], layer: LayerParams, query: Tensor, kv_cache: Tensor, batch: GroupBatch
    ) -> Tensor:
        """[T, H, D] for `query` [T, H, D] over `kv_cache` [2, num_blocks, block_size, Hk, D]."""


class FlashThree(FlashLibrary):
    """The version for Hopper; made by building the `hopper` folder of its repository."""

    name = "FlashAttention 3"
    module = "flash_attn_interface"
    function = "flash_attn_with_kvcache"
    capabilities = ((9, 0),)

    def attend(
        self, foreign: Callable[..., Any], layer: LayerParams, query: Tensor, kv_cache: Tensor, batch: GroupBatch
    ) -> Tensor:
        return _output(
            foreign(
                q=query,
                k_cache=kv_cache[0],
                v_cache=kv_cache[1],
                cache_seqlens=batch.seq_lens,
                page_table=batch.block_table,
                cu_seqlens_q=batch.query_start,
                max_seqlen_q=batch.max_query_len,
                softmax_scale=layer.spec.scale,
                causal=True,
                window_size=_window(layer.spec),
                softcap=layer.spec.soft_cap,
            )
        )


class FlashFour(FlashLibrary):
    """The version for Hopper and Blackwell, `flash-attn-4`, which compiles each of its kernels at first use.

    Windows are refused: it multiplies values before a window by zero, and another request may have left NaN there.
    """

    name = "FlashAttention 4"
    module = "flash_attn.cute"
    function = "flash_attn_varlen_func"
    capabilities = ((9, 0), (10, 0))
    windows = False

    def attend(
        self, foreign: Callable[..., Any], layer: LayerParams, query: Tensor, kv_cache: Tensor, batch: GroupBatch
    ) -> Tensor:
        spec = layer.spec
        return _output(
            foreign(
                q=query,
                k=kv_cache[0],
                v=kv_cache[1],
                cu_seqlens_q=batch.query_start,
                seqused_k=batch.seq_lens,
                page_table=batch.block_table,
                max_seqlen_q=batch.max_query_len,
                softmax_scale=spec.scale,
                causal=True,
                softcap=spec.soft_cap,
            )
        )


class FlashTwo(FlashLibrary):
    """The version of the package index."""

    name = "FlashAttention 2"
    module = "flash_attn"
    function = "flash_attn_varlen_func"
    block_multiple = 256
    alibi = True

    def attend(
        self, foreign: Callable[..., Any], layer: LayerParams, query: Tensor, kv_cache: Tensor, batch: GroupBatch
    ) -> Tensor:
        key_start = torch.zeros_like(batch.query_start)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        return _output(
            foreign(
                q=query,
                k=kv_cache[0],
                v=kv_cache[1],
                cu_seqlens_q=batch.query_start,
                cu_seqlens_k=key_start,
                max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len,
                softmax_scale=layer.spec.scale,
                causal=True,
                window_size=_window(layer.spec),
                softcap=layer.spec.soft_cap,
                alibi_slopes=layer.alibi_slopes,
                block_table=batch.block_table,
            )
        )


#: In the order of preference.
LIBRARIES: tuple[FlashLibrary, ...] = (FlashThree(), FlashFour(), FlashTwo())


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """How many keys before and after itself a query sees; -1 stands for all."""
    return (spec.window - 1, 0) if spec.window else (-1, -1)


def _output(found: Any) -> Tensor:
    """The output alone: some releases return the log-sum-exp with it."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out
