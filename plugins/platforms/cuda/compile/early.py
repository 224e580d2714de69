"""What a start on CUDA waits for while the interpreter is free for others. Imports no torch."""

from __future__ import annotations

import ctypes
from threading import Thread
from typing import Any

from frame.interfaces import Setup

from .triton_files import read_triton


def begin(setup: Setup, options: Any) -> None:
    """Begins to open the driver and to hash Triton's files; does nothing where there is no driver."""
    del setup, options
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    # torch does it again, which takes no time then; neither makes a context or takes memory of a device
    Thread(target=driver.cuInit, args=(0,), name="frame-cuda-driver", daemon=True).start()
    read_triton()
