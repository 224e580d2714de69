"""Work that a start on CUDA begins in threads before torch is imported. Imports no torch."""

from __future__ import annotations

import ctypes
from threading import Thread
from typing import Any

from frame.interfaces import Setup

from .triton_files import read_triton


def begin(setup: Setup, options: Any) -> None:
    """Starts to initialise the driver and to hash Triton's files, in threads; does nothing where there is no driver."""
    del setup, options
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    # torch calls it again, which returns at once; it creates no context and takes no device memory
    Thread(target=driver.cuInit, args=(0,), name="frame-cuda-driver", daemon=True).start()
    read_triton()
