"""Several ranks of one process group as threads of this process."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frame.core.parallel.group import ProcessGroup


class ThreadGroup(ProcessGroup):
    """A rank whose peers are other threads; they meet at a barrier and read each other's tensors."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait()
        tensors = list(self._board)
        self._barrier.wait()
        return tensors

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self._exchange(tensor)[source])

    def barrier(self) -> None:
        self._barrier.wait()


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`work(group)` on every rank at once; returns what each returned, raises what one of them raised."""
    barrier, board = threading.Barrier(size, timeout=30), [None] * size
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, barrier, board))
        except BaseException as error:  # handed to the caller below
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
