"""Shared by the child processes of a server: ending with the parent, and describing errors in one sentence."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
from pathlib import Path

from ..plugin_host.offers import PluginError

_PR_SET_PDEATHSIG = 1
#: The longest that a thread, say of a connector that awaits another engine's answer, waits for one that runs Python.
_SWITCH_SECONDS = 0.0005


def describe(error: BaseException) -> str:
    """An exception as one sentence: its message, after its type where it is not one of frame's own errors."""
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, MemoryError):
        return f"this process gets no more memory of the machine{f': {text}' if text else ''}"
    if not text:
        return type(error).__name__
    ours = (ValueError, RuntimeError, OSError, PluginError)
    return text if isinstance(error, ours) else f"{type(error).__name__}: {text}"


def show_as(name: str) -> None:
    """What `ps` calls this process, at most 15 characters; safe from any thread."""
    Path("/proc/self/comm").write_text(name)


def allow_files() -> int:
    """Raises this process's limit of open files as far as it may, and returns it."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return now
    return most


def switch_often() -> None:
    """Has Python give other threads their turn more often than every 5 ms, for all of this process.

    A connector's thread that receives blocks would else wait as long behind each piece while a step is launched.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


def die_with_parent() -> None:
    """Has the kernel end this process when the thread that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
