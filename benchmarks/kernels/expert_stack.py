"""Decoder layers of routed experts between two data ranks, each of which can be computed up to its next exchange.

The layers, ops and exchanges are those of the engine; only the order in which two halves of a batch take turns is
written here. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.kv_layout import plan_layout, with_blocks
from frame.core.layers.build import Build
from frame.core.worker.start.kv_memory import KVMemory
from frame.interfaces import (
    Activations,
    BackendSetup,
    Dispatched,
    ExchangeSpec,
    ExpertExchange,
    ForwardStep,
    GroupBatch,
    Groups,
    LocalExchange,
    ModelSetup,
    Routing,
)
from frame.layers import normed_linear
from frame.ops import Ops
from frame.plugins.models.qwen3_moe import Qwen3MoeForCausalLM

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: `experts` of which a token has `top_k`, each `inner` wide; `layers` are timed."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    layers: int

    def of(self, layers: int) -> Shape:
        """With another number of layers, unless that is 0."""
        return replace(self, layers=layers or self.layers)

    def config(self) -> Any:
        """As a checkpoint of Qwen3-MoE says it."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=1024,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            norm_topk_prob=True,
        )


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 32, 4, 128, 128, 8, 768, 6),
    "deepseek": Shape(7168, 64, 8, 128, 256, 8, 2048, 3),
    "tiny": Shape(64, 4, 2, 16, 8, 2, 32, 3),
}


@dataclass
class Part:
    """Rows of a batch: what the first layer is given [T, hidden], and what attention planned for them."""

    hidden: Tensor
    positions: Tensor
    step: ForwardStep

    def __len__(self) -> int:
        return len(self.hidden)


class InTurn:
    """Exchanges on the stream of everything else, when a half gets its next turn."""

    def begin(self, move: Callable[..., Any], *given: Any) -> Any:
        """Begins what `end` is then given; another half may compute between the two."""
        return partial(move, *given)

    def end(self, moving: Any) -> Any:
        """What `move` returned."""
        return moving()

    def forget(self) -> None:
        """Called when the pass has ended."""


class Beside(InTurn):
    """Launches an exchange at once, on a stream of its own, beside what the other half then launches."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=-1)

    def begin(self, move: Callable[..., Any], *given: Any) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return move(*given), given  # which stay as they are until then

    def end(self, moving: Any) -> Any:
        torch.cuda.current_stream().wait_stream(self._stream)
        return moving[0]


class Late(Beside):
    """Launches it when the half gets its next turn, so that what reads sizes on the host has work queued behind it.

    Tensors of its stream are kept until the pass has ended: it may not write over them while the other one reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def begin(self, move: Callable[..., Any], *given: Any) -> Any:
        return torch.cuda.current_stream().record_event(), move, given

    def end(self, moving: Any) -> Any:
        ready, move, given = moving
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            moved = move(*given)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._kept.append(moved)
        return moved

    def forget(self) -> None:
        self._kept.clear()


class Still(ExpertExchange):
    """Moves nothing: gives experts and layers again what another exchange brought once for as many tokens."""

    needs_python = False

    def __init__(self, real: ExpertExchange) -> None:
        self._real = real
        self._known: dict[int, tuple[Dispatched, Tensor]] = {}

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        del spec
        return None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        count = len(x.values)
        if count not in self._known:
            sent = self._real.dispatch(x, routing, step)
            sent.values = sent.values.clone()  # an exchange may use its memory again
            back = self._real.combine(torch.zeros_like(sent.values), sent).clone()
            self._known[count] = replace(sent, handle=count), back
        return self._known[count][0]

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        del out
        return self._known[sent.handle][1]


