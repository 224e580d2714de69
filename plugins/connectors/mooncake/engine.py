"""Mooncake's transfer engine: writes from a worker's memory to another's. Only this file imports mooncake."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from ..blocks.host_arena import HostArena
from ..blocks.wire import PeerError
from ..nixl.wire import Channel
from ..push.carrier import Carrier, Staged
from ..push.wire import Part, Ready

logger = logging.getLogger("frame.connectors.mooncake")


class MooncakeCarrier(Carrier):
    """See the module. Senders may write to `arenas`, and what is sent lies there; `session` is this engine's name.

    Raises `ValueError` when Mooncake is missing or does not start.
    """

    def __init__(self, arenas: Sequence[HostArena], host: str, protocol: str, device: str) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:  # of the package, or of libibverbs, which it needs for TCP too
            raise ValueError(
                f"the mooncake connector needs Mooncake ({error}): pip install 'frame-llm[mooncake]', and the library "
                "libibverbs.so.1 of the distribution"
            ) from None
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ValueError(f"the mooncake connector cannot start Mooncake on {host} with {protocol}")
        self._registered: list[int] = []
        for arena in arenas:
            if self._engine.register_memory(arena.address, arena.num_bytes) != 0:
                raise ValueError(f"the mooncake connector cannot register {arena.num_bytes} bytes with Mooncake")
            self._registered.append(arena.address)
        self.session = f"{_bracketed(host)}:{self._engine.get_rpc_port()}"
        logger.warning(
            "Mooncake listens on all addresses of this machine and asks nobody for a secret; it is %s here",
            self.session,
        )

    def send(
        self, connection: socket.socket, channel: Channel, part: Part, staged: Staged, ready: Ready, seconds: float
    ) -> None:
        del connection
        if part.layer >= len(ready.addresses):
            raise PeerError("it names no memory for a layer")
        source, size = staged.memory.data_ptr(), staged.memory.numel()
        target = ready.addresses[part.layer] + staged.start * staged.memory.shape[1]
        if self._engine.batch_transfer_sync_write(ready.session, [source], [target], [size]) != 0:
            raise PeerError("Mooncake could not write there")
        channel.send(part, seconds)

    def close(self) -> None:
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered = []
        self._engine = None  # with which it stops listening


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
