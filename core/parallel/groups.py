"""Makes the process groups of a worker, and stand-ins for groups whose other ranks are not there."""

from __future__ import annotations

from ..interfaces.collectives import Collectives, Groups, UnconnectedGroup
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
