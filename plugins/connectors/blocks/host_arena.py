"""Memory that is given away and taken back in parts of any size. Knows no block."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable

from torch import Tensor

#: Parts begin at multiples of so many bytes.
_ALIGNMENT = 256


class Arena:
    """The bytes of `memory`, uint8 [n], of the host or, where it is `on_device`, of a device. For any thread."""

    on_device = True

    def __init__(self, memory: Tensor) -> None:
        self.num_bytes = len(memory)
        self._memory = memory
        self._free = [(0, self.num_bytes)]  # (start, end) of the gaps, in order
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._memory.data_ptr()

    @property
    def used_bytes(self) -> int:
        """Bytes that are given away."""
        with self._lock:
            return self.num_bytes - sum(end - start for start, end in self._free)

    def take(self, num_bytes: int) -> Tensor | None:
        """A part uint8 [num_bytes], of unknown content; None where no gap is large enough."""
        size = _rounded(num_bytes)
        with self._lock:
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return self._memory[start : start + num_bytes]
        return None

    def give_back(self, part: Tensor) -> None:
        """Takes a part back, whose memory the caller uses no more."""
        start = int(part.storage_offset()) - int(self._memory.storage_offset())  # also of an empty part
        end = start + _rounded(part.numel())
        with self._lock:
            index = bisect.bisect_left(self._free, (start, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                start = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (start, end))


class HostArena(Arena):
    """As many bytes as the largest power of two in `num_bytes`. `pinned(n)` gives them, uint8 [n]."""

    on_device = False

    def __init__(self, num_bytes: int, pinned: Callable[[int], Tensor]) -> None:
        # pinned memory is given in powers of two, and more than was asked for must not be taken
        super().__init__(pinned(1 << (max(num_bytes, _ALIGNMENT).bit_length() - 1)))


def _rounded(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