class Stack:
    """The layers of one rank, with random weights that are equal on all ranks but for the experts."""

    def __init__(self, shape: Shape, groups: Groups, device: torch.device, ops: Ops, backend: Any) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        build = Build(
            config=shape.config(),
            dtype=self.dtype,
            device=device,
            ops=ops,
            groups=groups,
            kv_dtype=self.dtype,
            device_type=device.type,
            max_model_len=8192,
            # slots come from the exchanges that are timed, counted from this rank's first
            exchange=lambda _, slots: LocalExchange(groups.expert.rank * slots),
        )
        self.model = Qwen3MoeForCausalLM(ModelSetup(build))
        self.layers: list[Any] = list(self.model.layers)
        generator = torch.Generator(device).manual_seed(1)
        for weight in self.model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                weight.data.fill_(1)
        self._caches = list(build.caches.values())
        spec = replace(self._caches[0].backend_spec, block_size=BLOCK)
        self._backend = backend(BackendSetup(spec, ops))

    def give_cache(self, num_tokens: int) -> None:
        """All layers share one cache: each reads what it wrote itself, and before that zeros."""
        first = self._caches[0]
        layout = with_blocks(plan_layout({first.name: first.kv_spec()}, BLOCK), 0, 2 + 2 * num_tokens // BLOCK)
        memory = KVMemory(layout, self.device)
        for layer in self._caches:
            layer.bind(
                *memory.layer_block(first.name, type(self._backend), self._backend.spec),
                0,
                layer.planner(self._backend),
            )

    def parts(self, rows: int, query: int, length: int) -> list[Part]:
        """A batch of random tokens, and its two halves: `rows` with `query` tokens behind `length - query` others."""
        hidden = torch.randn(rows * query, self.shape.hidden, device=self.device).to(self.dtype)
        cuts = (range(rows), range(rows // 2), range(rows // 2, rows))
        return [self._part(hidden[cut.start * query : cut.stop * query], cut, query, length) for cut in cuts]

    def _part(self, hidden: Tensor, rows: range, query: int, length: int) -> Part:
        step = ForwardStep([batch := self._batch(rows, query, length)], [batch])
        step.plans = [self._backend.plan(batch)]
        return Part(hidden, torch.arange(length - query, length, device=self.device).repeat(len(rows))[None], step)

    def _batch(self, rows: range, query: int, length: int) -> GroupBatch:
        blocks = -(-length // BLOCK)
        table = 1 + np.arange(rows.start * blocks, rows.stop * blocks, dtype=np.int32).reshape(len(rows), blocks)
        places = np.arange(length - query, length)
        slots = (table[:, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK).ravel()
        queries, lengths = np.full(len(rows), query, np.int32), np.full(len(rows), length, np.int32)

        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        return GroupBatch(
            num_tokens=query * len(rows),
            query_start=moved(np.arange(len(rows) + 1, dtype=np.int32) * query),
            seq_lens=moved(lengths),
            block_table=moved(table),
            slot_mapping=moved(slots),
            host_query_lens=queries,
            host_seq_lens=lengths,
            max_query_len=query,
            max_seq_len=length,
        )

    def attention(self, layer: Any, hidden: Tensor, residual: Tensor | None, part: Part) -> tuple[Tensor, Tensor]:
        """A layer up to its experts' norm."""
        out: tuple[Tensor, Tensor] = layer.attention(layer.attention_norm, hidden, residual, part.positions, part.step)
        return out

    def route(self, layer: Any, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Routing, Tensor]:
        """(normed, its routing, the new residual)."""
        logits, normed, residual = normed_linear(layer.mlp_norm, layer.mlp.router.linear, hidden, residual)
        return normed, layer.mlp.router.choose(logits), residual

    def compute(self, layer: Any, sent: Dispatched) -> Tensor:
        """What a layer's experts give."""
        experts = layer.mlp.experts
        out: Tensor = experts.method.apply(experts, sent)
        return out

    def steps(self, part: Part, exchange: ExpertExchange, lane: InTurn, results: list[Tensor]) -> Iterator[None]:
        """Computes all layers, and stops in each exchange; the result is added to `results`."""
        hidden, residual = part.hidden, None
        for layer in self.layers:
            hidden, residual = self.attention(layer, hidden, residual, part)
            normed, routing, residual = self.route(layer, hidden, residual)
            moving = lane.begin(exchange.dispatch, Activations(normed), routing, part.step)
            yield
            sent = lane.end(moving)
            moving = lane.begin(exchange.combine, self.compute(layer, sent), sent)
            yield
            hidden = lane.end(moving)
        results.append(self.model.norm(hidden, residual)[0])

    def after_another(self, parts: list[Part], exchange: ExpertExchange) -> Tensor:
        """The results [T, hidden] of parts of which each is computed to its end before the next one begins."""
        results = list[Tensor]()
        for part in parts:
            for _ in self.steps(part, exchange, InTurn(), results):
                pass
        return torch.cat(results) if len(results) > 1 else results[0]

    def overlapped(self, parts: list[Part], exchanges: list[ExpertExchange], lanes: list[InTurn]) -> Tensor:
        """As `after_another`, by turns: while a part is exchanged, the others are computed up to their exchange."""
        results = list[Tensor]()
        running = [self.steps(*one, results) for one in zip(parts, exchanges, lanes, strict=True)]
        while running:
            running = [one for one in running if next(one, self) is not self]
        for lane in lanes:
            lane.forget()
        return torch.cat(results)
