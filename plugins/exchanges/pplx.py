"""The exchange of the library pplx-kernels (https://github.com/perplexityai/pplx-kernels) between GPUs of one machine.

A token goes to each of its slots, and no count is read on the host, so that steps are captured. It needs GPUs, 16 bits
and the package `pplx_kernels`, which is no dependency of ours. Tokens have `top_k` different slots each: the library
has no word for none.
"""

from __future__ import annotations

import socket
from importlib import import_module
from pathlib import Path
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
    HostGroup,
    Routing,
)

from .host_comm import against_library, named_group
from .rows import Share, token_counts

#: Most bytes that the experts of a layer may be given: each slot has room for all tokens of all ranks.
MOST_BYTES = 4 << 30


class PplxExchange(ExpertExchange):
    """The library's all-to-all within a machine; every rank sends a share of its tensor group's tokens."""

    needs_python = False
    layout: ClassVar[ExpertLayout] = "slots"

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        self._setup, self._spec, group = setup, setup.spec, setup.groups.expert
        self._max_tokens = _share(setup.spec)
        self._library: Any = None
        if group.is_silent:
            return
        _refuse_several_machines(group.host)
        spec = setup.spec
        with named_group(group) as name:
            self._library = import_module("pplx_kernels").AllToAll.intranode(
                max_num_tokens=self._max_tokens,
                num_experts=spec.slots_per_rank * group.size,
                experts_per_token=spec.top_k,
                rank=group.rank,
                world_size=group.size,
                dp_size=1,  # the ranks that have the same tokens, of which each sends its share
                hidden_dim=spec.hidden_size,
                hidden_dim_bytes=spec.hidden_size * spec.dtype.itemsize,
                hidden_dim_scale_bytes=0,
                group_name=name,
            )

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        reasons = against_library(spec, "pplx_kernels", [torch.bfloat16, torch.float16])
        row_bytes = spec.hidden_size * spec.dtype.itemsize
        if row_bytes % 16:
            reasons.append(f"a token of {row_bytes} bytes is no multiple of 16")
        given = spec.slots_per_rank * _share(spec) * spec.num_ranks * row_bytes
        if given > MOST_BYTES:
            most = f"{given >> 20} MiB, more than {MOST_BYTES >> 20}"
            reasons.append(f"its experts would be given up to {most}: lower max_num_batched_tokens")
        return "; ".join(reasons) or None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        token_counts(self._setup, len(x.values), step)
        if x.scales is not None:
            raise ValueError("the exchange pplx has room for 16-bit tokens, and takes none that are quantised")
        share = Share.of(self._setup.groups.tensor, len(x.values))
        values, weights = x.values[share.own].contiguous(), routing.weights[share.own].contiguous()
        ids = routing.ids[share.own].contiguous().view(torch.uint32)
        slots = self._spec.slots_per_rank
        came = values.new_empty(slots, self._max_tokens * self._spec.num_ranks, values.shape[1])
        counts = torch.zeros(slots, dtype=torch.int32, device=values.device)
        if self._library is not None and not self._setup.groups.expert.is_silent:
            self._library.dispatch(
                out_expert_num_tokens=counts,
                out_expert_x=came,
                out_expert_x_scale=None,
                dp_x=values,
                dp_x_scale=None,
                indices=ids,
                bound_m=None,
            )
        return Dispatched(came, counts=counts, handle=(share, ids, weights))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        share, ids, weights = sent.handle
        sums = out.new_empty(len(ids), out.shape[2])
        if self._library is not None and not self._setup.groups.expert.is_silent:
            self._library.combine(
                out_tokens=sums, indices=ids, weights=weights, expert_y=out.contiguous(), bound_m=None
            )
        spread: Tensor = share.spread(sums)
        return spread

    def close(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library.destroy()


def _share(spec: ExchangeSpec) -> int:
    """Most tokens that a rank sends."""
    return -(-spec.max_tokens // spec.tensor_size)


def _refuse_several_machines(host: HostGroup) -> None:
    started = Path("/proc/sys/kernel/random/boot_id")  # differs between machines, whatever their names are
    mine = started.read_text().strip() if started.is_file() else socket.gethostname()
    machines = len(set(host.gather(mine.encode())))
    if machines > 1:
        raise ValueError(
            f"the exchange pplx serves GPUs of one machine, and the ranks are on {machines}: use all-to-all"
        )
