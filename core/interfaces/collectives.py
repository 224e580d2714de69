"""Groups of workers and their collectives; `SingleGroup` is the null object for one worker.

Within a group ranks are counted from 0, whatever they are in the mesh. Knows no layer and no library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: Seconds that a rank waits for the others in calls that no step makes.
GATHER_SECONDS = 300.0


class NormLayer(Protocol):
    """An RMS norm as a layer: `given` is (weight [H], eps, offset)."""

    @property
    def given(self) -> tuple[Tensor, float, float]: ...

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""


class HostGroup(ABC):
    """The same ranks exchanging bytes over the host; never touches the device."""

    @abstractmethod
    def gather(self, data: bytes, timeout_seconds: float = GATHER_SECONDS) -> list[bytes]:
        """Every rank's `data`, in order of rank, on every rank; raises `TimeoutError` when some do not come."""

    def barrier(self, timeout_seconds: float = GATHER_SECONDS) -> None:
        """Returns once every rank has called it; raises as `gather` does."""
        self.gather(b"", timeout_seconds)


class SingleHost(HostGroup):
    """One rank."""

    def gather(self, data: bytes, timeout_seconds: float = GATHER_SECONDS) -> list[bytes]:
        del timeout_seconds
        return [data]


class ProcessGroup(ABC):
    """Collectives over ranks 0 .. size-1 of this group. Every rank must make the same calls in the same order.

    All ranks get equal bits from `all_reduce`. `name` is unique in a worker: compiled code names a group by it.
    """

    rank: int = 0
    size: int = 1
    name: str = ""
    #: whether results have meaningless values now, as in a rehearsal, so that no size may be read from them
    is_silent: bool = False
    host: HostGroup

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; `tensor` is left unchanged."""

    def parts_of(self, num_rows: int, row_bytes: int, inner: int = 0) -> list[slice]:
        """The rows of the parts in which a sum is begun while the rest is computed; empty where that would not pay.

        `inner` says how many products each value is a sum of, by which the time to compute a part can be told.
        """
        del num_rows, row_bytes, inner
        return []

    def begin_all_reduce(self, tensor: Tensor, rows: slice) -> None:
        """Begins to sum `tensor[rows]` over ranks, in place, beside what the caller launches next.

        When all `parts_of` its rows were begun, `all_reduce_normed` or `all_reduce` must be called with the tensor, and
        completes them in place.
        """
        raise NotImplementedError(f"{type(self).__name__} begins no sums of {rows} of {tuple(tensor.shape)}")

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """The ranks' tensors concatenated along `dim`; `sizes` are each rank's sizes there, where they differ."""

    def join_best(self, scores: Tensor, token_ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """`Ops.join_parts` of what `Ops.best_of_part` gave each rank, without gathering it before, each [N].

        None where the group cannot, which is so on all ranks: the caller then gathers and joins.
        """
        del scores, token_ids, logits
        return None

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """The sum over ranks, of which this rank gets its part along `dim`; `sizes` as for `all_gather`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`source`'s tensor on every rank, in place."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Sends `send_sizes[r]` rows of `tensor` to each rank r; returns the rows that came, in order of rank."""

    @abstractmethod
    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        """Sends contiguous tensors to one rank, in the order of the mapping; returns before they have arrived.

        The tensors may be changed at once. Where they are large, it may wait for the rank to receive what was sent two
        calls before; small ones, of less than 1 MiB together, never make it wait.
        """

    @abstractmethod
    def receive(self, into: Mapping[str, Tensor], source: int) -> None:
        """Fills the contiguous tensors with what `source` sends, which has the same shapes and types."""

    def all_reduce_normed(self, x: Tensor, residual: Tensor, norm: NormLayer) -> tuple[Tensor, Tensor]:
        """(norm(total), total), where total is the sum of x over ranks plus residual, which is the same on all.

        x [T, H] may be overwritten.
        """
        return norm(self.all_reduce(x), residual)


class SingleGroup(ProcessGroup):
    """One rank: every collective is the identity."""

    host = SingleHost()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        del dim, sizes
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        del dim, sizes
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        del source
        return tensor

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        del send_sizes, receive_sizes
        return tensor

    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        raise ValueError(f"there is no rank {to} in a group of one")

    def receive(self, into: Mapping[str, Tensor], source: int) -> None:
        raise ValueError(f"there is no rank {source} in a group of one")


class UnconnectedGroup(ProcessGroup):
    """Has a rank and a size, but no peers: its results have the right shapes and meaningless values."""

    is_silent = True
    host = SingleHost()

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.shape)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = sum(sizes) if sizes is not None else shape[dim] * self.size
        return tensor.new_empty(shape)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = sizes[self.rank] if sizes is not None else shape[dim] // self.size
        return tensor.new_empty(shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        del source
        return tensor

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        del send_sizes
        return tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))

    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        return

    def receive(self, into: Mapping[str, Tensor], source: int) -> None:
        return


class Collectives(ABC):
    """Makes the process groups of one worker, and ends them."""

    #: collectives that this worker has called, by which a worker that lags behind the others is found; 0 where unknown
    num_calls: int = 0
    #: of these, and of what lockstep asks, those over groups of data ranks, which all engines that share experts make
    num_exchanges: int = 0

    def count(self, group: str) -> None:
        """A collective of `group` was called, or is about to be."""
        self.num_calls += 1
        self.num_exchanges += group in ("data", "expert")

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        """A group of mesh ranks, this worker among them, with a communicator of its own; all its ranks must call it."""

    @abstractmethod
    def close(self) -> None:
        """Ends every group without waiting for other ranks. May be called twice."""


class UnconnectedCollectives(Collectives):
    """Groups of the right sizes without the other workers, for the worker of mesh rank `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        return UnconnectedGroup(ranks.index(self._rank), len(ranks))

    def close(self) -> None:
        return


class NoCollectives(Collectives):
    """For a single worker."""

    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        if len(ranks) > 1:
            raise ValueError(f"group {name!r} has {len(ranks)} ranks, and a single worker has no collectives")
        return SingleGroup()

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Groups:
    """The process groups of one worker, over which layers, requests and steps are divided; see `Mesh`.

    `drawn` has the ranks of `pipeline`: on it the tokens that the last stage has drawn go back to the first, beside
    what stages hand on.
    """

    tensor: ProcessGroup
    pipeline: ProcessGroup
    expert: ProcessGroup
    data: ProcessGroup
    decode_context: ProcessGroup
    prefill_context: ProcessGroup
    drawn: ProcessGroup

    @classmethod
    def single(cls) -> Groups:
        """The groups of an engine with one worker, which divides nothing."""
        return cls.of()

    @classmethod
    def of(cls, **groups: ProcessGroup) -> Groups:
        """Groups by axis, or by name; the others have one rank."""
        axes = cls.__dataclass_fields__
        return cls(**{axis: groups.get(axis) or SingleGroup() for axis in axes})
