"""Plugins that are wrong in one way each, for the tests of the suites themselves."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from torch import Tensor

from frame.core.ops import Ops
from frame.interfaces import (
    AttentionSpec,
    Command,
    DraftContext,
    Drafts,
    Endpoint,
    LayerParams,
    LazyTensor,
    SchedulerPolicy,
    SpeculatorSetup,
    StepPlan,
)
from frame.plugins.loaders.safetensors import SafetensorsLoader
from frame.plugins.platforms.cpu import CpuPlatform, HostStreams
from frame.plugins.speculators.ngram import NgramSpeculator
from frame.plugins.speculators.ngram_options import NgramOptions
from frame.testing.fake_executor import FakeExecutor
from frame.testing.reference_attention import ReferenceAttention
from tests.contract.processors import Boost

_COUNT = itertools.count()


class Spreading(Boost):
    """Changes its neighbours too."""

    def apply(self, logits: Tensor, slots: Any) -> Tensor:
        return super().apply(logits, slots) + len(slots) * torch.arange(logits.shape[1]) + slots[0]


class Liar(Boost):
    """Says that it keeps the best token."""

    argmax_invariant = True

    def apply(self, logits: Tensor, slots: Any) -> Tensor:
        return -logits


class Moody(SchedulerPolicy):
    """Orders by the moment of asking."""

    def key(self, request: Any) -> tuple[Any, ...]:
        return (next(_COUNT),)


class Careless(SchedulerPolicy):
    """Writes into requests."""

    def key(self, request: Any) -> tuple[Any, ...]:
        request.priority += 1
        return (request.arrival,)


class Heavy(Command):
    """This module imports torch."""

    help = "Is heavy."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:
        return 0


class _Shifted(LazyTensor):
    def __init__(self, inner: LazyTensor) -> None:
        self.inner, self.name, self.shape, self.dtype = inner, inner.name, inner.shape, inner.dtype

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        return self.inner.read(()) if index else self.inner.read()


class Sloppy(SafetensorsLoader):
    """Reads the whole for a slice."""

    def tensors(self) -> Any:
        return map(_Shifted, super().tensors())


class Forgetful(SafetensorsLoader):
    """Leaves the last tensor out."""

    def tensors(self) -> Any:
        return iter(list(super().tensors())[:-1])


class Fragile(Endpoint):
    """Trusts the body."""

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post("/fragile")
        async def fragile(request: Request) -> dict[str, str]:
            return {"text": (await request.json())["prompt"].upper()}

        return router


class Greedy(ReferenceAttention):
    """Supports whatever is asked."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None


class Windowless(ReferenceAttention):
    """Knows no window."""

    def forward(self, layer: LayerParams, *inputs: Any) -> Tensor:
        return super().forward(replace(layer, spec=replace(layer.spec, window=0)), *inputs)


class Scribbler(ReferenceAttention):
    """Writes padding tokens into block 0."""

    def plan(self, batch: Any) -> Any:
        return replace(batch, slot_mapping=batch.slot_mapping.clamp(min=0))


class Overwriting(ReferenceAttention):
    """Writes an answer for rows of padding, too: onto the last real token where there is no token of padding."""

    def forward(self, layer: Any, query: Any, *inputs: Any) -> Tensor:
        out = super().forward(layer, query, *inputs)
        batch = inputs[-1]
        starts = batch.query_start[:-1][batch.seq_lens == 0].long()
        return out.index_fill(0, starts.clamp(max=len(query) - 1), 0)


class Broadcast(ReferenceAttention):
    """Gives one token for all, which adds to the residual without a word."""

    def forward(self, *inputs: Any) -> Tensor:
        return super().forward(*inputs)[-1:]


class Believing(ReferenceAttention):
    """Lets its steps be captured, and takes lengths from the host."""

    needs_python = False

    def plan(self, batch: Any) -> Any:
        return replace(batch, seq_lens=torch.from_numpy(batch.host_seq_lens))


class Polluted(ReferenceAttention):
    """Multiplies whatever lies in the last block by zero."""

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, plan: Any) -> Tensor:
        out = super().forward(layer, query, key, value, kv_cache, plan)
        blocks = plan.block_table[:, 0].long()
        return out + (kv_cache[1, blocks] * 0).sum().to(out.dtype)


class Impatient(FakeExecutor):
    """Answers with the newest step."""

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        self.plan = plan

    def sample(self, masks: bytes = b"") -> Any:
        handle, executor = super().sample(masks), self

        class Newest:
            def ready(self) -> bool:
                return True

            def result(self) -> Any:
                handle.outcome.step = executor.plan.step
                return handle.outcome

        return Newest()


class Leaving(FakeExecutor):
    """Leaves its worker open."""

    def close(self) -> None:
        pass


class _AliasingStreams(HostStreams):
    def stage(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)


class Aliasing(CpuPlatform):
    """Stages arrays without copying them."""

    def streams(self) -> Any:
        return _AliasingStreams()


class _RoundingOps(Ops):
    @staticmethod
    def silu_mul(x: Tensor) -> Tensor:
        return Ops.silu_mul(x.to(torch.float8_e4m3fn).to(x.dtype))


class Rounding(CpuPlatform):
    """Computes in few bits."""

    def ops(self) -> Ops:
        if not isinstance(self._ops, _RoundingOps):
            self._ops = _RoundingOps()
        return self._ops


class Peeking(NgramSpeculator):
    """Reads what lies behind the known tokens."""

    def __init__(self, setup: SpeculatorSetup, options: Any = None) -> None:
        super().__init__(setup, NgramOptions(prompt_lookup_max=2))

    def propose(self, context: DraftContext) -> Drafts:
        return super().propose(replace(context, lengths=context.lengths + 1, longest=context.longest + 1))
