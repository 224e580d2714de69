"""What is begun before torch is imported: the driver, and the hash of Triton's files."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from triton.runtime.cache import triton_key

from frame.interfaces import Setup
from frame.plugins.platforms.cuda.compile import early as cuda_early, triton_files


def test_files_of_triton_are_hashed_once_and_meanwhile() -> None:
    """The key that kernels are cached by asks for the hash again."""
    triton_key.cache_clear()
    triton_files._reading.cache_clear()
    usual = sys.getswitchinterval()
    for _ in range(2):
        triton_files.read_triton()()
    assert sys.getswitchinterval() == usual
    assert triton_key.cache_info().misses == 1
    assert triton_key()
    assert triton_key.cache_info().misses == 1


def test_without_a_driver_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(cuda_early, "read_triton", lambda: pytest.fail("Triton's files are not wanted"))
    cuda_early.begin(Setup(), None)


def test_the_driver_opens_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called, read, waits = list[tuple[int, str]](), list[bool](), threading.Event()

    def open_driver(flags: int) -> None:
        waits.wait(60)
        called.append((flags, threading.current_thread().name))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=open_driver))
    monkeypatch.setattr(cuda_early, "read_triton", lambda: read.append(True))
    cuda_early.begin(Setup(), None)
    assert read == [True]
    assert called == []
    waits.set()
    for thread in threading.enumerate():
        if thread.name == "frame-cuda-driver":
            thread.join(60)
    assert called == [(0, "frame-cuda-driver")]


def test_it_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "from frame.plugins.platforms.cuda.compile import early as cuda_early, triton_files\n"
        "cuda_early.begin(None, None); triton_files.read_triton()()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
