"""Makes the process groups of a worker, and stand-ins for groups whose other ranks are not there."""

from __future__ import annotations

from collections.abc import Mapping

from ..interfaces.collectives import Collectives, Groups, ProcessGroup, UnconnectedCollectives
from ..interfaces.mesh import Axis, Mesh, Placement
from ..interfaces.wire import decode, encode

#: The axes along which the workers of one engine exchange tensors; engines of a dense model never wait for each other.
ENGINE_AXES: tuple[Axis, ...] = ("tensor", "pipeline", "decode_context", "prefill_context")


def axes_of(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes for which workers of `mesh` make groups; those of size one have none."""
    own = mesh.expert_parallel and mesh.size > 1 and not _experts_over_tensor(mesh)
    axes = [*ENGINE_AXES, *(("expert", "data") if own else ())]
    return tuple(axis for axis in axes if len(mesh.ranks(axis, 0)) > 1)


def make_groups(placement: Placement, collectives: Collectives) -> Groups:
    """The groups of one worker; all workers of its mesh must call this at the same time."""
    mesh, rank = placement.mesh, placement.rank
    made = {axis: collectives.group(axis, mesh.ranks(axis, rank)) for axis in axes_of(mesh)}
    groups = _with_experts(mesh, made)
    if mesh.pipeline > 1:
        groups["drawn"] = collectives.group("drawn", mesh.ranks("pipeline", rank))
    return Groups.of(**groups)


def unconnected_groups(placement: Placement) -> Groups:
    """Groups of the same sizes without the other workers, for rehearsals of a step and for predictions."""
    return make_groups(placement, UnconnectedCollectives(placement.rank))


def gather_all(groups: Groups, data: bytes) -> list[bytes]:
    """Every worker's `data` by rank of the mesh, on every worker; all call it at once, as `HostGroup.gather`."""
    given = [data]
    for group in (groups.tensor, groups.prefill_context, groups.pipeline, groups.data):
        if group.size > 1:
            given = [one for part in group.host.gather(encode(given)) for one in decode(part, list[bytes])]
    return given


def _with_experts(mesh: Mesh, made: Mapping[Axis, ProcessGroup]) -> dict[str, ProcessGroup]:
    """`made`, with the tensor group as that of experts where these are spread over it alone."""
    groups: dict[str, ProcessGroup] = {str(axis): group for axis, group in made.items()}
    if _experts_over_tensor(mesh) and "tensor" in groups:
        groups["expert"] = groups["tensor"]
    return groups


def _experts_over_tensor(mesh: Mesh) -> bool:
    return mesh.expert_parallel and mesh.data == 1 and mesh.prefill_context == 1
