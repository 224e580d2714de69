"""How the workers of an engine divide its model, and the place of one worker among them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

#: A parallel axis, or "expert": the ranks that share the experts of a stage.
Axis: TypeAlias = Literal["data", "pipeline", "prefill_context", "tensor", "decode_context", "expert"]


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the parallel axes; rank = (data rank * `pipeline` + stage) * `tensor` + tensor rank.

    `prefill_context` lies between pipeline and tensor. `decode_context` is no axis of its own: it divides each tensor
    group into groups of that many ranks, which share the KV cache of a request. With `expert_parallel` the experts of a
    stage are spread over its data and tensor ranks together, else each tensor rank holds a part of every expert.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    expert_parallel: bool = False

    @property
    def size(self) -> int:
        """Workers of all axes together."""
        return self.data * self.engine_size

    @property
    def engine_size(self) -> int:
        """Workers of one engine, which is one data rank."""
        return self.pipeline * self.prefill_context * self.tensor

    @property
    def output_rank(self) -> int:
        """The rank within an engine that has its tokens: the first of the last stage."""
        return (self.pipeline - 1) * self.prefill_context * self.tensor

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `axis` that `rank` is in, in order; (rank,) where the axis has one."""
        inner = self.tensor * self.prefill_context
        stage = inner * self.pipeline
        if axis == "tensor":
            return _run(rank, self.tensor, 1)
        if axis == "decode_context":
            return _run(rank, self.decode_context, 1)
        if axis == "prefill_context":
            return _run(rank, self.prefill_context, self.tensor)
        if axis == "pipeline":
            return _run(rank, self.pipeline, inner)
        if axis == "data":
            return _run(rank, self.data, stage)
        if not self.expert_parallel:
            return (rank,)
        return self.stage_ranks(rank)

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks, in order, of the pipeline stage of `rank`, in all engines that share experts."""
        inner = self.tensor * self.prefill_context
        return tuple(other for base in self.ranks("data", rank) for other in _run(base, inner, 1))

    def index(self, axis: Axis, rank: int) -> int:
        """The place of `rank` in its group of `axis`."""
        return self.ranks(axis, rank).index(rank)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a mesh: its rank, and its place among the workers of its machine, which is the device's index.

    Workers find one another at `rendezvous`: "file:///PATH" on one machine, "tcp://HOST:PORT" on several, and in the
    store of a launcher "store://HOST:PORT/PREFIX"; "" where there is one worker. `address` is the host name or address
    at which others reach this worker; "" for one machine.
    """

    rank: int = 0
    local_rank: int = 0
    mesh: Mesh = Mesh()
    rendezvous: str = ""
    address: str = ""


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The machines over which an engine's workers are spread, in equal runs of ranks; this one is number `rank`.

    The engine is on node 0, and listens at `address`:`port` for the others. `settings` are this node's, by name, as
    JSON values: those that all nodes must be given alike. `model` is the checkpoint's path on this node.
    """

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0
    model: str = ""
    settings: dict[str, Any] = {}


def _run(rank: int, count: int, stride: int) -> tuple[int, ...]:
    """The `count` ranks that are `stride` apart, `rank` being one of them, in blocks of count * stride."""
    first = rank - rank // stride % count * stride
    return tuple(range(first, first + count * stride, stride))
