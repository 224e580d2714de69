"""The hash of Triton's own files, which every kernel's key holds. Imports no torch; Triton itself in the background."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from threading import Thread

logger = logging.getLogger("frame.platforms.triton_files")

#: How long a thread may hold the interpreter while another waits for it; Python's own 5 ms make half a second four.
_SWITCH_SECONDS = 1e-4


def read_triton() -> Callable[[], None]:
    """Starts, once, a thread that hashes the files, half a gigabyte; returns a function that waits for it."""
    return _reading().join


@cache
def _reading() -> Thread:
    thread = Thread(target=_hash, name="frame-triton-key", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    """Hashes with a short switch interval, to get the interpreter back soon after each of some eight hundred reads."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except ImportError as error:  # no Triton, or one without this function: the hash is computed when it is needed
        logger.debug("Triton's files are not hashed ahead: %s", error)
    finally:
        sys.setswitchinterval(interval)
