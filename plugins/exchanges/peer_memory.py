"""Frame's own exchange for few tokens: kernels that write into the memory of the other GPUs of this machine.

A decode step's exchange is two kernels, captured in graphs. What does not fit their memory, and everything where the
GPUs do not reach each other's, is gathered. Data ranks alone exchange, as for `gather`: tensor ranks have the same
tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

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

from .gather import GatherExchange
from .options import PeerMemoryOptions
from .rows import token_counts

if TYPE_CHECKING:
    from frame.kernels.expert_exchange import ExchangeBuffers
    from frame.kernels.peer_memory import PeerMemory

logger = logging.getLogger("frame.exchanges")

#: Data ranks that the kernels serve.
MAX_RANKS = 8


class _Sent(NamedTuple):
    """What `combine` needs: the slots of this rank's tokens, and places of each rank."""

    ids: Tensor
    room: int


class PeerMemoryExchange(ExpertExchange):
    """Kernels up to `max_tokens` of all data ranks, then `GatherExchange`; every rank takes the same one in a step."""

    needs_python = False

    def __init__(self, setup: ExchangeSetup, options: PeerMemoryOptions | None = None) -> None:
        self._setup, self._data = setup, setup.groups.data
        self._larger = GatherExchange(setup)
        most = (options or PeerMemoryOptions()).max_tokens // self._data.size
        self._max_tokens = min(most, setup.spec.max_tokens)
        self._memory: PeerMemory | None = None
        self._buffers: ExchangeBuffers | None = None
        if not self._data.is_silent:
            self._connect()

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        reasons = []
        if find_spec("triton") is None:
            reasons.append("the package triton is not installed")
        if spec.device_type != "cuda":
            reasons.append(f"it needs CUDA devices, not {spec.device_type!r}")
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            reasons.append(f"it moves bfloat16, float16 and float32, not {str(spec.dtype).removeprefix('torch.')}")
        if spec.hidden_size * spec.dtype.itemsize % 8:
            reasons.append(f"a token of {spec.hidden_size * spec.dtype.itemsize} bytes is no multiple of 8")
        if spec.num_data_ranks > MAX_RANKS:
            reasons.append(f"it serves up to {MAX_RANKS} data ranks, not {spec.num_data_ranks}")
        return "; ".join(reasons) or None

    def _connect(self) -> None:
        """Makes the memory and logs which exchange serves what; every rank calls it at the same time."""
        from frame.kernels import expert_exchange, peer_memory

        spec, groups, data = self._setup.spec, self._setup.groups, self._data
        nothing = torch.empty(0)
        words = spec.hidden_size * spec.dtype.itemsize // 4
        plan = expert_exchange.ExchangeBuffers(
            data.rank, data.size, nothing, nothing, self._max_tokens, spec.top_k, words,
            slots=spec.slots_per_rank, stride=groups.tensor.size, offset=groups.tensor.rank,
        )  # fmt: skip
        device = torch.device(spec.device_type)  # this worker's
        try:
            memory = peer_memory.PeerMemory(device, data.rank, data.size, data.host, plan.num_bytes)
        except peer_memory.PeerMemoryError as error:
            logger.warning("expert exchange: gather, which is slower for few tokens: %s", error)
            return
        state = torch.zeros(4, dtype=torch.int64, device=memory.addresses.device)
        self._memory, self._buffers = memory, replace(plan, addresses=memory.addresses, state=state)
        logger.info(
            "expert exchange: kernels over peer memory up to %d tokens of a rank (%d MiB), then gather",
            self._max_tokens, plan.num_bytes >> 20,
        )  # fmt: skip

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        room = max(token_counts(self._setup, len(x.values), step))
        if self._buffers is None or x.scales is not None or not 0 < room <= self._max_tokens:
            return self._larger.dispatch(x, routing, step)
        from frame.kernels import expert_exchange

        ids, weights = routing.ids.contiguous(), routing.weights.contiguous()
        values, weights, slots = expert_exchange.dispatch(
            x.values.contiguous(), ids, weights, room, self._buffers, rehearsed=self._data.is_silent
        )
        return Dispatched(values, None, weights, slots, handle=_Sent(ids, room))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        how = sent.handle
        if self._buffers is None or sent.slots is None or not isinstance(how, _Sent):
            return self._larger.combine(out, sent)
        from frame.kernels import expert_exchange

        return expert_exchange.combine(
            out.contiguous(), sent.slots, how.ids, how.room, self._buffers, rehearsed=self._data.is_silent
        )

    def close(self) -> None:
        memory, self._memory, self._buffers = self._memory, None, None
        if memory is not None:
            memory.close()
