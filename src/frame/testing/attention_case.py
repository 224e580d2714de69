"""Random paged steps for attention backends: tokens, the blocks that hold them, and the reference's output.

A case knows tokens and blocks only. What was cached before a step is written by the backend itself, in an earlier
step, so a case holds for any layout of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, GroupBatch, LayerParams
from frame.core.interfaces.kv import AnyKVSpec, FullKV, SlidingKV
from frame.core.interfaces.kv_layout import plan_layout, with_blocks
from frame.core.ops import Ops
from frame.core.worker.start.kv_memory import KVMemory

#: (tokens cached before the step, tokens of the step)
Row = tuple[int, int]


@dataclass(frozen=True)
class AttentionCase:
    """Rows of random tokens. `keys[i]`, `values[i]`, `queries[i]` [tokens, heads, head_dim] are those of row i.

    `tables[i]` are its blocks. `spare` blocks belong to nobody.
    """

    spec: AttentionSpec
    layer: LayerParams
    rows: Sequence[Row]
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    tables: list[np.ndarray]
    num_blocks: int
    seed: int

    def batch(
        self,
        spans: Sequence[Row],
        *,
        padding_rows: int = 0,
        padding_tokens: int = 0,
        bound: int = 0,
        captured: bool = False,
    ) -> Any:
        """The step that computes tokens start .. end of each row. `bound` is added to the host's sequence lengths.

        `captured`: the host's lengths are those of a capture: as many rows of one token as there are tokens, each as
        long as the longest row and `bound`.
        """
        counts = np.array([end - start for start, end in spans] + [0] * padding_rows, np.int32)
        lens = np.array([end for _, end in spans] + [0] * padding_rows, np.int32)
        num_tokens = int(counts.sum()) + padding_tokens
        slots = np.full(num_tokens, -1, np.int64)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        for row, (start, end) in enumerate(spans):
            slots[starts[row] : starts[row + 1]] = self.places(row)[start:end]
        device = self.spec.device_type
        host_lens = lens + np.int32(bound) * (lens > 0)
        if captured:
            counts, host_lens = np.ones_like(counts), np.full_like(lens, lens.max(initial=0) + bound)
        return GroupBatch(
            num_tokens=num_tokens,
            query_start=torch.from_numpy(starts).to(device),
            seq_lens=torch.from_numpy(lens).to(device),
            block_table=torch.from_numpy(self._table(spans, padding_rows, int(host_lens.max(initial=0)))).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            host_query_lens=counts,
            host_seq_lens=host_lens,
            max_query_len=int(counts.max(initial=0)),
            max_seq_len=int(host_lens.max(initial=0)),
            deterministic=self.spec.deterministic,
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a row for which a block of the batch stands; the cache holds its share of them."""
        return self.spec.block_size * self.spec.context.ranks

    def places(self, row: int) -> np.ndarray:
        """Slot (block · block size + offset) of each token of a row, as the batch says it."""
        size = self.block_tokens
        positions = np.arange(sum(self.rows[row]))
        return self.tables[row][positions // size].astype(np.int64) * size + positions % size

    def inputs(self, spans: Sequence[Row], padding_tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value), each [T, heads, head_dim], of the spans; padding tokens are as large as any."""

        def join(tensors: Sequence[Tensor]) -> Tensor:
            parts = [tensor[start:end] for tensor, (start, end) in zip(tensors, spans, strict=True)]
            return torch.cat([*parts, torch.full_like(tensors[0][:1], 3.0).expand(padding_tokens, -1, -1)])

        return join(self.queries), join(self.keys), join(self.values)

    def of_rows(self, rows: Sequence[int]) -> AttentionCase:
        """A case of some of the rows, with the same tokens and blocks."""
        return replace(
            self,
            rows=[self.rows[row] for row in rows],
            queries=[self.queries[row] for row in rows],
            keys=[self.keys[row] for row in rows],
            values=[self.values[row] for row in rows],
            tables=[self.tables[row] for row in rows],
        )

    def expected(self) -> Tensor:
        """The reference's output [T, H, D] of the step, computed on the host."""
        spec = self.spec
        if spec.distances:
            return self.expected_parts()[0]
        shape = (2, self.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        cache = torch.zeros(shape, dtype=spec.kv_dtype)
        scales = {"key_scale": self.layer.key_scale, "value_scale": self.layer.value_scale}
        for row in range(len(self.rows)):
            places = torch.from_numpy(self.places(row))
            Ops.write_kv(self.keys[row].cpu(), self.values[row].cpu(), cache, places, **scales)
        spans = [(cached, cached + count) for cached, count in self.rows]
        batch = self.batch(spans)
        return Ops.paged_attention(
            self.inputs(spans)[0].cpu(),
            cache,
            batch.query_start.cpu(),
            batch.seq_lens.cpu(),
            batch.block_table.cpu(),
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=None if self.layer.sinks is None else self.layer.sinks.cpu(),
            alibi_slopes=None if self.layer.alibi_slopes is None else self.layer.alibi_slopes.cpu(),
            **scales,
        )

    def expected_parts(self) -> tuple[Tensor, Tensor]:
        """The output [T, H, D] over the tokens that this cache holds, and its log-sum-exp [T, H], on the host."""
        spec, share, outs, lses = self.spec, self.spec.context, list[Tensor](), list[Tensor]()
        groups = spec.num_heads // spec.num_kv_heads
        for (cached, count), queries, keys, values in zip(self.rows, self.queries, self.keys, self.values, strict=True):
            mine = torch.arange(cached + count)[share.rank :: share.ranks]
            query, key, value = (x.cpu().double() for x in (queries[cached:], keys, values))
            key, value = (x[mine].repeat_interleave(groups, 1) for x in (key, value))
            scores = torch.einsum("qhd,khd->qhk", query, key) * spec.scale
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            distance = (mine - torch.arange(cached, cached + count)[:, None])[:, None]
            if self.layer.alibi_slopes is not None:
                scores = scores + self.layer.alibi_slopes.cpu()[:, None] * distance
            if self.layer.distance_bias is not None:
                columns = distance[:, 0].clamp(-spec.distances, spec.distances) + spec.distances
                scores = scores + self.layer.distance_bias.cpu().double()[:, columns].transpose(0, 1)
            hidden = (distance > 0) | (distance <= -spec.window) if spec.window else distance > 0
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.layer.sinks is not None:
                sinks = self.layer.sinks.cpu().double()[:, None].expand(count, -1, 1)
                scores, value = torch.cat((scores, sinks), -1), torch.cat((value, torch.zeros_like(value[:1])))
            lses.append(scores.logsumexp(-1))
            weights = (scores - lses[-1].masked_fill(lses[-1] == float("-inf"), 0)[..., None]).exp()
            outs.append(torch.einsum("qhk,khd->qhd", weights, value))
        return torch.cat(outs), torch.cat(lses)

    def _table(self, spans: Sequence[Row], padding_rows: int, longest: int) -> np.ndarray:
        """[B, max_blocks]; entries that a row must not read (past its end, before its window) name random blocks."""
        draw = np.random.default_rng(self.seed + 1)
        size, window = self.block_tokens, self.spec.window
        width = -(-longest // size) + 1
        table = draw.integers(0, self.num_blocks, (len(spans) + padding_rows, width)).astype(np.int32)
        for row, (start, end) in enumerate(spans):
            first = max(0, start - window + 1) // size if window else 0
            last = -(-end // size)
            table[row, first:last] = self.tables[row][first:last]
        return table


def make_case(spec: AttentionSpec, rows: Sequence[Row], seed: int = 0) -> AttentionCase:
    """A case of the given rows, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(spec.dtype).to(spec.device_type)

    size, heads, kv_heads, dim = spec.block_size * spec.context.ranks, spec.num_heads, spec.num_kv_heads, spec.head_dim
    needed = [-(-sum(row) // size) for row in rows]
    num_blocks = sum(needed) + 4
    free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).astype(np.int32)
    ends = np.cumsum(needed)
    layer = LayerParams(
        spec,
        sinks=random(heads).float() if spec.sinks else None,
        alibi_slopes=random(heads).abs().float() if spec.alibi else None,
        distance_bias=random(heads, 2 * spec.distances + 1) if spec.distances else None,
    )
    return AttentionCase(
        spec,
        layer,
        rows,
        [random(sum(row), heads, dim) for row in rows],
        [random(sum(row), kv_heads, dim) for row in rows],
        [random(sum(row), kv_heads, dim) for row in rows],
        [free[end - count : end] for end, count in zip(ends.tolist(), needed, strict=True)],
        num_blocks,
        seed,
    )


def kv_spec(spec: AttentionSpec) -> AnyKVSpec:
    """The KV spec of a layer of this attention spec."""
    dtype = str(spec.kv_dtype).removeprefix("torch.")
    if spec.window:
        return SlidingKV(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype, window=spec.window)
    return FullKV(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)


def make_memory(spec: AttentionSpec, num_blocks: int, num_layers: int = 1) -> KVMemory:
    """KV memory as a worker allocates it, for layers "0", "1", …"""
    layers = tuple(str(index) for index in range(num_layers))
    layout = plan_layout(dict.fromkeys(layers, kv_spec(spec)), spec.block_size)
    return KVMemory(with_blocks(layout, 0, num_blocks), torch.device(spec.device_type))


def fill(memory: KVMemory, spec: AttentionSpec, value: float) -> None:
    """Fills every block with `value`, as data that earlier requests left behind."""
    for layer in memory.layer_bytes().values():
        layer.view(spec.kv_dtype).fill_(value)


class CaseRun:
    """One backend and one KV memory, called in the order in which a worker calls them."""

    def __init__(self, backend: AttentionBackend, case: AttentionCase, *, num_layers: int = 1, stale: float) -> None:
        self.backend, self.case = backend, case
        self.memory = make_memory(case.spec, case.num_blocks, num_layers)
        fill(self.memory, case.spec, stale)
        kind = type(backend)
        blocks = (self.memory.layer_block(str(index), kind, case.spec) for index in range(num_layers))
        self.caches = [block.view(cache) for cache, block in blocks]

    def fill_history(self) -> None:
        """Computes what is cached before the step."""
        spans = [(0, cached) for cached, _ in self.case.rows if cached]
        kept = [row for row, (cached, _) in enumerate(self.case.rows) if cached]
        if kept:
            history = self.case.of_rows(kept)
            plan = self.backend.plan(history.batch(spans))
            for cache in self.caches:
                self.backend.forward(history.layer, *history.inputs(spans), cache, plan)

    def step(self, *, padding_tokens: int = 0, **host: Any) -> list[Any]:
        """Runs the step in every layer with one plan; what `forward` gave in each. `host` as for `batch` of a case."""
        spans = [(cached, cached + count) for cached, count in self.case.rows]
        batch = self.case.batch(spans, padding_tokens=padding_tokens, **host)
        plan = self.backend.plan(batch)
        inputs = self.case.inputs(spans, padding_tokens)
        return [self.backend.forward(self.case.layer, *inputs, cache, plan) for cache in self.caches]


def check_padding(run: CaseRun, num_tokens: int = 24) -> None:
    """Runs a step without tokens whose host-side lengths say one token a row; asserts that nothing is stored.

    `num_tokens` are more than the rows, as in a step with prompts that is captured.
    """
    case = run.case
    spans = [(sum(row), sum(row)) for row in case.rows]
    batch = case.batch(spans, padding_tokens=num_tokens, captured=True)
    batch.seq_lens.zero_()
    before = run.memory.layer_bytes()["0"].clone()
    with torch.inference_mode():
        out: Any = run.backend.forward(
            case.layer, *case.inputs(spans, num_tokens), run.caches[0], run.backend.plan(batch)
        )
    shape = num_tokens, case.spec.num_heads, case.spec.head_dim
    assert tuple(out.shape) == shape, f"the output is {list(out.shape)}, expected {list(shape)}"
    assert torch.isfinite(out).all(), "the output holds NaN or infinity"
    assert torch.equal(run.memory.layer_bytes()["0"], before), "tokens of padding were stored"
