"""Host memory in rows of equal size, taken in pieces, as pinned memory rounds up to powers of two. Knows no block."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from frame.links.host_memory import host_memory as _memory

#: Most bytes of a piece, unless one row needs more.
PIECE_BYTES = 256 << 20


class HostSlab:
    """As many rows of `row_bytes` as `num_bytes` hold. `pinned(n)` gives n bytes of memory, uint8 [n]."""

    def __init__(self, row_bytes: int, num_bytes: int, pinned: Callable[[int], Tensor]) -> None:
        self._pieces: list[Tensor] = []  # uint8 [rows, row_bytes]
        self._starts: list[int] = []  # the number of each piece's first row
        self.num_rows = 0
        self.row_bytes = row_bytes
        most = max(PIECE_BYTES, 1 << (row_bytes - 1).bit_length())
        while num_bytes >= row_bytes:
            size = min(most, 1 << (num_bytes.bit_length() - 1))
            count = size // row_bytes
            if count == 0:
                break
            self._starts.append(self.num_rows)
            self._pieces.append(pinned(size)[: count * row_bytes].view(count, row_bytes))
            self.num_rows += count
            num_bytes -= size

    #: which file the rows are in; none
    identity: bytes = b""

    def row(self, row: int) -> np.ndarray:
        """The bytes of a row, uint8 [row_bytes]."""
        piece = bisect.bisect_right(self._starts, row) - 1
        return self._pieces[piece][row - self._starts[piece]].numpy()

    def runs(self, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """`rows` as runs that lie side by side: (the place of the first in `rows`, uint8 [n, row_bytes])."""
        place = 0
        while place < len(rows):
            piece = bisect.bisect_right(self._starts, rows[place]) - 1
            first, size = rows[place] - self._starts[piece], len(self._pieces[piece])
            count = 1
            while place + count < len(rows) and rows[place + count] == rows[place] + count and first + count < size:
                count += 1
            yield place, self._pieces[piece][first : first + count]
            place += count

    def sign(self, row: int, key: bytes, generation: int, part: int, row_sum: int | None = None) -> None:
        """Says whose the row is, for those that read it later; nobody else reads this memory."""

    def sound(self, row: int, key: bytes, generation: int, part: int) -> bool:
        """Whether the row holds what it is to hold."""
        del row, key, generation, part
        return True

    def take(self, name: str, slot: int, generation: int, key: bytes, row: int, parts: int) -> bool:
        """Copies a block of another engine's; there is none."""
        del name, slot, generation, key, row, parts
        return False

    def close(self) -> None:
        """Lets go of the memory."""


def check_size(num_bytes: int, advice: str = "lower kv_offloading_size") -> None:
    """Raises `ValueError`, one sentence that ends with `advice`, where this machine has less memory than that."""
    total, _ = _memory()
    if num_bytes > total:
        raise ValueError(
            f"{gib(num_bytes)} of blocks are to be kept, and this machine has {gib(total)} of memory: {advice}"
        )


def check_room(num_bytes: int, advice: str = "lower kv_offloading_size") -> None:
    """Raises `ValueError`, as `check_size`, where a worker cannot have so much of this machine's memory now."""
    check_size(num_bytes, advice)
    _, available = _memory()
    if num_bytes > available:
        raise ValueError(
            f"this worker is to keep {gib(num_bytes)} of blocks, and {gib(available)} of this machine's memory are "
            f"available: {advice}, or end what else uses it"
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
