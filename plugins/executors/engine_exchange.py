"""Bytes that the engines of several processes give one another in each step, over gloo. Knows no step."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from frame.interfaces import Placement

#: torch exports little of what makes groups without its global one.
_distributed: Any = torch.distributed
#: Seconds in which all engines must have come, to the start and to each step.
EXCHANGE_SECONDS = 600


class EngineExchange:
    """The engines of all ranks of `placement.mesh`. Raises `TimeoutError` when some do not come, or end."""

    def __init__(self, placement: Placement) -> None:
        self._size = placement.mesh.size
        options = _distributed.ProcessGroupGloo._Options()
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=placement.address)]
        options._timeout = timedelta(seconds=EXCHANGE_SECONDS)
        store = _distributed.PrefixStore("engines", join_store(placement.rendezvous))
        try:
            self._group = _distributed.ProcessGroupGloo(store, placement.rank, self._size, options)
        except RuntimeError as error:
            raise TimeoutError(f"the other engines did not come: {_first_line(error)}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in order of rank, on every rank."""
        sizes = [int(size) for size in self._all(torch.tensor([len(data)]))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        return [part[:size].numpy().tobytes() for part, size in zip(self._all(padded), sizes, strict=True)]

    def close(self) -> None:
        """Ends the connections without waiting for other engines. May be called twice."""
        with contextlib.suppress(Exception):  # peers may be gone
            self._group.abort()

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        outs = [torch.empty_like(tensor) for _ in range(self._size)]
        try:
            self._group.allgather([outs], [tensor]).wait()
        except RuntimeError as error:
            raise TimeoutError(_first_line(error)) from error
        return outs


def join_store(rendezvous: str) -> Any:
    """The store at "store://HOST:PORT/PREFIX", which another process serves."""
    where = urlsplit(rendezvous)
    try:
        store = _distributed.TCPStore(
            where.hostname, where.port, is_master=False, timeout=timedelta(seconds=EXCHANGE_SECONDS)
        )
    except RuntimeError as error:
        raise TimeoutError(f"nobody serves a store at {where.netloc}: {_first_line(error)}") from error
    return _distributed.PrefixStore(where.path.strip("/"), store)


def serve_store(host: str, port: int) -> Any:
    """A store that listens at that address alone, port 0 for any free one; it ends with what this returns."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {host}:{port} for the other processes: {error.strerror}") from None
    port = listener.getsockname()[1]
    return _distributed.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
