"""The exchanges of the library DeepEP (https://github.com/deepseek-ai/DeepEP, tried against the interface of 1.2.1).

`DeepepExchange` is for many tokens: a token goes once to each rank that holds experts of it, and comes back summed.
`DeepepLowLatencyExchange` is for few: a token goes to each of its slots, and no count is read on the host, so that
steps are captured. Both need GPUs, bfloat16 and the package `deep_ep`, which is no dependency of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import (
    Activations,
    Dispatched,
    ExchangeSetup,
    ExchangeSpec,
    ExpertExchange,
    ExpertLayout,
    ForwardStep,
    Routing,
)

from .host_comm import HostComm, against_library
from .rows import Share, token_counts

#: Most tokens of a rank for which the library's queues have room (NVSHMEM_QP_DEPTH 1024, two entries a token).
MOST_TOKENS = 511
#: Groups for which the library has launch parameters.
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class _Deepep(ExpertExchange):
    """What both have in common: who sends what, and the library's buffer, which a rehearsal has not."""

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        self._setup, self._spec = setup, setup.spec
        self._num_slots = setup.spec.slots_per_rank * setup.spec.num_ranks
        self._max_tokens = -(-setup.spec.max_tokens // setup.spec.tensor_size)
        group = setup.groups.expert
        self._buffer: Any = None
        if not group.is_silent:
            library = import_module("deep_ep")
            self._buffer = self._made(library.Buffer, HostComm(group))

    def _made(self, make: Any, comm: HostComm) -> Any:
        """The library's buffer."""
        raise NotImplementedError

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return "; ".join((*against_library(spec, "deep_ep", [torch.bfloat16]), *cls._against(spec))) or None

    @classmethod
    def _against(cls, spec: ExchangeSpec) -> list[str]:
        """Reasons of its own."""
        raise NotImplementedError

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.destroy()


class DeepepExchange(_Deepep):
    """The library's dispatch and combine for prompts and large batches."""

    @classmethod
    def _against(cls, spec: ExchangeSpec) -> list[str]:
        known = ", ".join(map(str, SIZES))
        return [] if spec.num_ranks in SIZES else [f"it knows groups of {known} ranks, not of {spec.num_ranks}"]

    def _made(self, make: Any, comm: HostComm) -> Any:
        row_bytes, size = self._spec.hidden_size * self._spec.dtype.itemsize, self._spec.num_ranks
        configs = make.get_dispatch_config(size), make.get_combine_config(size)
        near = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        far = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        return make(group=None, num_nvl_bytes=near, num_rdma_bytes=far, explicitly_destroy=True, comm=comm)

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        counts = token_counts(self._setup, len(x.values), step)
        share = Share.of(self._setup.groups.tensor, len(x.values))
        values, ids, weights = x.values[share.own], routing.ids[share.own].long(), routing.weights[share.own]
        if self._setup.groups.expert.is_silent:
            rows = sum(counts)  # as many as could come
            empty = weights.new_empty(rows, weights.shape[1])
            return Dispatched(values.new_empty(rows, values.shape[1]), None, empty, empty.to(torch.int32), handle=share)
        given = values if x.scales is None else (values, x.scales[share.own])
        per_rank, per_node, per_slot, goes, _ = self._buffer.get_dispatch_layout(ids, self._num_slots)
        came, slots, weights, _, handle, _ = self._buffer.dispatch(
            given,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_slot,
            topk_idx=ids,
            topk_weights=weights,
        )
        values, scales = came if isinstance(came, tuple) else (came, None)
        return Dispatched(values, scales, weights, slots.to(torch.int32), handle=(share, handle))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        if self._setup.groups.expert.is_silent:
            rehearsed: Share = sent.handle
            return rehearsed.spread(out[: rehearsed.num_own])
        share: Share = sent.handle[0]
        return share.spread(self._buffer.combine(out, sent.handle[1])[0])


class DeepepLowLatencyExchange(_Deepep):
    """The library's low-latency kernels, for decode steps."""

    needs_python = False
    layout: ClassVar[ExpertLayout] = "slots"

    @classmethod
    def _against(cls, spec: ExchangeSpec) -> list[str]:
        tokens = -(-spec.max_tokens // spec.tensor_size)
        if tokens <= MOST_TOKENS:
            return []
        return [f"a step has up to {tokens} tokens a rank, and {MOST_TOKENS} fit: lower max_num_batched_tokens"]

    def _made(self, make: Any, comm: HostComm) -> Any:
        spec = self._spec
        sizes = self._max_tokens, spec.hidden_size, spec.num_ranks, self._num_slots
        num_bytes = make.get_low_latency_rdma_size_hint(*sizes)
        return make(
            group=None,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=spec.slots_per_rank,
            explicitly_destroy=True,
            comm=comm,
        )

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        token_counts(self._setup, len(x.values), step)
        if x.scales is not None:
            raise ValueError("DeepEP's low-latency exchange quantises tokens itself, and takes none that are quantised")
        share = Share.of(self._setup.groups.tensor, len(x.values))
        values, ids, weights = x.values[share.own], routing.ids[share.own].long(), routing.weights[share.own]
        if self._setup.groups.expert.is_silent:
            capacity = self._max_tokens * self._spec.num_ranks
            empty = values.new_empty(self._spec.slots_per_rank, capacity, values.shape[1])
            return Dispatched(empty, counts=ids.new_zeros(self._spec.slots_per_rank, dtype=torch.int32), handle=share)
        came, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            values, ids, self._max_tokens, self._num_slots, use_fp8=False
        )
        return Dispatched(came, counts=counts, handle=(share, ids, weights, handle))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        if self._setup.groups.expert.is_silent:
            rehearsed: Share = sent.handle
            return rehearsed.spread(out.flatten(0, 1)[: rehearsed.num_own])
        share: Share = sent.handle[0]
        return share.spread(self._buffer.low_latency_combine(out, *sent.handle[1:])[0])
