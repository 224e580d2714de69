"""Random paged steps for backends of latent attention, beside the reference's output of the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.latent import LatentBackend, LatentParams, LatentSpec
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops

from .attention_case import AttentionCase, Row, make_case
from .reference_latent import ReferenceLatent


@dataclass(frozen=True)
class LatentCase:
    """Rows of random tokens: of row i the `queries[i]` [tokens, H, nope + rope], `latents[i]` [tokens, rank + rope].

    `paging` holds their blocks. `chosen[i]` [tokens, top_k] are the tokens that each attends to.
    """

    layer: LatentParams
    paging: AttentionCase
    queries: list[Tensor]
    latents: list[Tensor]
    chosen: list[Tensor]

    def run(
        self, kind: type[LatentBackend] | LatentBackend, *, padding_tokens: int = 0, stale: float = 0.0, **host: Any
    ) -> Tensor:
        """What the backend gives for the step, after it has computed what is cached before. `host` as for `batch`.

        The cache holds `stale` where nothing was stored; the blocks do not lie one behind the other.
        """
        spec = self.layer.spec
        backend = kind(BackendSetup(spec, Ops())) if isinstance(kind, type) else kind
        block = backend.kv_format(spec)
        memory = torch.full(
            (self.paging.num_blocks, block.num_bytes // spec.kv_dtype.itemsize + 32),
            stale,
            dtype=spec.kv_dtype,
            device=spec.device_type,
        ).view(torch.uint8)
        cache = block.view(memory[:, : block.num_bytes])
        before = [(0, cached) for cached, _ in self.paging.rows]
        now = [(cached, cached + count) for cached, count in self.paging.rows]
        kept = [row for row, (cached, _) in enumerate(self.paging.rows) if cached]
        if kept:
            history = self.paging.of_rows(kept)
            spans = [before[row] for row in kept]
            reference = ReferenceLatent(BackendSetup(spec, Ops()))
            past = reference if reference.kv_format(spec) == block else backend  # the reference is quicker
            query, latent, chosen = self._inputs(kept, spans, 0)
            past.forward(self.layer, query, latent, cache, past.plan(history.batch(spans)), chosen)
        rows = list(range(len(now)))
        query, latent, chosen = self._inputs(rows, now, padding_tokens)
        plan = backend.plan(self.paging.batch(now, padding_tokens=padding_tokens, **host))
        return backend.forward(self.layer, query, latent, cache, plan, chosen)

    def expected(self) -> Tensor:
        """The reference's output [T, H, value_dim]."""
        return self.run(ReferenceLatent)

    def _inputs(
        self, rows: Sequence[int], spans: Sequence[Row], padding_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        def join(tensors: Sequence[Tensor]) -> Tensor:
            parts = [tensors[row][start:end] for row, (start, end) in zip(rows, spans, strict=True)]
            return torch.cat([*parts, torch.full_like(tensors[0][:1], 3).expand(padding_tokens, *tensors[0].shape[1:])])

        return join(self.queries), join(self.latents), join(self.chosen) if self.chosen else None


def latent_spec(**changes: Any) -> LatentSpec:
    """A small layer, with which short rows are absorbed and long ones expanded."""
    dtype = changes.get("dtype", torch.float32)
    sizes: dict[str, Any] = {
        "num_heads": 4, "nope_dim": 16, "rope_dim": 8, "value_dim": 12, "rank": 32, "scale": 0.2, "dtype": dtype,
        "kv_dtype": dtype, "block_size": 16, "device_type": "cpu",
    }  # fmt: skip
    return LatentSpec(**{**sizes, **changes})


def make_latent_case(spec: LatentSpec, rows: Sequence[Row], seed: int = 0) -> LatentCase:
    """Random tokens and weights."""
    drawn, choices = (torch.Generator().manual_seed(seed + number) for number in range(2))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(spec.device_type, spec.dtype)

    paging = make_case(AttentionSpec(1, 1, 1, 1.0, spec.dtype, spec.dtype, spec.block_size, spec.device_type), rows)
    up = random(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank) * spec.rank**-0.5
    chosen = []
    for row in rows if spec.top_k else ():
        order = torch.rand(sum(row), sum(row), generator=choices).tril().argsort(-1, descending=True)[:, : spec.top_k]
        order = torch.where(order <= torch.arange(sum(row))[:, None], order, -1).to(torch.int32)
        chosen.append(torch.nn.functional.pad(order, (0, spec.top_k - order.shape[1]), value=-1).to(spec.device_type))
    return LatentCase(
        LatentParams(spec, up),
        paging,
        [random(sum(row), spec.num_heads, spec.nope_dim + spec.rope_dim) for row in rows],
        [random(sum(row), spec.width) for row in rows],
        chosen,
    )
