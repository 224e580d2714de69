"""Compiles the kernels in C with the machine's own compiler, once for each kind of processor, and loads them.

What was compiled is kept in the user's cache folder. Where there is no compiler there are no such kernels, which costs
speed and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path

_logger = logging.getLogger("frame")

_HERE = Path(__file__).parent
_SOURCES = ("rows.c", "rows.h", "bytes.h", "nibbles.h", "steps.h")
#: Roundings are the written ones but for fused products, so that every start gives the same bits.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_SECONDS = 120


class Library:
    """The compiled functions, with and without Python's lock: what takes some microseconds keeps it."""

    def __init__(self, path: Path) -> None:
        self.quick, self.long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.multiplies_bytes = bool(self.quick.multiplies_bytes())
        self.quick.one_token_each.argtypes = [ctypes.c_long, ctypes.c_void_p]
        #: (number, array of `struct call`): makes calls one after the other
        self.run_calls = self.long.run_calls
        self.run_calls.argtypes, self.run_calls.restype = [ctypes.c_long, ctypes.c_void_p], None

    def address(self, name: str) -> int:
        """Where function `name` lies."""
        return ctypes.cast(getattr(self.quick, name), ctypes.c_void_p).value or 0


def begin() -> None:
    """Begins to compile in a thread, if that was not begun before."""
    _begun()


@cache
def library() -> Library | None:
    """The functions, once they are compiled; None where there is no compiler, or it fails."""
    try:
        return _begun().result()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _logger.info("steps of few tokens take torch's operators, which are slower: %s", error)
        return None


@cache
def _begun() -> Future[Library]:
    job: Future[Library] = Future()

    def work() -> None:
        try:
            job.set_result(_loaded())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=work, name="frame-compile", daemon=True).start()
    return job


def _loaded() -> Library:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler; install gcc or clang")
    flags = [*_FLAGS, *_for_this_processor()]
    name = f"native-{_key(compiler, flags)}.so"
    folder = _kept_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="frame-native-") as made:
            _compile(compiler, flags, Path(made, name))
            return Library(Path(made, name))
    if not (folder / name).exists():
        _compile(compiler, flags, folder / name)
    return Library(folder / name)


def _for_this_processor() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def _key(compiler: str, flags: list[str]) -> str:
    """Names what the result depends on: the sources, the flags, the compiler and the processor."""
    found = hashlib.sha256(repr(flags).encode())
    for name in _SOURCES:
        found.update(_HERE.joinpath(name).read_bytes())
    path = shutil.which(compiler) or compiler
    if os.path.exists(path):
        about = os.stat(path)
        found.update(repr((os.path.realpath(path), about.st_size, about.st_mtime_ns)).encode())
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("flags", "Features", "model name", "model\t", "cpu family", "CPU part", "CPU implementer")
    found.update(repr(sorted({line for line in lines if line.startswith(wanted)})).encode())
    return found.hexdigest()[:32]


def _kept_folder() -> Path | None:
    """The folder in the user's cache that nobody else may write to; None where there can be none."""
    folder = Path.home() / ".cache" / "frame"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):
        return None
    mine = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if mine and os.access(folder, os.W_OK) else None


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    """Writes `target`, whole or not at all.

    It is not linked to a library of OpenMP: the one that torch has loaded has the threads that torch computes with. Its
    functions call one another by what they are called here, whatever other libraries have of those names.
    """
    with tempfile.TemporaryDirectory(prefix="frame-native-", dir=target.parent) as made:
        unlinked, linked = Path(made, "rows.o"), Path(made, "rows.so")
        commands = [
            [compiler, *flags, "-c", str(_HERE / "rows.c"), "-o", str(unlinked)],
            [compiler, "-shared", "-Wl,-z,now,-Bsymbolic", str(unlinked), "-o", str(linked)],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} cannot compile {_HERE / 'rows.c'}: {done.stderr.strip()[-500:]}")
        os.replace(linked, target)
