"""Makes the process groups of a worker, and stand-ins for groups whose other ranks are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..interfaces.collectives import Collectives, Groups, ProcessGroup, SingleHost
from ..interfaces.mesh import Axis, Mesh, Placement

#: The axes along which the workers of one engine exchange tensors; engines of a dense model never wait for each other.
ENGINE_AXES: tuple[Axis, ...] = ("tensor", "pipeline", "decode_context", "prefill_context")


def axes_of(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes for which workers of `mesh` make groups; those of size one have none."""
    axes = [*ENGINE_AXES, *(("expert", "data") if mesh.expert_parallel and mesh.size > 1 else ())]
    return tuple(axis for axis in axes if len(mesh.ranks(axis, 0)) > 1)


def make_groups(placement: Placement, collectives: Collectives) -> Groups:
    """The groups of one worker; all workers of its mesh must call this at the same time."""
    mesh, rank = placement.mesh, placement.rank
    return Groups.of(**{axis: collectives.group(axis, mesh.ranks(axis, rank)) for axis in axes_of(mesh)})


def unconnected_groups(placement: Placement) -> Groups:
    """Groups of the same sizes without the other workers, for rehearsals of a step and for predictions."""
    mesh, rank = placement.mesh, placement.rank
    axes = axes_of(mesh)
    return Groups.of(**{axis: UnconnectedGroup(mesh.index(axis, rank), len(mesh.ranks(axis, rank))) for axis in axes})


class UnconnectedGroup(ProcessGroup):
    """Has a rank and a size, but no peers: its results have the right shapes and meaningless values."""

    host = SingleHost()

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = sum(sizes) if sizes is not None else shape[dim] * self.size
        return tensor.new_empty(shape)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = sizes[self.rank] if sizes is not None else shape[dim] // self.size
        return tensor.new_empty(shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        del source
        return tensor

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        del send_sizes
        return tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))

    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        return

    def receive(self, into: Mapping[str, Tensor], source: int) -> None:
        return
