"""The ray executor: workers where a Ray cluster places them, on one machine or several.

Ray gives resources and starts an actor for each worker. The worker is a process beside its actor and talks to the
engine directly, as the workers of other machines do without Ray, so that no step passes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from frame.interfaces import DeadWorkerError, ExecutorSetup, Mesh, Placement, SpawnedWorker
from frame.links.greeting import Listener, send_bytes
from frame.links.versions import versions
from frame.quoting import quoted

from .engine_exchange import serve_store
from .process import ProcessExecutor, against_shared_experts
from .ray_options import RayOptions
from .ray_room import strategies

logger = logging.getLogger("frame.executors")

#: Seconds for an actor that has its resources to start, and for its worker to connect.
START_SECONDS = 120.0
#: Seconds after which it is looked whether an actor failed that has not connected.
CHECK_SECONDS = 0.2
#: Seconds for an actor to say how its worker has ended.
ASK_SECONDS = 5.0


class RayExecutor(ProcessExecutor):
    """One actor a worker, in placement groups that keep a tensor group on one machine where one has room for it."""

    options: RayOptions
    takes_local_devices = False

    def __init__(self, setup: ExecutorSetup, options: RayOptions | None = None) -> None:
        self._options = options or RayOptions()
        self._ray = _ray()
        self._groups: list[Any] = []
        self._actors: list[Any] = []
        self._store: Any = None
        self._listener: Listener | None = None
        self._token = secrets.token_hex(16)
        try:
            self._join_cluster()
            self._host = self._ray.util.get_node_ip_address()
            self._listener = Listener(self._host, 0, self._token.encode())
            self._store = serve_store(self._host, 0)
            self._place(setup.mesh.tensor, len(setup.placements))
            self._found = self._described()
            super().__init__(setup, self._options)
        except BaseException:
            self._leave()
            raise
        self._listener.close()  # nobody else is expected

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        try:
            _ray()
        except ValueError as error:
            return str(error)
        return against_shared_experts(mesh)

    def make(self, placement: Placement) -> SpawnedWorker:
        rank, found = placement.rank, self._found[placement.rank]
        local = [other for other in range(rank) if self._found[other]["address"] == found["address"]]
        placement = structs.replace(
            placement,
            local_rank=found["devices"][0] if found["devices"] else len(local),
            rendezvous=f"store://{self._host}:{self._store.port}/{self._token}",
            address=found["address"],
        )
        if self._listener is None:
            raise RuntimeError("the executor is closed")
        connection = self._connection(rank, self._listener)
        send_bytes(connection, self.workers.recipe(placement))
        self._spawned.append(self.workers.connected(connection, f"Ray node {found['address']}"))
        return self._spawned[-1]

    def _connection(self, rank: int, listener: Listener) -> socket.socket:
        """Has the worker's actor connect. Raises `ValueError` with the actor's reason where it does not."""
        started = self._actors[rank].start.remote(self._host, listener.port, self._token.encode(), rank)
        where = f"worker {rank} on Ray node {self._found[rank]['address']}"
        latest = time.monotonic() + START_SECONDS
        while time.monotonic() < latest:
            if (link := listener.next(CHECK_SECONDS)) is not None and link[1].get("worker") == rank:
                return link[0]
            if self._ray.wait([started], timeout=0)[0]:  # it ends only after it was told what to run, or by an error
                try:
                    self._ray.get(started)
                except Exception as error:
                    raise ValueError(f"{where} does not start: {_last_line(error)}") from None
        raise ValueError(f"{where} did not connect to {self._host}:{listener.port} within {START_SECONDS:g} seconds")

    def named(self, rank: int, error: Exception) -> Exception:
        """With what the worker's actor knows of its death, as long as there is an actor."""
        if isinstance(error, DeadWorkerError) and rank < len(self._actors):
            status, cause = self._death(rank)
            error = DeadWorkerError(f"{error}: {cause}", killed=error.killed or status == -signal.SIGKILL)
        return super().named(rank, error)

    def _death(self, rank: int) -> tuple[int | None, str]:
        """The exit status of a worker that is gone, None where nobody knows it, and why it is gone."""
        try:
            status = self._ray.get(self._actors[rank].status.remote(), timeout=ASK_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return None, f"its actor does not answer for {ASK_SECONDS:g} seconds"
        except Exception as error:
            return None, f"its actor is gone: {_last_line(error)}"
        if status is None:
            return None, "its process still runs, so that the connection failed"
        return status, f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        super().close()
        self._leave()

    def _join_cluster(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            self._ray.init(address=self._options.address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"there is no Ray cluster at {quoted(self._options.address)}: start one with `ray start --head`, or "
                f"set --plugin.ray.address ({str(error).splitlines()[0]})"
            ) from None
        except RuntimeError as error:  # another version of Ray or Python
            said = " ".join(str(error).split())
            raise ValueError(f"cannot join the Ray cluster at {quoted(self._options.address)}: {said}") from None

    def _place(self, tensor: int, count: int) -> None:
        """Reserves room for all workers, and starts an actor in each place."""
        bundle = self._bundle()
        chosen = strategies([node["Resources"] for node in self._alive()], bundle, tensor, count // tensor)
        if spread := chosen.count("PACK"):
            logger.warning("no Ray node has room for all %d workers of %d tensor groups", tensor, spread)
        latest = time.monotonic() + self._options.wait_seconds
        for strategy in chosen:
            group = self._ray.util.placement_group([bundle] * tensor, strategy)
            self._groups.append(group)
            if not group.wait(max(0.1, latest - time.monotonic())):
                free = _listed(self._ray.available_resources())
                raise ValueError(
                    f"the Ray cluster did not free {tensor} times {_listed(bundle)} within "
                    f"{self._options.wait_seconds:g} seconds: others use it; free are {free}"
                )
            self._actors += [self._actor(group, place, bundle) for place in range(tensor)]

    def _bundle(self) -> dict[str, float]:
        gpus = self._options.gpus
        if gpus is None:
            gpus = 1.0 if self._ray.cluster_resources().get("GPU", 0) else 0.0
        bundle = {name: amount for name, amount in (("CPU", self._options.cpus), ("GPU", gpus)) if amount}
        if not bundle:
            raise ValueError(
                "plugin.ray.cpus and plugin.ray.gpus are both 0: a worker must reserve some of one of them"
            )
        return bundle

    def _actor(self, group: Any, place: int, bundle: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from .ray_actor import RayWorker

        strategy = PlacementGroupSchedulingStrategy(group, place, placement_group_capture_child_tasks=False)
        # a worker finds its device by number among all of its machine, as the others do
        environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        kind = self._ray.remote(RayWorker)
        wanted = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        return kind.options(**wanted, scheduling_strategy=strategy, runtime_env=environment).remote()

    def _described(self) -> list[dict[str, Any]]:
        """What each actor says of itself; raises `ValueError` where one does not start, or has other versions."""
        asked = [actor.describe.remote() for actor in self._actors]
        try:
            found: list[dict[str, Any]] = self._ray.get(asked, timeout=START_SECONDS)
        except Exception as error:
            raise ValueError(f"a worker's actor does not start on its Ray node: {_last_line(error)}") from None
        for rank, one in enumerate(found):
            for name, mine in versions().items():
                if (theirs := one["versions"].get(name)) != mine:
                    raise ValueError(
                        f"Ray node {one['address']}, which has worker {rank}, has {name} {theirs}, and the engine's "
                        f"machine has {mine}; all need the same"
                    )
        return found

    def _alive(self) -> Sequence[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _leave(self) -> None:
        """Gives everything back to the cluster. May be called twice."""
        if self._listener is not None:
            self._listener.close()
        actors, self._actors = self._actors, []
        groups, self._groups = self._groups, []
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.get([actor.stop.remote() for actor in actors], timeout=10)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        for group in groups:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(group)
        self._store = None


def _ray() -> Any:
    """The library; raises `ValueError` where it is not installed."""
    try:
        import ray
        import ray.util
    except ImportError:
        raise ValueError("Ray is not installed: pip install 'frame-llm[ray]'") from None
    return ray


def _listed(resources: dict[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
