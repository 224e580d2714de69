"""A run of steps that launches no Triton kernel: what it would have launched is compiled, many kernels at a time.

A cold start spends most of its time compiling one kernel after another, each at its first launch. Knows no kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import Token
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .forks import Forks

try:
    from triton.runtime import _async_compile, driver
except ImportError:  # a later Triton: kernels compile when they are first launched
    _async_compile = None

logger = logging.getLogger("frame.platforms.rehearsal")

#: Compiling one kernel takes up to some seconds, all of a model's a dozen on a few processors.
_KERNEL_SECONDS, _ALL_SECONDS = 60.0, 180.0


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
    """Implements what Triton asks of its asynchronous compile mode; kernels are there when it ends.

    Each is compiled in a forked process, which leaves it in Triton's cache on disk: a good part of a compilation is
    Python. The children touch no device. What none of them could compile in its time is compiled here.
    """

    def __init__(self) -> None:
        self._compiling: dict[str, tuple[Callable[[], Any], list[Callable[[Any], None]]]] = {}
        self._forks = Forks(seconds=_KERNEL_SECONDS, all_seconds=_ALL_SECONDS)
        self._token: Token[Any] | None = None

    def submit(self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Unlaunched:
        """Called by Triton for a kernel that it lacks; `finalize` puts one into its cache."""
        if key not in self._compiling:
            self._compiling[key] = (compile_kernel, [])
            self._forks.start(lambda: _leave(compile_kernel))
        self._compiling[key][1].append(finalize)
        finalize(Unlaunched())
        return Unlaunched()

    def __enter__(self) -> CompileMode:
        self._token = _async_compile.active_mode.set(self)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _async_compile.active_mode.reset(self._token)
        if failure is not None:
            self._forks.stop()
        self._forks.wait()
        for compile_kernel, finalizers in self._compiling.values():
            kernel = compile_kernel()
            for finalize in finalizers:
                finalize(kernel)


def _leave(compile_kernel: Callable[[], Any]) -> None:
    """Compiles a kernel, and the C function that launches it, which is compiled at the first launch otherwise."""
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def rehearse(run: Callable[[], None]) -> None:
    """Calls `run` and compiles what it launches; its results mean nothing. Does nothing where Triton cannot.

    What reads on the host what an unlaunched kernel should have written may raise: then the rest is left to the first
    real run, which raises again if the fault is its own.
    """
    if _async_compile is None:
        return
    with CompileMode(), Zeros():
        try:
            run()
        except Exception as error:
            logger.debug("the rehearsal ended early: %s", error, exc_info=error)
