"""Several ranks as threads of this process, over gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from frame.core.interfaces.collectives import Collectives, Groups, ProcessGroup
from frame.core.interfaces.mesh import Mesh, Placement
from frame.core.parallel.groups import make_groups

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[ProcessGroup], T], seconds: float = 60.0) -> list[T]:
    """Calls `work(group)` on each of `size` ranks of one group at once; see `run_mesh`."""
    return run_mesh(Mesh(tensor=size), lambda groups: work(groups.tensor), seconds)


def run_mesh(
    mesh: Mesh,
    work: Callable[[Groups], T],
    seconds: float = 60.0,
    collectives: Callable[[Placement], Collectives] | None = None,
) -> list[T]:
    """Calls `work(groups)` on each rank of `mesh` at once; returns what each returned, by rank.

    `collectives` makes those of a rank, in its thread; by default gloo's.
    Raises the first error of a rank, or `TimeoutError` for ranks that have not returned after `seconds`, which other
    ranks left waiting in a collective.
    """
    from frame.plugins.platforms.torch_collectives import TorchCollectives

    if mesh.size == 1:
        return [work(Groups.single())]
    with TemporaryDirectory() as folder:
        make = collectives or TorchCollectives
        return _run(mesh, lambda place: make_groups(place, make(place)), work, folder, seconds)


def _run(
    mesh: Mesh, connect: Callable[[Placement], Groups], work: Callable[[Groups], T], folder: str, seconds: float
) -> list[T]:
    # in a file of their own, not in one that the next ranks may be given: a store writes to it when it is freed
    rendezvous = f"file://{folder}/store"
    results: dict[int, Any] = {}
    connected: list[Groups] = []  # until all have ended: a rank that is quick must not hang up on those that still dial
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            groups = connect(Placement(rank=rank, local_rank=rank, mesh=mesh, rendezvous=rendezvous))
            connected.append(groups)
            results[rank] = work(groups)
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    latest = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and time.monotonic() < latest:
        time.sleep(0.002)
        if failures:  # the others may wait for that rank, and then end with this process
            latest = min(latest, time.monotonic() + 1)
    if failures:
        raise failures[0]
    late = [rank for rank in range(mesh.size) if rank not in results]
    if late:
        raise TimeoutError(f"ranks {late} have not returned after {seconds:g} seconds")
    return [results[rank] for rank in range(mesh.size)]
