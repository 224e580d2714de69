"""Host memory that mirrors a worker's KV cache block by block, for devices whose memory NIXL cannot reach.

A block has the same number in both. Copies run beside the steps. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from frame.interfaces import CacheView, Mark, SideQueue

from ..blocks.host_slab import check_room


class Mirror:
    """See the module. `pinned(n)` gives n bytes of host memory, uint8 [n].

    Raises `ValueError`, one sentence, where this machine has too little memory.
    """

    def __init__(self, caches: Mapping[str, CacheView], pinned: Callable[[int], Tensor], queue: SideQueue) -> None:
        self._queue = queue
        storages = {one.bytes.untyped_storage().data_ptr(): one.bytes.untyped_storage() for one in caches.values()}
        check_room(sum(storage.nbytes() for storage in storages.values()), "a smaller KV cache needs less")
        hosts = {address: pinned(storage.nbytes()) for address, storage in storages.items()}
        self._pairs = list[tuple[int, Tensor, Tensor]]()  # group, device, host
        #: the host memory of each layer, in rows as those of its cache
        self.layers: dict[str, Tensor] = {}
        for name, view in caches.items():
            device = view.bytes
            host = hosts[device.untyped_storage().data_ptr()]
            self.layers[name] = _alike(host, device)
            # whole rows lie in one piece, and only so copies from and to the device go on beside other work
            whole = _whole_rows(device)
            self._pairs.append((view.group, whole, _alike(host, whole)))

    def fetch(self, blocks: Sequence[Sequence[int]]) -> Mark:
        """Copies blocks, by KV group, from the device once all that was launched so far is done."""
        return self._copy(blocks, lambda device, host: host.copy_(device, non_blocking=True))

    def put(self, blocks: Sequence[Sequence[int]]) -> Mark:
        """Copies blocks, by KV group, to the device."""
        return self._copy(blocks, lambda device, host: device.copy_(host, non_blocking=True))

    def _copy(self, blocks: Sequence[Sequence[int]], copy: Callable[[Tensor, Tensor], object]) -> Mark:
        runs = [list(_runs(sorted({block for block in some if block}))) for some in blocks]

        def work() -> None:
            with torch.inference_mode():
                for group, device, host in self._pairs:
                    for first, stop in runs[group]:
                        copy(device[first:stop], host[first:stop])

        self._queue.run(work)
        return self._queue.mark()


def _whole_rows(cache: Tensor) -> Tensor:
    """The blocks of a layer with what lies behind each until the next one, where that is memory of the cache."""
    count, width = len(cache), cache.stride(0)
    fits = cache.storage_offset() + count * width <= cache.untyped_storage().nbytes()
    return torch.as_strided(cache, (count, width), (width, 1)) if fits else cache


def _alike(host: Tensor, device: Tensor) -> Tensor:
    return torch.as_strided(host, device.shape, device.stride(), device.storage_offset())


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Numbers in order as runs (first, behind the last)."""
    start = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield blocks[start], blocks[place - 1] + 1
            start = place
