"""A run of steps that launches no Triton kernel: what it would have launched is compiled, many kernels at a time.

A cold start spends most of its time compiling one kernel after another, each at its first launch. Knows no kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Token
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

try:
    from triton.runtime import _async_compile
except ImportError:  # a later Triton: kernels compile when they are first launched
    _async_compile = None

_MAX_THREADS = 16


class Unlaunched:
    """Stands in Triton's cache for a kernel that is being compiled; launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


class Zeros(TorchFunctionMode):
    """New tensors are zero: what an unlaunched kernel leaves in its output is still a valid index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
        return replaced.get(func, func)(*args, **(kwargs or {}))


class CompileMode:
    """Implements what Triton asks of its asynchronous compile mode; kernels are there when it ends."""

    def __init__(self) -> None:
        # Most of a compilation runs outside of Python's lock: LLVM in native code, ptxas in a process.
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        self._compiling: dict[str, tuple[Future[Any], list[Callable[[Any], None]]]] = {}
        self._token: Token[Any] | None = None

    def submit(self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Unlaunched:
        """Called by Triton for a kernel that it lacks; `finalize` puts one into its cache."""
        if key not in self._compiling:
            self._compiling[key] = (self._threads.submit(compile_kernel), [])
        self._compiling[key][1].append(finalize)
        finalize(Unlaunched())
        return Unlaunched()

    def __enter__(self) -> CompileMode:
        self._token = _async_compile.active_mode.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _async_compile.active_mode.reset(self._token)
        with self._threads:
            for future, finalizers in self._compiling.values():
                kernel = future.result()
                for finalize in finalizers:
                    finalize(kernel)


def rehearse(run: Callable[[], None]) -> None:
    """Calls `run` and compiles what it launches; its results mean nothing. Does nothing where Triton cannot."""
    if _async_compile is None:
        return
    with CompileMode(), Zeros():
        run()
