"""A group of ranks and its collectives. `SingleGroup` is the null object for one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class ProcessGroup(ABC):
    """Collectives over ranks 0 .. size-1 of this group. Every rank must make the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; `tensor` is left unchanged."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors concatenated along `dim`."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The sum over ranks, of which this rank gets its part along `dim`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`source`'s tensor on every rank, in place."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""


class SingleGroup(ProcessGroup):
    """One rank: every collective is the identity."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        del dim
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        del dim
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        del source
        return tensor

    def barrier(self) -> None:
        return
