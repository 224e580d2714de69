"""A process's part of two data ranks that share experts: device, groups, ops, and every exchange that they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from expert_stack import Stack

from frame.core.parallel.groups import make_groups
from frame.interfaces import ExchangeSpec, ExpertExchange, Groups, Mesh, Placement
from frame.plugins.exchanges.all_to_all import AllToAllExchange
from frame.plugins.exchanges.gather import GatherExchange
from frame.plugins.platforms.torch_collectives import STEP_SECONDS, TorchCollectives, distributed, nccl_group
from frame.testing import make_setup

#: Programs of NCCL that are tried beside its own number.
LIMITS = (4, 16)
#: Tokens of a rank up to which the exchange over peer memory moves them itself.
PEER_TOKENS = 512


@dataclass(frozen=True)
class Pair:
    """An exchange for each half of a batch, which may be one and the same; `most` tokens of a rank at most."""

    first: ExpertExchange
    second: ExpertExchange
    most: int
    #: whether `dispatch` may be called again without `combine`
    separable: bool = False
    #: whether it may be captured as well as the engine's would be
    captured: bool = False

    def serves(self, tokens: int) -> bool:
        return tokens <= self.most


class Ranks:
    """The groups of this process and another one, which makes them at the same time."""

    def __init__(self, rank: int, size: int, rendezvous: str, device: torch.device) -> None:
        self.device, self.rank = device, rank
        self._limit = 0
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = Mesh(data=size, expert_parallel=True)
        placement = Placement(rank=rank, local_rank=rank, mesh=mesh, rendezvous=rendezvous)
        self._collectives = TorchCollectives(placement, self._communicator if device.type == "cuda" else None)
        self.groups = make_groups(placement, self._collectives)
        self._made: list[Pair] = []

    def _communicator(self, *given: Any) -> Any:
        return limited_nccl(self._limit, self.device, *given) if self._limit else nccl_group(self.device, *given)

    @cached_property
    def ops(self) -> Any:
        """Those of the platform."""
        if self.device.type == "cuda":
            from frame.plugins.platforms.cuda.ops import CudaOps

            return CudaOps(device=self.device)
        from frame.plugins.platforms.cpu_ops import CpuOps

        return CpuOps()

    @property
    def attention(self) -> Any:
        """The class of the platform's attention."""
        if self.device.type == "cuda":
            from frame.plugins.attention.triton import TritonAttention

            return TritonAttention
        from frame.plugins.attention.torch import TorchAttention

        return TorchAttention

    def exchanges(self, stack: Stack, most: int) -> dict[str, Pair]:
        """Every exchange that this machine has, for up to `most` tokens of a rank."""
        shape = stack.shape
        spec = ExchangeSpec(
            shape.hidden, shape.top_k, shape.experts // self.groups.expert.size, self.groups.expert.size, 1, most,
            stack.dtype, self.device.type,
        )  # fmt: skip
        setup = make_setup("exchange", spec=spec, groups=self.groups)
        gather, rows = GatherExchange(setup), AllToAllExchange(setup)
        found = {
            "gather": Pair(gather, gather, most, separable=True, captured=True),
            "all-to-all": Pair(rows, rows, most, separable=True),
        }
        if self.device.type == "cuda":
            for limit in LIMITS:
                self._limit = limit
                group = self._collectives.group(f"data-{limit}", range(self.groups.data.size))
                groups = Groups.of(data=group, expert=self.groups.expert)
                limited = GatherExchange(make_setup("exchange", spec=spec, groups=groups))
                found[f"gather-{limit}"] = Pair(limited, limited, most, separable=True, captured=True)
            found |= self._over_peer_memory(spec, most)
        self._made = list(found.values())
        return found

    def _over_peer_memory(self, spec: ExchangeSpec, most: int) -> dict[str, Pair]:
        from copied_exchange import CopiedExchange

        from frame.plugins.exchanges.options import PeerMemoryOptions
        from frame.plugins.exchanges.peer_memory import PeerMemoryExchange

        setup = make_setup("exchange", spec=spec, groups=self.groups)
        options = PeerMemoryOptions(max_tokens=PEER_TOKENS * spec.num_ranks)
        kernels = [PeerMemoryExchange(setup, options) for _ in range(2)]
        if kernels[0]._buffers is None:
            print("the devices do not reach each other's memory: neither peer-memory nor copies", flush=True)
            return {}
        copies = [CopiedExchange(setup) for _ in range(2)]
        return {
            "peer-memory": Pair(*kernels, min(most, PEER_TOKENS), captured=True),
            "copies": Pair(*copies, most),
        }

    def warm_up(self, run: Callable[[], Any], most: int) -> None:
        """Compiles all that `run` launches, many kernels at once; runs it, and chooses products as a start does.

        `most` are the tokens of its largest step.
        """
        if self.device.type != "cuda":
            run()
            return
        from frame.plugins.platforms.cuda.compile.compiler import without_lines
        from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

        with without_lines():
            self._collectives.is_silent = True
            rehearse(run)
            self._collectives.is_silent = False
            self.groups.expert.host.barrier()
            run()
            torch.cuda.synchronize()
            self.ops.products.settle(most)
            run()
        torch.cuda.synchronize()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.groups.expert.host.barrier()
            for pair in self._made:
                pair.first.close()
                pair.second.close()
            self.groups.expert.host.barrier()
        self._collectives.close()


def limited_nccl(limit: int, device: torch.device, store: Any, rank: int, size: int, address: str) -> Any:
    """As `nccl_group`, of at most `limit` programs."""
    del address
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options.is_high_priority_stream = True
    options.config.max_ctas = limit
    group = distributed.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group
