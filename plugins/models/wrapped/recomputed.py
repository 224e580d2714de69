"""Classes whose attention or state frame cannot keep: every step computes each of its requests from the first token on.

What is cached is the ids of the tokens, so that batches, chunks, preemption and prefix hits work as ever. A step takes
as long as the prompts that it continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import Build, ForwardStep, FullKV, GroupBatch, ModelInputs, ModelSetup
from frame.layers import CachedLayer

from .decoder import WrappedDecoder
from .library import NoClassError, find_class, is_headless, make_config, make_model
from .trial import Record, switches

logger = logging.getLogger("frame.models")
_ID_BYTES = 4
#: Classes that were seen to give other tokens, and why.
_UNFIT = {
    "ProphetNetForCausalLM": "its head reads more than hidden states",
    "ReformerModelWithLMHead": "it hashes at random, so that it gives other tokens each time",
}


class TokenHistory(CachedLayer):
    """Keeps the ids of a request's tokens, and has `model` compute the states of all of them in each step."""

    needs_python = True

    def __init__(self, build: Build, model: RecomputedDecoder) -> None:
        super().__init__(build, "token_history")
        self._model = [model]  # not a part of this layer

    def kv_spec(self) -> FullKV:
        return FullKV(num_kv_heads=1, head_dim=_ID_BYTES // 2, dtype="uint8")

    def planner(self, backend: Any) -> TokenHistory:
        return self

    def plan(self, batch: GroupBatch) -> GroupBatch:
        """The batch itself: rows are looked up when they are computed."""
        return batch

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """ids int32 [T] → [T, hidden_size]."""
        (ids,), batch = tensors, plan
        if self.kv_cache is None:
            raise RuntimeError("the ids of tokens have no cache")
        words = self.kv_cache.view(torch.int32)
        size = words.shape[1]
        kept = batch.slot_mapping >= 0
        slots = batch.slot_mapping[kept]
        words[slots // size, slots % size] = ids[kept].to(torch.int32)
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        out: Tensor | None = None
        for row, length in enumerate(lengths):
            start, end = starts[row], starts[row + 1]
            if not length or start == end:
                continue
            table = batch.block_table[row, : -(-length // size)].long()
            states = self._model[0].recompute(words[table].flatten()[:length])
            out = states.new_zeros(len(ids), states.shape[1]) if out is None else out
            out[start:end] = states[length - (end - start) :]
        if out is None:  # a step of padding
            out = self._model[0].recompute(torch.zeros_like(ids[:1])).expand(len(ids), -1)
        return out


class RecomputedDecoder(WrappedDecoder):
    """A causal class of any kind, on one rank."""

    needs_python: ClassVar[bool] = True
    needs_ids = True
    message: ClassVar[str] = (
        "model: %s of transformers, computed anew from a request's first token in each step, since frame's attention "
        "cannot serve it"
    )

    @classmethod
    def supports(cls, architecture: str, config: Mapping[str, Any]) -> str | None:
        if (reason := _UNFIT.get(architecture)) is not None:
            return f"{architecture} cannot be served: {reason}"
        try:
            if isinstance(config.get("text_config"), dict):
                raise NoClassError(f"{architecture} is more than a text model")
            kind = find_class(architecture, config)
            made = make_config(json.loads(json.dumps(config, default=str)))
            if is_headless(architecture, kind):
                raise NoClassError(f"{architecture} does not generate")
            if getattr(made, "is_encoder_decoder", False) and not architecture.endswith("ForCausalLM"):
                raise NoClassError(f"{architecture} is an encoder with a decoder")
        except NoClassError as error:
            return str(error)
        return None

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        if setup.build.groups.tensor.size > 1:
            raise ValueError("a class that is computed again in each step runs on 1 rank")
        super().__init__(setup, options)
        self.history = TokenHistory(setup.build, self)

    def make(self, config: Any, build: Build) -> tuple[Any, Record]:
        whole = make_model(self.kind, config, build.dtype)
        return whole, Record(whole, build.max_model_len)

    def replace(self, head: str) -> None:
        self.replacing.linears(head)

    def prepare(self) -> None:
        self._switches = switches(self.base)
        self.wrap_base()

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        """Raises `ValueError` for embeddings in the place of ids."""
        if inputs.ids is None or inputs.embeds is not None:
            raise ValueError(f"{self.kind.__name__} is computed from the ids of tokens, not from embeddings")
        out: Tensor = self.history(inputs.ids, step=step)
        return out

    def recompute(self, ids: Tensor) -> Tensor:
        """ids [L] of a request from its first token on → [L, hidden_size]."""
        out: Tensor = self.base(input_ids=ids[None].long(), **self._switches)[0]
        return out[0]
