"""The nodes executor: an engine on one machine with workers on several, which are started by `frame serve` on each.

The other nodes connect to the engine, say who they are, and are told which workers to run. Each worker then has a
connection of its own, and ends with it. When the engine is replaced, the nodes connect to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from typing import Any

from msgspec import structs

from frame.interfaces import ExecutorSetup, Mesh, Nodes, Placement, SpawnedWorker
from frame.links.greeting import Listener, RefusedError, send_bytes, send_json
from frame.links.versions import differences, versions

from .engine_exchange import serve_store
from .node import run_node
from .nodes_options import NodesOptions
from .process import ProcessExecutor, against_shared_experts

logger = logging.getLogger("frame.executors")

#: Seconds for a node that has been told to connect its workers.
CONNECT_SECONDS = 60.0


class NodesExecutor(ProcessExecutor):
    """Makes the first workers here, and has each other node make as many."""

    options: NodesOptions

    def __init__(self, setup: ExecutorSetup, options: NodesOptions | None = None) -> None:
        self._nodes, self._options = setup.nodes, options or NodesOptions()
        if self._nodes.rank:
            raise ValueError(
                f"the engine is on node 0, and node_rank is {self._nodes.rank}: start this machine with `frame serve`"
            )
        self._each = len(setup.placements) // self._nodes.count
        self._token = secrets.token_hex(16)
        self._controls: dict[int, socket.socket] = {}
        self._links: dict[int, tuple[socket.socket, str]] = {}  # to workers of other nodes, by rank
        self._store: Any = None
        self._listener: Listener | None = None
        try:
            if self._nodes.count > 1:
                self._listener = Listener(self._nodes.address, self._nodes.port, self._options.secret())
                self._store = serve_store(self._nodes.address, 0)
                self._gather(self._listener)
            super().__init__(setup, self._options)
        except BaseException:
            self._leave(ends=False)
            raise
        self._stop_listening()  # until the next engine nobody is expected

    def make(self, placement: Placement) -> SpawnedWorker:
        if self._nodes.count == 1:
            return super().make(placement)
        node = placement.rank // self._each
        placement = structs.replace(
            placement,
            local_rank=placement.rank % self._each,
            rendezvous=f"store://{_authority(self._nodes.address, self._store.port)}/{self._token}",
            address=self._nodes.address,
        )
        if node == 0:
            self._spawned.append(self.workers.spawn(placement))
        else:
            connection, address = self._links.pop(placement.rank)
            send_bytes(connection, self.workers.recipe(structs.replace(placement, address=address)))
            self._spawned.append(self.workers.connected(connection, f"node {node} ({address})"))
        return self._spawned[-1]

    def close(self) -> None:
        super().close()
        self._leave(ends=not self.is_broken)

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        return against_shared_experts(mesh)

    @classmethod
    def serve_node(cls, nodes: Nodes, options: Any = None) -> int:
        options = options or NodesOptions()
        return run_node(nodes, described(nodes), options, options.secret())

    def _gather(self, listener: Listener) -> None:
        """Waits for all nodes, then for the connections of all their workers."""
        logger.info("waiting for %d other nodes at %s:%d", self._nodes.count - 1, self._nodes.address, listener.port)
        if self._options.secret_file is None:
            logger.warning("whoever reaches this address may join as a node: --plugin.nodes.secret-file prevents that")
        latest = time.monotonic() + self._options.wait_seconds
        while len(self._controls) < self._nodes.count - 1:
            found = listener.next(latest - time.monotonic())
            if found is None:
                late = sorted({*range(1, self._nodes.count)} - self._controls.keys())
                raise ValueError(
                    f"node {', '.join(map(str, late))} of {self._nodes.count} did not come to "
                    f"{self._nodes.address}:{listener.port} within {self._options.wait_seconds:g} seconds; "
                    f"start it with --node-rank {late[0]}"
                )
            self._admit(*found)
        for node, control in self._controls.items():
            ranks = range(node * self._each, (node + 1) * self._each)
            send_json(control, {"ranks": list(ranks), "token": self._token})
        latest = time.monotonic() + CONNECT_SECONDS
        while len(self._links) < (self._nodes.count - 1) * self._each:
            found = listener.next(latest - time.monotonic())
            if found is None:
                late = sorted({*range(self._each, self._nodes.count * self._each)} - self._links.keys())
                raise ValueError(f"worker {late[0]} of node {late[0] // self._each} did not connect")
            self._link(*found)

    def _admit(self, connection: socket.socket, said: dict[str, Any]) -> None:
        """Takes in a node; one that does not fit is told why, and so is the user."""
        try:
            node = said.get("node")
            if not isinstance(node, int) or not 1 <= node < self._nodes.count:
                raise RefusedError(f"node_rank must be 1 to {self._nodes.count - 1}, not {node!r}")
            if node in self._controls and not _has_ended(self._controls[node]):
                raise RefusedError(f"there is a node {node} already")
            if wrong := differences(described(self._nodes), said, f"node {node}", "node 0", "nodes"):
                raise RefusedError(wrong)
        except RefusedError as error:
            where = connection.getpeername()[0]
            logger.error("a node at %s is refused: %s", where, error)
            with contextlib.suppress(OSError):
                send_json(connection, {"refused": str(error)})
            connection.close()
            return
        self._controls[node] = connection
        logger.info("node %d is there, from %s", node, connection.getpeername()[0])

    def _link(self, connection: socket.socket, said: dict[str, Any]) -> None:
        rank, token = said.get("worker"), said.get("token")
        expected = range(self._each, self._nodes.count * self._each)
        if token != self._token or not isinstance(rank, int) or rank not in expected or rank in self._links:
            connection.close()  # of an engine before
            return
        self._links[rank] = connection, connection.getpeername()[0]

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _leave(self, *, ends: bool) -> None:
        self._stop_listening()
        for control in self._controls.values():
            if ends:
                with contextlib.suppress(OSError):
                    send_json(control, {"end": True})
            control.close()
        for connection, _ in self._links.values():
            connection.close()
        self._controls.clear()
        self._links.clear()
        self._store = None


def described(nodes: Nodes) -> dict[str, Any]:
    """What a node says of itself to node 0, and node 0 of itself."""
    return {"node": nodes.rank, "nodes": nodes.count, "versions": versions(), "settings": nodes.settings}


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it says nothing."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
