"""What is wrong with the options of the disk connector, before an engine loads anything."""

from __future__ import annotations

from ..blocks.files import check_folder
from .messages import DiskOptions


def check_options(options: DiskOptions, num_workers: int, num_machines: int) -> None:
    """Raises `ValueError` where blocks cannot be kept in the folder."""
    del num_workers, num_machines
    check_folder(options.folder, "disk")
