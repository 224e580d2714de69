"""Models with a layer that keeps a state of each request instead of its tokens: right, and forgetful."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import ForwardStep, GroupBatch, ModelInputs, ModelSetup, StateKV
from frame.layers import CachedLayer
from frame.plugins.models.llama import LlamaForCausalLM


class Rows:
    """Plans nothing: the layer takes the rows as they are."""

    needs_python = True

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch


class Decay(CachedLayer):
    """Adds to each token half of what it gave for the token before; [size] float32 is the state of a request."""

    def __init__(self, build: Any, name: str, size: int) -> None:
        super().__init__(build, name)
        self.size = size

    def kv_spec(self) -> StateKV:
        return StateKV(state_bytes=4 * self.size)

    def planner(self, backend: Any) -> Rows:
        assert backend is None
        return Rows()

    def first(self, state: Tensor) -> Tensor:
        """What a request goes on from."""
        return state.clone()

    def compute(self, plan: GroupBatch, *tensors: Tensor) -> Tensor:
        (hidden,) = tensors
        assert self.kv_cache is not None
        out, starts = torch.zeros_like(hidden), plan.query_start.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            kept = self.kv_cache[plan.block_table[row, 0]].view(torch.float32)
            begins = int(plan.seq_lens[row]) == end - start
            state = torch.zeros_like(kept) if begins else self.first(kept)
            for token in range(start, end):
                state = hidden[token] + 0.5 * state
                out[token] = state
            kept.copy_(state)
        return out


class Forgetting(Decay):
    """Wrong: each step begins anew."""

    def first(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


class Recurrent(LlamaForCausalLM):
    """A Llama with such a layer behind it."""

    layer: type[Decay] = Decay

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.state = self.layer(setup.build, "model.state", self.config.hidden_size)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        return self.state(super().forward(inputs, step), step=step)


class Forgetful(Recurrent):
    """Wrong: forgets between steps."""

    layer = Forgetting
