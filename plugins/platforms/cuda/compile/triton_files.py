"""The hash of Triton's own files, which every kernel's key holds. Imports no torch; Triton itself in the background."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from threading import Thread

logger = logging.getLogger("frame.platforms.triton_files")

#: How long a thread may hold the interpreter while another waits for it; Python's own 5 ms make half a second four.
_BRISK_SECONDS = 1e-4


def read_triton() -> Callable[[], None]:
    """Begins once to hash the files, of half a gigabyte; what it returns waits for the end."""
    return _reading().join


@cache
def _reading() -> Thread:
    thread = Thread(target=_hash_briskly, name="frame-triton-key", daemon=True)
    thread.start()
    return thread


def _hash_briskly() -> None:
    """Gets the interpreter back soon after each of its eight hundred reads and updates, also while others import."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_BRISK_SECONDS)
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except ImportError as error:  # none, or a later one: whoever needs the hash takes it
        logger.debug("Triton's files are not hashed ahead: %s", error)
    finally:
        sys.setswitchinterval(usual)
