"""What exchanges of other libraries share: why one cannot serve, and how they connect.

Libraries connect by a communicator as mpi4py's, or by a process group of torch that they find by its name; both
exchange bytes over the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import msgspec
import torch
from torch import Tensor

from frame.interfaces import ExchangeSpec, ProcessGroup

#: torch exports little of what makes groups without its global one.
_distributed: Any = torch.distributed
_registry: Any = torch._C._distributed_c10d


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


@contextmanager
def named_group(group: ProcessGroup) -> Iterator[str]:
    """The name by which code of torch finds a process group of these ranks within the context.

    Of collectives it has `alltoall_base` of host tensors alone.
    """
    made = _TorchHost(group)
    name = f"frame-{group.name}-{id(made)}"
    _registry._register_process_group(name, made)
    try:
        yield name
    finally:
        _registry._unregister_process_group(name)


class _TorchHost(_distributed.ProcessGroup):
    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self._group = group

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], given_sizes: Sequence[int], options: Any
    ) -> Any:
        """Rank r gets the r-th of equal parts of contiguous `given`; `output` has what all gave this rank."""
        del output_sizes, given_sizes, options
        found = self._group.host.gather(given.numpy().tobytes())
        parts = [torch.frombuffer(bytearray(one), dtype=given.dtype).view(self._group.size, -1) for one in found]
        output.copy_(torch.stack([part[self._group.rank] for part in parts]).view(output.shape))
        return _Done()


class _Done(_distributed.Work):
    def wait(self, timeout: Any = None) -> bool:
        """What it stands for is done."""
        del timeout
        return True
