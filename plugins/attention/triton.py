"""Attention by frame's Triton kernels: CUDA, and the CPU under Triton's interpreter (for tests).

A plan holds launch sizes, chosen from lengths that the host knows, and the order of rows, which the device computes:
planning neither waits for the device nor copies to it. Knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import AttentionBackend, AttentionSpec, BackendSetup, GroupBatch, LayerParams, PrefixCosts
from frame.kernels import attention as kernels, cascade, decode as decode_kernel, decode_few
from frame.kernels.decode import DecodeLaunch
from frame.kernels.decode_few import FewLaunch
from frame.kernels.row_order import longest_first

from .reasons import Capabilities, reasons
from .triton_few import few_launch, serves_few
from .triton_narrow import narrow_kernel, narrow_launch
from .triton_options import TritonOptions
from .triton_wide import WidePages, attend_wide, wide_pages

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: A split shorter than this costs more to join than it saves.
MIN_SPLIT_LENGTH = 128
MAX_SPLITS = 64
#: Parts of a shared prefix, in steps of up to so many rows.
MAX_PREFIX_SPLITS, MANY_ROWS = 32, 64
#: What cascades cost and save, fitted to times of six families' layers on an H200: bytes that could be read while the
#: two launches wait for each other, and by up to 4 query heads a KV head and more what a tile reads of each token.
PREFIX_LAUNCH_BYTES, PREFIX_TILE, PREFIX_WIDE_TILE = 85e6, 1.42, 2.5
#: More query heads for each KV head make the tile of a shared prefix too large for a program's registers.
MAX_PREFIX_GROUPS = 8
#: Programs for each multiprocessor, up to which rows are split until about two programs run on each.
FEW = 0.25
#: Few new tokens of long rows: parts of their keys are no shorter, and make so many programs for each multiprocessor.
MIN_PROMPT_SPLIT, PROMPT_PROGRAMS = 256, 2
#: Prompts shorter than this leave most of the Hopper kernel's tiles of queries empty.
MIN_HOPPER_QUERIES = 64


@dataclass(frozen=True)
class SplitRule:
    """How rows are split while whole rows make up to `programs` programs for each multiprocessor.

    A row has at most `parts` parts, none shorter than `min_span` keys. `long_tiles`: tiles of 64 keys, not of 32.
    `longest_first`: programs take up the longest rows first.
    """

    programs: float
    parts: int
    min_span: int
    long_tiles: bool = False
    longest_first: bool = False


#: Measured on an H200 for 4 to 8 query heads a KV head: rows of 860 keys, rows of 300 to 2,000, and what is left of a
#: batch as its requests end; about four programs run on a multiprocessor at once. Most choices are within 5 % of the
#: best of sixteen; where a twelfth of the rows has 12,000 keys, the best is up to 2.7 times as fast.
SPLIT_RULES = (
    SplitRule(0.6, 16, 128, long_tiles=True),
    SplitRule(1.2, 8, 128),
    SplitRule(2.2, 4, 256),
    SplitRule(3.25, 4, 512, long_tiles=True, longest_first=True),
    SplitRule(4.3, 2, 256),
    SplitRule(7.0, 2, 2048, long_tiles=True, longest_first=True),
    SplitRule(8.6, 1, 0, long_tiles=True, longest_first=True),
    SplitRule(10.5, 2, 2048, longest_first=True),
    SplitRule(float("inf"), 1, 0, longest_first=True),
)


@dataclass(frozen=True)
class TritonPlan:
    """The batch, and what attends to its rows: `decode` to the first `num_decodes`, which have one token each.

    The rest takes the launch `mixed`, or the Hopper kernel if that is None, over `pages` where the cache has 8 bits.
    `covers_all`: rows own every token. Where `prefix` is given, decodes attend to the tokens that they share together.
    `order` is that of `decode`'s rows. `narrow` or `few`, where one is given, attends to decodes in its place.
    """

    batch: GroupBatch
    num_decodes: int
    decode: DecodeLaunch | None
    mixed: kernels.Launch | None
    covers_all: bool
    prefix: cascade.PrefixLaunch | None = None
    order: Tensor | None = None
    pages: WidePages | None = None
    narrow: Any = None
    few: FewLaunch | None = None


class TritonAttention(AttentionBackend):
    """Attention by Triton kernels, prompts on Hopper by a Gluon kernel."""

    needs_python = False
    takes_head_scales = True

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        spec = self.spec
        self._multiprocessors = _num_multiprocessors(spec.device_type)
        self.prefix_costs = _prefix_costs(spec)
        self.shares_prefixes = self.prefix_costs is not None
        self._prefill = _hopper_kernel(spec, options or TritonOptions())
        self._widens = spec.kv_dtype != spec.dtype
        self._narrow = narrow_kernel(spec)
        self._always_few = (options or TritonOptions()).few_decodes
        self._serves_few = serves_few(spec, self._always_few)
        # Captured steps keep the one that they were captured with.
        self._arrivals: list[Tensor] = []

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        # The interpreter multiplies bfloat16 as if its bits were integers.
        dtypes = FLOATS if spec.device_type == "cuda" or not interpreted else FLOATS[1:]
        devices = ("cuda", "cpu") if interpreted else ("cuda",)
        eights = FLOATS8 if interpreted or converts_e4m3() else FLOATS8[1:]
        can = Capabilities(
            devices=devices, dtypes=dtypes, kv_dtypes=(*dtypes, *eights), max_head_dim=256, returns_lse=True
        )
        return "; ".join(reasons(spec, can)) or None

    @classmethod
    def preference(cls, spec: AttentionSpec) -> int | None:
        """The provider's own on CUDA; last where only the interpreter runs it."""
        return None if spec.device_type == "cuda" else -1

    def plan(self, batch: GroupBatch) -> TritonPlan:
        spec, lens = self.spec, batch.host_query_lens
        groups = spec.num_heads // spec.num_kv_heads
        covers_all = int(lens.sum()) == batch.num_tokens
        longer = np.flatnonzero(lens != 1)
        num_decodes = int(longer[0]) if len(longer) else len(lens)
        if not lens[num_decodes:].any() and len(lens) == batch.num_tokens:
            num_decodes = len(lens)  # tokens that no row owns are padding
        decode = mixed = prefix = pages = None
        if spec.deterministic or batch.deterministic:
            decode = decode_kernel.invariant_launch(spec.head_dim, groups, spec.dtype)
            mixed = kernels.launch_for(spec.head_dim, groups, spec.dtype, invariant=True)
            num_decodes = num_decodes if decode else 0
        else:
            if num_decodes:
                decode = self.decode_launch(num_decodes, int(batch.host_seq_lens[:num_decodes].max()))
                if batch.prefix is not None and self.prefix_costs is not None:
                    # each part takes memory of a float32 output
                    most = MAX_PREFIX_SPLITS if num_decodes <= MANY_ROWS else max(1, 16 - decode.splits)
                    programs = max(1, 2 * self._multiprocessors // spec.num_kv_heads)
                    prefix = cascade.launch_for(spec.head_dim, groups, spec.dtype, most, programs)
            fast = self._prefill is not None and batch.max_query_len >= MIN_HOPPER_QUERIES
            if fast and self._widens and num_decodes < len(lens):
                pages = wide_pages(spec, batch, num_decodes)
            if not fast or (self._widens and pages is None):
                mixed = self.prompt_launch(lens[num_decodes:], batch.host_seq_lens[num_decodes:])
        covers_all = covers_all or num_decodes == batch.num_tokens
        narrow, few = None, self._plan_few(batch, num_decodes)
        order = self._order(batch, num_decodes) if few is None else None
        if num_decodes and self._narrow and prefix is None and not (spec.deterministic or batch.deterministic):
            longest = int(batch.host_seq_lens[:num_decodes].max())
            narrow = narrow_launch(self._narrow, self._share(num_decodes), longest)
        return TritonPlan(batch, num_decodes, decode, mixed, covers_all, prefix, order, pages, narrow, few)

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: TritonPlan
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, n = plan.batch, plan.num_decodes
        make = torch.empty if plan.covers_all else torch.zeros
        out = make(query.shape, dtype=query.dtype, device=query.device)
        lse = make(query.shape[:2], dtype=torch.float32, device=query.device) if self.spec.returns_lse else None
        share = self.spec.context.ranks, self.spec.context.rank
        if n < len(batch.host_query_lens):
            # First: of two equal prompts in one step, the second has one token left and reads what the first stores.
            scales = {"key_scale": layer.key_scale, "value_scale": layer.value_scale}
            kernels.write_kv(key[n:], value[n:], kv_cache, batch.slot_mapping[n:], **scales, share=share)
        if n:
            self._decode(
                layer, query[:n], key[:n], value[:n], kv_cache, plan, out[:n], None if lse is None else lse[:n]
            )
        if n < len(batch.host_query_lens):
            rows, launch = (batch.query_start[n:], batch.seq_lens[n:], batch.block_table[n:]), plan.mixed
            if plan.pages is not None and self._prefill is not None:
                features = _features(layer, plain=True)
                attend_wide(self._prefill, layer, query, kv_cache, rows, plan.pages, out, **features)
                return out
            if launch is None and kv_cache.stride(1) % kv_cache.stride(2):
                # a wider layer shares the slot, so blocks do not lie a whole number of tokens apart
                spec = self.spec
                launch = kernels.launch_for(spec.head_dim, spec.num_heads // spec.num_kv_heads, spec.dtype)
            if launch is None and self._prefill is not None:
                self._prefill(query, kv_cache, *rows, out=out, **_features(layer, plain=True))
            else:
                kernels.paged_attention(
                    query,
                    kv_cache,
                    *rows,
                    launch=launch,
                    out=out,
                    lse=lse,
                    share=share,
                    first_token=n,
                    **_features(layer),
                )
        return out if lse is None else (out, lse)

    def _decode(
        self,
        layer: LayerParams,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        plan: TritonPlan,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Fills `out` for the rows of one token, which are stored, by the kernel that the plan names."""
        batch, n = plan.batch, plan.num_decodes
        given = query, key, value, kv_cache, batch.slot_mapping[:n], batch.seq_lens[:n], batch.block_table[:n]
        arrivals = self._arrivals_for(n * self.spec.num_kv_heads, query.device)
        if plan.narrow is not None and self._narrow is not None:
            self._narrow.decode_attention(
                *given,
                scale=self.spec.scale,
                out=out,
                launch=plan.narrow,
                arrivals=arrivals,
                key_scale=layer.key_scale,
                value_scale=layer.value_scale,
                order=plan.order,
            )
        elif plan.few is not None:
            decode_few.decode_attention(
                *given,
                scale=layer.spec.scale,
                window=layer.spec.window,
                sinks=layer.sinks,
                out=out,
                launch=plan.few,
                arrivals=arrivals,
            )
        elif plan.decode is not None:
            decode_kernel.decode_attention(
                *given,
                out=out,
                launch=plan.decode,
                arrivals=arrivals,
                prefix=self._attend_prefix(layer, query, kv_cache, plan),
                order=plan.order,
                whole_lse=lse,
                share=(self.spec.context.ranks, self.spec.context.rank),
                **_features(layer),
            )

    @staticmethod
    def _attend_prefix(
        layer: LayerParams, query: Tensor, kv_cache: Tensor, plan: TritonPlan
    ) -> decode_kernel.PrefixParts | None:
        batch, n = plan.batch, plan.num_decodes
        if plan.prefix is None or plan.decode is None or batch.prefix is None:
            return None
        shared = batch.prefix
        return cascade.prefix_attention(
            query,
            kv_cache,
            shared.tile_rows,
            shared.tile_lens,
            shared.row_lens[:n],
            batch.seq_lens[:n],
            batch.block_table,
            launch=plan.prefix,
            own_splits=plan.decode.splits,
            scale=layer.spec.scale,
            soft_cap=layer.spec.soft_cap,
            alibi_slopes=layer.alibi_slopes,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
        )

    def _arrivals_for(self, count: int, device: torch.device) -> Tensor:
        """Zeros int32 [count or more] that a decode launch counts its splits in."""
        if not self._arrivals or len(self._arrivals[-1]) < count:
            self._arrivals.append(torch.zeros(max(count, 4096), dtype=torch.int32, device=device))
        return self._arrivals[-1]

    def decode_launch(self, num_rows: int, max_seq_len: int) -> DecodeLaunch:
        """Sizes for rows of one token each, of which the longest has `max_seq_len` tokens in the cache."""
        spec = self.spec
        length = -(-(min(max_seq_len, spec.window) if spec.window else max_seq_len) // spec.context.ranks)
        rule = self._rule(num_rows)
        parts = min(rule.parts, length // (rule.min_span or MIN_SPLIT_LENGTH))
        splits = 1 << (parts.bit_length() - 1) if parts > 1 else 1
        long_tiles = rule.long_tiles and (splits > 1 or rule.longest_first)
        groups = spec.num_heads // spec.num_kv_heads
        launch = decode_kernel.launch_for(spec.head_dim, groups, spec.dtype, splits, long_tiles=long_tiles)
        return replace(launch, min_span=rule.min_span if splits > 1 else 0)

    def _plan_few(self, batch: GroupBatch, num_decodes: int) -> FewLaunch | None:
        if not self._serves_few or num_decodes != len(batch.host_query_lens):
            return None
        few = few_launch(self.spec, batch, self._multiprocessors, always=bool(self._always_few))
        if few is not None and few.early:  # the launch that the promise asks for, see `few_launch`
            self._arrivals_for(num_decodes * self.spec.num_kv_heads, batch.seq_lens.device).zero_()
        return few

    def prompt_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> kernels.Launch:
        """Sizes for rows of several new tokens, int [rows], and of all tokens. Few programs divide the keys of rows."""
        spec = self.spec
        groups = spec.num_heads // spec.num_kv_heads
        launch, few = (kernels.launch_for(spec.head_dim, groups, spec.dtype, few=few) for few in (False, True))
        programs = int((-(-query_lens // (few.block_m // groups))).sum()) * spec.num_kv_heads
        if not programs:
            return launch
        longest = int(seq_lens.max())
        if spec.window:
            longest = min(longest, spec.window + int(query_lens.max()))
        parts = longest // spec.context.ranks // MIN_PROMPT_SPLIT
        splits = min(MAX_SPLITS, parts, PROMPT_PROGRAMS * self._multiprocessors // programs)
        return replace(few, splits=splits) if splits > 1 else launch

    def _rule(self, num_rows: int) -> SplitRule:
        share = self._share(num_rows)
        if share <= FEW:
            return SplitRule(FEW, min(int(2 / share), MAX_SPLITS), 0, long_tiles=True)
        return next(rule for rule in SPLIT_RULES if share <= rule.programs)

    def _share(self, num_rows: int) -> float:
        """Programs of each multiprocessor when one serves a row and KV head whole; about four of them run at once."""
        return max(1, num_rows) * self.spec.num_kv_heads / self._multiprocessors

    def _order(self, batch: GroupBatch, num_decodes: int) -> Tensor | None:
        """The rows in the order in which programs take them up; None for the order of the batch."""
        return longest_first(batch.seq_lens[:num_decodes]) if self._rule(num_decodes).longest_first else None


def _prefix_costs(spec: AttentionSpec) -> PrefixCosts | None:
    """The costs of shared prefixes; None for layers whose rows never share a read."""
    groups = spec.num_heads // spec.num_kv_heads
    if spec.window or groups > MAX_PREFIX_GROUPS or spec.returns_lse:
        return None
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize
    tile = PREFIX_TILE if groups <= 4 else PREFIX_WIDE_TILE
    return PrefixCosts(PREFIX_LAUNCH_BYTES / token_bytes, tile=tile, few=0.95, some=0.65, many=0.45)


def _features(layer: LayerParams, *, plain: bool = False) -> dict[str, Any]:
    spec = layer.spec
    found = {"scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap, "sinks": layer.sinks}
    if plain:  # what the Hopper kernel needs
        return found
    scales = {"key_scale": layer.key_scale, "value_scale": layer.value_scale}
    return {**found, **scales, "alibi_slopes": layer.alibi_slopes}


def converts_e4m3() -> bool:
    """Whether the device has that type: from compute capability 8.9 on. True where there is no device to ask."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def _hopper_kernel(spec: AttentionSpec, options: TritonOptions) -> Callable[..., Tensor] | None:
    """The prefill kernel for this layer on this device; None where there is none, or Triton's Gluon has changed."""
    if (
        not options.hopper_prefill
        or spec.device_type != "cuda"
        or spec.returns_lse
        or spec.alibi
        or spec.kv_dtype not in (spec.dtype, *FLOATS8)
    ):
        return None
    try:
        from frame.kernels import prefill
    except ImportError:
        return None
    if not prefill.serves(spec.head_dim, spec.block_size, spec.dtype):
        return None
    persistent = options.persistent_prefill
    if persistent is None:
        persistent = spec.head_dim <= 128
    return partial(prefill.prefill_attention, persistent=persistent)


def _num_multiprocessors(device_type: str) -> int:
    if device_type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
