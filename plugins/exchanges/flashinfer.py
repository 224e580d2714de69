"""The exchange of the library FlashInfer (https://github.com/flashinfer-ai/flashinfer, its class `MoeAlltoAll`).

Ranks write into each other's memory, over NVLink also between hosts. A rank receives room for the tokens of all ranks,
filled where they chose one of its experts; no count is read on the host, so that steps are captured. It needs GPUs, 16
bits and the package `flashinfer`, which is no dependency of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frame.interfaces import (
    Activations,
    Dispatched,
    ExchangeSetup,
    ExchangeSpec,
    ExpertExchange,
    ForwardStep,
    Routing,
)

from .host_comm import HostComm, against_library
from .rows import Share, token_counts

#: The id of experts of other ranks in what comes.
_NOBODY = -1


class _Sent(NamedTuple):
    """Which tokens this rank has sent, and for how many of each rank there was room."""

    share: Share
    room: int


class FlashinferExchange(ExpertExchange):
    """The library's one-sided all-to-all, whose memory all exchanges of a process with these sizes share."""

    needs_python = False

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        self._setup, self._spec, group = setup, setup.spec, setup.groups.expert
        self._group, self._tensor = group, setup.groups.tensor
        self._first = group.rank * self._spec.slots_per_rank
        self._library: Any = None
        if group.is_silent:
            return
        mapping = import_module("flashinfer.comm.mapping").Mapping
        config = import_module("flashinfer.comm.mnnvl").MnnvlConfig
        self._library = import_module("flashinfer.comm.trtllm_moe_alltoall").MoeAlltoAll(
            mapping(world_size=group.size, rank=group.rank, tp_size=group.size, moe_ep_size=group.size),
            max_num_tokens=-(-self._spec.max_tokens // self._spec.tensor_size),
            top_k=self._spec.top_k,
            num_experts=self._spec.slots_per_rank * group.size,
            hidden_size=self._spec.hidden_size,
            mnnvl_config=config(comm_backend=HostComm(group)),
        )

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return "; ".join(against_library(spec, "flashinfer", [torch.bfloat16, torch.float16])) or None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        counts = token_counts(self._setup, len(x.values), step)
        if x.scales is not None:
            raise ValueError("FlashInfer's exchange has room for 16-bit tokens, and takes none that are quantised")
        shares = [Share.of(self._tensor, count, rank) for count in counts for rank in range(self._tensor.size)]
        room = max(1, *(share.num_own for share in shares))
        share = shares[self._group.rank]
        given = [part[share.own].contiguous() for part in (x.values, routing.ids, routing.weights)]
        if self._group.is_silent:
            came = [part.new_empty(self._group.size, room, part.shape[1]) for part in given]
        else:
            came = self._library.dispatch(
                given[1], given, room, invalid_token_expert_id=_NOBODY, expert_id_payload_index=1
            )
        values, ids, weights = (part.flatten(0, 1) for part in came)
        slots = torch.where(ids == _NOBODY, _NOBODY, ids - self._first)
        return Dispatched(values, None, weights, slots, handle=_Sent(share, room))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        how: _Sent = sent.handle
        if self._group.is_silent:
            return how.share.spread(out[: how.share.num_own])
        rows = out.view(self._group.size, how.room, out.shape[1])
        return how.share.spread(self._library.combine(rows, how.room))

    def close(self) -> None:
        self._library = None
