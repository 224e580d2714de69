"""Which layers' weights are kept in host memory, by their sizes alone: for the worker, and for who predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GIB = 1 << 30


def is_kept(size: int, kept_bytes: int, number: int, count: int, budget_bytes: int) -> bool:
    """Whether layer `number` of `count`, from 1, is kept beside `kept_bytes` of those before it.

    After n layers at most n / `count` of the budget is used, so that those that are kept lie evenly among the others.
    """
    return size > 0 and kept_bytes + size <= budget_bytes * number // count


class KeptBytes(NamedTuple):
    """Bytes of weights that lie in host memory, and bytes of the device through which they pass."""

    host: int = 0
    ring: int = 0

    @property
    def saved(self) -> int:
        """Bytes that the device has to hold less."""
        return self.host - self.ring


#: Of an engine that keeps all weights on the device.
NOTHING_KEPT = KeptBytes()


def kept_bytes(sizes: Sequence[int], budget_bytes: int, num_places: int) -> KeptBytes:
    """What is kept of layers of these sizes; raises `ValueError`, one sentence, where nothing would be saved."""
    kept: list[int] = []
    for number, size in enumerate(sizes, 1):
        if is_kept(size, sum(kept), number, len(sizes), budget_bytes):
            kept.append(size)
    require_gain(sizes, len(kept), budget_bytes, num_places)
    return KeptBytes(sum(kept), max(kept) * num_places)


def require_gain(sizes: Sequence[int], num_kept: int, budget_bytes: int, num_places: int) -> None:
    """Raises `ValueError` where no more layers are kept than the device holds places for."""
    if num_kept > num_places:
        return
    more = (
        f"give at least {max(sizes, default=0) * (num_places + 1) / GIB:.2g} GiB, " if num_places < len(sizes) else ""
    )
    raise ValueError(
        f"cpu_offload_gb {budget_bytes / GIB:g} keeps {num_kept} of {len(sizes)} layers in host memory, and the device "
        f"holds {num_places} of them at a time: nothing would be saved; {more}lower cpu_offload_ahead, or leave "
        "cpu_offload_gb out"
    )
