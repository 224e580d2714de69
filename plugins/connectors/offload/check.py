"""What is wrong with the options of the offload connector, before an engine loads anything."""

from __future__ import annotations

import os

from ..blocks.files import check_folder
from ..blocks.host_slab import check_size, gib
from .options import OffloadOptions


def check_options(options: OffloadOptions, num_workers: int, num_machines: int) -> None:
    """Raises `ValueError` where this machine has less memory than its workers are to take, or no such folder."""
    if options.disk is not None:
        check_folder(options.disk, "offload")
    num_bytes = options.num_bytes // num_workers * (num_workers // num_machines)
    check_size(num_bytes)
    folder = options.shared_folder
    while options.shared and not folder.exists():
        folder = folder.parent
    if options.shared:
        found = os.statvfs(folder)
        size = found.f_blocks * found.f_frsize
        if num_bytes > size:
            raise ValueError(
                f"{gib(num_bytes)} of blocks are to be kept in shared memory, and {options.shared_folder} has room for "
                f"{gib(size)}: lower kv_offloading_size, or name another shared_folder"
            )
