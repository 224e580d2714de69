"""Memory of a device that outlives the process that took it, as long as another one has its descriptors open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class HeldPiece(NamedTuple):
    """An open file that keeps `num_bytes` of memory, in the process that has it open and in those that map it."""

    descriptor: int
    num_bytes: int


class HeldMemory(ABC):
    """Memory that is taken part by part, and that open files keep. Made by `Platform.held_memory`, for one worker.

    What was made of the pieces of another process is that memory: the same calls of `take` give the same parts, with
    what was written to them; only beyond them memory is new.
    """

    #: where each part begins, in bytes: a multiple of it
    ALIGNMENT = 512

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor:
        """Returns the next part, uint8 [num_bytes] on the device; what is in it is undefined where the memory is new.

        Raises `torch.OutOfMemoryError` where there is no more.
        """

    @abstractmethod
    def pieces(self) -> list[HeldPiece]:
        """Returns the files of all that was taken, in order. They are this object's, until `release`.

        A process that gets them over a Unix socket needs no device to keep the memory.
        """

    @abstractmethod
    def release(self) -> None:
        """Closes the files here: the memory stays as long as it is mapped here or kept elsewhere. May be called twice.

        `take` and `pieces` are not called afterwards.
        """
