"""A machine that runs workers of an engine on another one, from the first engine to the last."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from frame.interfaces import Nodes, WorkerProcess
from frame.links.greeting import RefusedError, connect, receive_bytes, receive_json

from .nodes_options import NodesOptions

logger = logging.getLogger("frame.executors")

#: Seconds between two attempts to reach node 0.
RETRY_SECONDS = 0.5


def run_node(nodes: Nodes, described: Mapping[str, Any], options: NodesOptions, key: bytes) -> int:
    """Serves one engine after the other on node 0, until one says that it was the last; returns the exit status.

    Raises `ValueError` when node 0 refuses this node, `TimeoutError` when it cannot be reached for too long.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the workers are ended, too
    while True:
        control = _reach(nodes, described, options, key)
        with control:
            if _serve(control, nodes, options, key):
                logger.info("the engine on node 0 has ended")
                return 0
        logger.warning("the engine on node 0 is gone; waiting for the next one")


def _reach(nodes: Nodes, described: Mapping[str, Any], options: NodesOptions, key: bytes) -> socket.socket:
    """A connection to node 0."""
    latest, said = time.monotonic() + options.wait_seconds, False
    while True:
        try:
            return connect(nodes.address, nodes.port, key, dict(described), own=options.address)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > latest:
            raise TimeoutError(
                f"node 0 at {nodes.address}:{nodes.port} was not there for {options.wait_seconds:g} seconds: {reason}"
            )
        if not said:
            logger.info("waiting for node 0 at %s:%d: %s", nodes.address, nodes.port, reason)
            said = True
        time.sleep(RETRY_SECONDS)


def _serve(control: socket.socket, nodes: Nodes, options: NodesOptions, key: bytes) -> bool:
    """Runs the workers that an engine asks for until it is gone; returns whether it said that it was the last."""
    workers = list[WorkerProcess]()
    try:
        asked = receive_json(control)
        if "refused" in asked:
            raise RefusedError(f"node 0 refuses this node: {asked['refused']}")
        for rank in asked.get("ranks", ()):
            said = {"worker": rank, "token": asked["token"]}
            with connect(nodes.address, nodes.port, key, said, own=options.address) as connection:
                workers.append(WorkerProcess(receive_bytes(connection), connection, nodes.model))
        logger.info("%d workers run for the engine on node 0", len(workers))
        select.select([control], [], [])
        return bool(receive_json(control).get("end"))
    except RefusedError:
        raise
    except (OSError, ValueError):
        return False
    finally:
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.close()
