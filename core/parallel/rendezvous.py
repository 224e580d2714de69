"""Where the workers of one engine find one another, and the places of its workers."""

from __future__ import annotations

import os

from ..interfaces.mesh import Mesh, Placement


class Rendezvous:
    """A file in memory through which workers of this machine exchange addresses; it ends with this process.

    Other processes of the same user open it by this process's number. `address` is "" where nobody needs it.
    """

    def __init__(self, needed: bool = True) -> None:
        self._file = os.memfd_create("frame-rendezvous") if needed else -1
        self.address = f"file:///proc/{os.getpid()}/fd/{self._file}" if needed else ""

    def close(self) -> None:
        """Frees the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def placements_of(mesh: Mesh, rendezvous: str, local_engine: int = 0) -> list[Placement]:
    """The workers of an engine on one machine, in order of rank; `local_engine` engines have devices before its own."""
    first = local_engine * mesh.engine_size
    return [
        Placement(rank=rank, local_rank=first + rank, mesh=mesh, rendezvous=rendezvous)
        for rank in range(mesh.engine_size)
    ]
