"""What exchanges of other libraries share: why one cannot serve, and a communicator as mpi4py's to connect by."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from frame.interfaces import ExchangeSpec, ProcessGroup


def against_library(spec: ExchangeSpec, package: str, dtypes: Sequence[torch.dtype]) -> list[str]:
    """The reasons why a library for CUDA devices, which moves `dtypes`, cannot serve; empty where it can."""
    reasons = []
    if find_spec(package) is None:
        reasons.append(f"the package {package} is not installed")
    if spec.device_type != "cuda":
        reasons.append(f"it needs CUDA devices, not {spec.device_type!r}")
    if spec.dtype not in dtypes:
        reasons.append(f"it moves {' and '.join(str(one).removeprefix('torch.') for one in dtypes)}, not {spec.dtype}")
    return reasons


class HostComm:
    """The calls that libraries make, for what msgpack can hold: numbers, bytes, text, None, and lists of them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        """The number of this rank."""
        return self._group.rank

    def Get_size(self) -> int:
        """Ranks of the group."""
        return self._group.size

    def Split(self, color: int, key: int) -> HostComm:
        """The ranks of one color, which is all of them."""
        del color, key
        return self

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value; bytes come as `bytearray`, since bindings ask for that, and tuples as lists."""
        found = [msgspec.msgpack.decode(one) for one in self._group.host.gather(msgspec.msgpack.encode(value))]
        return [bytearray(one) if isinstance(one, bytes) else one for one in found]

    def bcast(self, value: Any, root: int) -> Any:
        """The value of rank `root`."""
        return self.allgather(value if self._group.rank == root else None)[root]

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._group.host.barrier()

    Barrier = barrier
