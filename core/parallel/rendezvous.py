"""Where the workers of one engine find one another, and the places of its workers."""

from __future__ import annotations

import os

from ..config.data_parallel import DataParallelConfig
from ..interfaces.mesh import Mesh, Placement


class Rendezvous:
    """A file in memory through which workers of this machine exchange addresses; it ends with this process.

    Other processes of the same user open it by this process's number. `address` is "" where nobody needs it.
    """

    def __init__(self, needed: bool = True) -> None:
        self._file = os.memfd_create("frame-rendezvous") if needed else -1
        self.address = f"file:///proc/{os.getpid()}/fd/{self._file}" if needed else ""

    def clear(self) -> None:
        """Forgets the addresses of workers that are gone, so that others can meet."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Frees the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def placements_of(mesh: Mesh, rendezvous: str, engine: DataParallelConfig) -> list[Placement]:
    """The workers of an engine on one machine, in order of rank. Engines before it have the devices before its own.

    Where it shares experts with other engines, its workers are a part of the mesh. After a "#", `rendezvous` has the
    address at which those of other machines reach them.
    """
    rendezvous, _, address = rendezvous.partition("#")
    size = mesh.engine_size
    first = engine.first_rank * size if mesh.data > 1 else 0
    device = (engine.data_parallel_rank_local or 0) * size
    return [
        Placement(rank=first + place, local_rank=device + place, mesh=mesh, rendezvous=rendezvous, address=address)
        for place in range(size)
    ]
