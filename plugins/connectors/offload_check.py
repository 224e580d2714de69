"""What is wrong with the options of the offload connector, before an engine loads anything."""

from __future__ import annotations

from .host_slab import check_size
from .offload_messages import OffloadOptions


def check_options(options: OffloadOptions, num_workers: int, num_machines: int) -> None:
    """Raises `ValueError` where this machine has less memory than its workers are to take."""
    check_size(options.num_bytes // num_workers * (num_workers // num_machines))
