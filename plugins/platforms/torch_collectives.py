"""Collectives of torch's gloo and NCCL backends, made from a store and without torch's global process group.

Groups may overlap, several engines may live in one process, and ranks may be threads of it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from frame.interfaces import (
    GATHER_SECONDS,
    Collectives,
    HostGroup,
    NormLayer,
    Placement,
    ProcessGroup,
    UnconnectedGroup,
)

#: torch exports little of what makes groups without its global one.
distributed: Any = torch.distributed
_options: Any = torch._C._distributed_c10d

#: Bytes that workers tell each other in one exchange; longer messages take two.
SMALL_BYTES = 56
#: Seconds in which all workers must have come to the rendezvous.
RENDEZVOUS_SECONDS = 600.0
#: Seconds after which a collective of a step fails where the library notices it.
STEP_SECONDS = 1800.0
#: Of what `send` has on its way: so many calls may be larger than so many bytes together, as each keeps a copy.
MOST_SENDS, MOST_SENT_BYTES = 2, 1 << 20


class TorchCollectives(Collectives):
    """Process groups over the store at `placement.rendezvous`.

    `make` makes what moves tensors; `gloo_group` for host memory. While `is_silent`, collectives of tensors do nothing
    and return tensors of the right shapes: for steps that are only rehearsed, which other workers may not take.
    Raises `ValueError` for a rendezvous of another kind,
    `TimeoutError` when workers do not come.
    """

    def __init__(self, placement: Placement, make: Callable[[Any, int, int, str], Any] | None = None) -> None:
        self._placement = placement
        self._address = placement.address or "127.0.0.1"
        self._make = make
        self._made: list[Any] = []
        self._groups: list[TorchGroup | GlooHost] = []
        self.is_silent = False
        self._store = open_store(placement)

    def group(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        rank, size = ranks.index(self._placement.rank), len(ranks)
        host = self.host(name, ranks)
        device = host.group
        if self._make is not None:
            with _explained(f"group {name!r} of ranks {', '.join(map(str, ranks))}"):
                device = self._make(self._store_of(name, "device", ranks), rank, size, self._address)
            self._made.append(device)
        group = TorchGroup(name, rank, size, device, host, self)
        self._groups.append(group)
        return group

    def host(self, name: str, ranks: Sequence[int]) -> GlooHost:
        """A group that exchanges bytes only."""
        rank, size = ranks.index(self._placement.rank), len(ranks)
        with _explained(f"group {name!r} of ranks {', '.join(map(str, ranks))}"):
            group = gloo_group(self._store_of(name, "host", ranks), rank, size, self._address)
        self._made.append(group)
        host = GlooHost(name, size, group)
        self._groups.append(host)
        return host

    def _store_of(self, name: str, kind: str, ranks: Sequence[int]) -> Any:
        return distributed.PrefixStore(f"{name}:{kind}:{'-'.join(map(str, ranks))}", self._store)

    def close(self) -> None:
        while self._made:
            _abort(self._made.pop())
        # the last reference to the store ends it, which opens its file once more: that must still be the same one
        groups, self._groups, self._store = self._groups, [], None
        for one in groups:
            one.end()


def _abort(communicator: Any) -> None:
    with contextlib.suppress(Exception):  # peers may be gone
        communicator.abort()


def open_store(placement: Placement) -> Any:
    """The store through which workers find one another.

    At "tcp://HOST:PORT" the worker of rank 0 serves it, at "store://HOST:PORT/PREFIX" another process does, in which
    the keys of these workers begin with the prefix.
    """
    where, world = urlsplit(placement.rendezvous), placement.mesh.size
    seconds = timedelta(seconds=RENDEZVOUS_SECONDS)
    if where.scheme == "file" and where.path:
        store = distributed.FileStore(where.path, world)
        store.set_timeout(seconds)
        return store
    if where.scheme == "store" and where.hostname and where.port:
        with _explained(f"rendezvous {placement.rendezvous}"):
            served = distributed.TCPStore(where.hostname, where.port, is_master=False, timeout=seconds)
        return distributed.PrefixStore(where.path.strip("/"), served)
    if where.scheme == "tcp" and where.hostname and where.port:
        with _explained(f"rendezvous {placement.rendezvous}"):
            serves = placement.rank == 0
            listener = _listener(where.hostname, where.port) if serves else None
            return distributed.TCPStore(
                where.hostname,
                where.port,
                is_master=serves,
                timeout=seconds,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
    raise ValueError(
        f"rendezvous {placement.rendezvous!r} is none of file:///PATH, tcp://HOST:PORT, store://HOST:PORT/PREFIX"
    )


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens on that address alone; torch's own would take connections from everywhere."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {host}:{port} for the other workers: {error.strerror}") from None
    return listener


def gloo_group(store: Any, rank: int, size: int, address: str) -> Any:
    """A gloo communicator that others reach at `address`, a host name or address of this machine."""
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    return distributed.ProcessGroupGloo(store, rank, size, options)


def nccl_group(device: torch.device, store: Any, rank: int, size: int, address: str) -> Any:
    """An NCCL communicator of `device`, connected at once."""
    del address  # NCCL finds the machine's interfaces itself
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options.is_high_priority_stream = True  # sums that run beside products must not wait for them
    group = distributed.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def even_parts(num_rows: int, count: int) -> list[slice]:
    """`num_rows` in `count` parts whose sizes differ by one at most."""
    ends = [num_rows * part // count for part in range(count + 1)]
    return [slice(first, end) for first, end in pairwise(ends)]


class GlooHost(HostGroup):
    """Bytes over a gloo communicator."""

    def __init__(self, name: str, size: int, group: Any) -> None:
        self._name, self._size, self.group = name, size, group

    def end(self) -> None:
        """Lets go of the communicator, which was closed."""
        self.group = None

    def gather(self, data: bytes, timeout_seconds: float = GATHER_SECONDS) -> list[bytes]:
        heads = self._padded(len(data).to_bytes(8, "little") + data[:SMALL_BYTES], 8 + SMALL_BYTES, timeout_seconds)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        if max(sizes) <= SMALL_BYTES:  # one exchange, as for what is said in every step
            return [head[8 : 8 + size] for head, size in zip(heads, sizes, strict=True)]
        wholes = self._padded(data, max(sizes), timeout_seconds)
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def _padded(self, data: bytes, size: int, timeout_seconds: float) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        return [part.numpy().tobytes() for part in self._all(mine, timeout_seconds)]

    def _all(self, tensor: Tensor, timeout_seconds: float) -> list[Tensor]:
        options = _options.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_seconds)
        outs = [torch.empty_like(tensor) for _ in range(self._size)]
        with _explained(f"the {self._name} group of {self._size} workers"):
            self.group.allgather([outs], [tensor], options).wait()
        return outs


class GroupOwner(Protocol):
    """What a group asks those who made it: whether collectives do nothing now; and tells it of each that it calls."""

    is_silent: bool

    def count(self, group: str) -> None:
        """As `Collectives.count`."""


class TorchGroup(ProcessGroup):
    """A communicator of torch: gloo in host memory, NCCL on CUDA devices, whose calls enter the current stream."""

    def __init__(self, name: str, rank: int, size: int, communicator: Any, host: HostGroup, owner: GroupOwner) -> None:
        self.name, self.rank, self.size, self.host = name, rank, size, host
        self.communicator = communicator
        self._owner = owner
        self._silent = UnconnectedGroup(rank, size)
        self._begun: dict[int, list[Any]] = {}  # sums that are on their way, by the address of their tensor
        self._sent = deque[tuple[list[Any], list[Tensor]]]()  # what each call of `send` has on its way
        #: bytes of a part of a sum that is worth being begun before the rest is computed, 0 for none; the most parts
        self.overlap_bytes, self.overlap_parts = 0, 4

    def end(self) -> None:
        """Lets go of the communicator, which was closed, and of what it had on its way."""
        self.communicator = None
        self._begun.clear()
        self._sent.clear()

    @property
    def is_silent(self) -> bool:  # type: ignore[override]
        """Whether the collectives of this worker do nothing now."""
        return self._owner.is_silent

    def parts_of(self, num_rows: int, row_bytes: int, inner: int = 0) -> list[slice]:
        if not self.overlap_bytes or num_rows * row_bytes < 2 * self.overlap_bytes:
            return []
        return even_parts(num_rows, min(self.overlap_parts, num_rows * row_bytes // self.overlap_bytes))

    def begin_all_reduce(self, tensor: Tensor, rows: slice) -> None:
        if not self._owner.is_silent:
            work = self.communicator.allreduce([tensor[rows]])
            self._begun.setdefault(tensor.data_ptr(), []).append(work)

    def all_reduce_normed(self, x: Tensor, residual: Tensor, norm: NormLayer) -> tuple[Tensor, Tensor]:
        return norm(x if self._completes(x) else self.sum_in_place(x), residual)

    def _completes(self, tensor: Tensor) -> bool:
        """Ends a sum that was begun; returns whether there was one."""
        begun = self._begun.pop(tensor.data_ptr(), None)
        for work in begun or ():
            work.wait()
        return begun is not None

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        """As `all_reduce`, into `tensor` itself, which is contiguous."""
        if tensor.numel() and not self._owner.is_silent:
            self._owner.count(self.name)
            self.communicator.allreduce([tensor]).wait()
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._owner.is_silent:
            return self._silent.all_reduce(tensor)
        if self._completes(tensor):
            return tensor
        out = tensor.clone(memory_format=torch.contiguous_format)
        if out.numel():
            self._owner.count(self.name)
            self.communicator.allreduce([out]).wait()
        return out

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        if self._owner.is_silent:
            return self._silent.all_gather(tensor, dim, sizes)
        dim %= tensor.dim()
        if sizes is None or len(set(sizes)) == 1:
            out = tensor.new_empty((self.size, *tensor.shape))
            if out.numel():
                self._owner.count(self.name)
                self.communicator._allgather_base(out.view(-1), tensor.contiguous().view(-1)).wait()
            return out.movedim(0, dim).flatten(dim, dim + 1)
        moved = tensor.movedim(dim, 0)
        most = max(sizes)
        padded = moved.new_zeros((most, *moved.shape[1:]))
        padded[: len(moved)] = moved
        whole = self.all_gather(padded, 0).unflatten(0, (self.size, most))
        kept = [part[:size] for part, size in zip(whole, sizes, strict=True)]
        joined: Tensor = torch.cat(kept).movedim(0, dim).contiguous()
        return joined

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        if self._owner.is_silent:
            return self._silent.reduce_scatter(tensor, dim, sizes)
        dim %= tensor.dim()
        moved = tensor.movedim(dim, 0).contiguous()
        if sizes is not None and len(set(sizes)) > 1:
            mine: Tensor = self.all_reduce(moved).split(list(sizes))[self.rank]
            return mine.movedim(0, dim).contiguous()
        if moved.shape[0] % self.size:
            raise ValueError(f"{moved.shape[0]} rows cannot be scattered over {self.size} ranks without sizes")
        out = moved.new_empty((moved.shape[0] // self.size, *moved.shape[1:]))
        if out.numel():
            self._owner.count(self.name)
            self.communicator._reduce_scatter_base(out, moved).wait()
        scattered: Tensor = out.movedim(0, dim).contiguous()
        return scattered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if tensor.numel() and not self._owner.is_silent:
            self._owner.count(self.name)
            options = _options.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            self.communicator.broadcast([tensor], options).wait()
        return tensor

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        out = tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))
        if self._owner.is_silent:
            return out
        self._owner.count(self.name)
        self.communicator.alltoall_base(out, tensor.contiguous(), list(receive_sizes), list(send_sizes)).wait()
        return out

    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        copies = [tensor.clone() for tensor in tensors.values() if tensor.numel()]
        if self._owner.is_silent:
            return
        self._owner.count(self.name)
        self._sent.append(([self.communicator.send([copy], to, 0) for copy in copies], copies))
        while len(self._sent) > MOST_SENDS and self._sent_bytes() > MOST_SENT_BYTES:
            works, _ = self._sent.popleft()
            for work in works:
                work.wait()

    def _sent_bytes(self) -> int:
        return sum(copy.nbytes for _, copies in self._sent for copy in copies)

    def receive(self, into: Mapping[str, Tensor], source: int) -> None:
        if self._owner.is_silent:
            return
        self._owner.count(self.name)
        for tensor in into.values():
            if tensor.numel():
                self.communicator.recv([tensor], source, 0).wait()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns torch's errors about workers that did not come, or ended, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TimeoutError(f"{what}: the other workers did not come, or ended: {said}") from error
