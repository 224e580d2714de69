"""Triton's compiler as starts use it: without a device, without line information, with the launchers in C.

Imports no torch. Knows no kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.runtime import driver

from .launchers import build

#: Compiles a kernel, or finds it in Triton's cache on disk.
Compile = Callable[[], Any]
#: Time limits for one kernel, which takes some seconds, and for all of a model, a dozen seconds on a few processors.
KERNEL_SECONDS, ALL_SECONDS = 60.0, 180.0
_LINES = "TRITON_DISABLE_LINE_INFO"


@contextmanager
def absent_driver(capability: tuple[int, int], shared_bytes: int) -> Iterator[None]:
    """While inside, Triton compiles for a device of this kind, asks no driver, and launches nothing that it has loaded.

    Triton keeps the kernels that it has loaded by the device that its driver names, so the name given here is a new
    one: those that this process has loaded before would be launched, which the driver refuses in a forked process.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    shared = {"max_shared_mem": shared_bytes}
    active, device = driver._active, object()
    answers = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
        # from Triton 3.7 on, one function that is compiled with the driver launches all
        launcher_cls=nvidia.CudaLauncher if hasattr(nvidia, "make_launcher") else lambda *_: None,
        utils=SimpleNamespace(get_device_properties=lambda _: shared),
    )
    driver.set_active(answers)
    try:
        yield
    finally:
        driver.set_active(active)


@contextmanager
def without_lines() -> Iterator[None]:
    """Kernels compiled inside have no line information, a fifth of the work, unless TRITON_DISABLE_LINE_INFO is set."""
    if os.environ.get(_LINES) is not None:
        yield
        return
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


def leave(compile_kernel: Compile) -> None:
    """Compiles a kernel and the C function that launches it, which Triton would build at the first launch."""
    kernel = compile_kernel()
    knobs.build.impl = knobs.build.impl or build
    driver.active.launcher_cls(kernel.src, kernel.metadata)
