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
        ranks = _Ranks(mesh, work, folder, collectives or TorchCollectives, hangs_up=collectives is None)
        return ranks.run(seconds)


class _Ranks:
    """Threads that call `work`. Each one `hangs_up` itself in the end, since gloo takes some ms for each peer."""

    def __init__(
        self,
        mesh: Mesh,
        work: Callable[[Groups], Any],
        folder: str,
        make: Callable[[Placement], Collectives],
        *,
        hangs_up: bool,
    ) -> None:
        self._mesh = mesh
        self._work = work
        self._make = make
        self._hangs_up = hangs_up
        # in a file of their own, not in one that the next ranks may be given: a store writes to it when it is freed
        self._rendezvous = f"file://{folder}/store"
        self._results: dict[int, Any] = {}
        self._failures: list[BaseException] = []
        self._over = threading.Event()

    def run(self, seconds: float) -> list[Any]:
        """As `run_mesh`."""
        threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(self._mesh.size)]
        for thread in threads:
            thread.start()
        latest = time.monotonic() + seconds
        while len(self._results) + len(self._failures) < len(threads) and time.monotonic() < latest:
            time.sleep(0.002)
            if self._failures:  # the others may wait for that rank, and then end with this process
                latest = min(latest, time.monotonic() + 1)
        self._over.set()
        for thread in threads:
            thread.join(1)
        if self._failures:
            raise self._failures[0]
        late = [rank for rank in range(self._mesh.size) if rank not in self._results]
        if late:
            raise TimeoutError(f"ranks {late} have not returned after {seconds:g} seconds")
        return [self._results[rank] for rank in range(self._mesh.size)]

    def _run(self, rank: int) -> None:
        place = Placement(rank=rank, local_rank=rank, mesh=self._mesh, rendezvous=self._rendezvous)
        try:
            collectives = self._make(place)
        except BaseException as error:  # handed to the caller
            self._failures.append(error)
            return
        try:
            self._results[rank] = self._work(make_groups(place, collectives))
        except BaseException as error:
            self._failures.append(error)
        self._over.wait()  # a rank that is quick must not hang up on those that still dial
        if self._hangs_up:
            collectives.close()
