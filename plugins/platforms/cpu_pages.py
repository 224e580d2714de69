"""Large pages for weights, of which a processor that reads them in their order looks up 512 times fewer.

A thread of its own has the kernel put them there, a second or more for each GB, while the engine starts and serves.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: The bytes of a large page, and those of the smallest tensor that is worth the call.
PAGE = 2 << 20
LEAST = 2 * PAGE
#: As Linux numbers them: the kernel may use large pages there; it shall put what lies there into such now (Linux 6.1).
_MAY, _NOW = 14, 25


Memory = tuple[int, int]


def large_pages_later(tensor: Tensor) -> None:
    """Has the memory of a tensor, packed or not, put into large pages some time later, if it is large.

    It stays where it is, and may be freed before.
    """
    memory = _memory(tensor)
    if memory[1] >= LEAST:
        _later.put(memory)


def use_large_pages(memory: Memory) -> bool:
    """Asks for large pages for (address, bytes), and says whether it got them.

    Systems that have none, or do not give any, refuse, which costs speed and nothing else.
    """
    address, size = memory
    first = -(-address // PAGE) * PAGE
    whole = (address + size) // PAGE * PAGE - first
    advise = _madvise()
    if whole <= 0 or advise is None:
        return False
    return bool(advise(first, whole, _MAY) == 0 and advise(first, whole, _NOW) == 0)


def _memory(tensor: Tensor) -> Memory:
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr.default(tensor), torch.ops.mkldnn._nbytes(tensor)
    return tensor.data_ptr(), tensor.numel() * tensor.itemsize


class _Later:
    """Puts memories into large pages, one after the other, in a thread that ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[Memory] = []
        self._thread: threading.Thread | None = None

    def put(self, memory: Memory) -> None:
        with self._lock:
            self._left.append(memory)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="frame-pages", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until all that was put is done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._thread = None
                    return
                memory = self._left.pop(0)
            use_large_pages(memory)


_later = _Later()


@cache
def _madvise() -> Any:
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
