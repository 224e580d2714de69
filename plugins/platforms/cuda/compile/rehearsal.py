"""Runs steps without launching Triton's kernels: those that would have been launched are compiled, many at a time.

A cold start spends most of its time compiling one kernel after another, each at its first launch. Knows no kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import Token
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from frame.links.processors import num_processors

from ..laps import Laps
from .compiler import ALL_SECONDS, KERNEL_SECONDS, Compile, leave
from .forks import Forks
from .turns import in_turn

try:
    from triton.runtime import _async_compile
except ImportError:  # a later Triton: kernels compile when they are first launched
    _async_compile = None

logger = logging.getLogger("frame.platforms.rehearsal")

#: A kernel that takes longer than this was not read from the cache.
_READ_SECONDS = 0.1


class Unlaunched:
    """Stands in Triton's cache for a kernel that is being compiled; launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


class Zeros(TorchFunctionMode):
    """New tensors are zeros, so that the output of a kernel that was not launched is still a valid index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
        return replaced.get(func, func)(*args, **(kwargs or {}))


class CompileMode:
    """Implements Triton's asynchronous compile mode: notes the kernels that are missing and launches none.

    `lacks` is called once for each of them, with its key in Triton's cache and the function that compiles it.
    `num_failed` of them were not compiled by the processes that were to do so.
    """

    num_failed = 0

    def __init__(self, lacks: Callable[[str, Compile], None]) -> None:
        self._lacks = lacks
        self._kept: dict[str, tuple[Compile, list[Callable[[Any], None]]]] = {}
        self._token: Token[Any] | None = None

    def submit(self, key: str, compile_kernel: Compile, finalize: Callable[[Any], None]) -> Unlaunched:
        """Called by Triton for a kernel that it lacks; `finalize` puts one into its cache."""
        if key not in self._kept:
            self._kept[key] = (compile_kernel, [])
            self._lacks(key, compile_kernel)
        self._kept[key][1].append(finalize)
        finalize(Unlaunched())
        return Unlaunched()

    def __enter__(self) -> CompileMode:
        self._token = _async_compile.active_mode.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _async_compile.active_mode.reset(self._token)

    def load(self) -> list[str]:
        """Gives Triton every kernel: from its cache on disk, or compiled here and now, whose names it returns."""
        compiled = []
        for compile_kernel, finalizers in self._kept.values():
            start = time.perf_counter()
            kernel = compile_kernel()
            if time.perf_counter() - start > _READ_SECONDS:
                compiled.append(kernel.metadata.name)
            for finalize in finalizers:
                finalize(kernel)
        return compiled

    def __len__(self) -> int:
        return len(self._kept)


def compile_in_forks(run: Callable[[], None], shares: int = 1) -> CompileMode:
    """Calls `run` and compiles what it would launch, each kernel in a forked process; returns when all are done.

    A process leaves its kernel in Triton's cache on disk: a good part of a compilation is Python. It touches no device.
    A kernel that a process of another worker compiles is waited for.
    After a fork the parent copies each page that it writes. With `shares`, so many processes call `run`, and each
    compiles its part of the kernels: the last one is reached sooner.
    """
    others = Forks(seconds=ALL_SECONDS, all_seconds=ALL_SECONDS, limit=max(1, shares - 1))
    for share in range(1, shares):
        others.start(partial(_compile_share_whole, run, share, shares))
    try:
        mode = _compile_share(run, 0, shares)
    except BaseException:
        others.stop()
        raise
    finally:
        others.wait()
    if others.num_failed:
        raise RuntimeError(f"{others.num_failed} of {shares} processes that run steps failed")
    return mode


def _compile_share(run: Callable[[], None], share: int, shares: int) -> CompileMode:
    """Of the kernels that are met, compiles every `shares`th: steps meet them in the same order everywhere."""
    limit = None if shares == 1 else 2 * num_processors() // shares
    forks = Forks(seconds=KERNEL_SECONDS, all_seconds=ALL_SECONDS, limit=limit)
    numbers = count()

    def start(key: str, compile_kernel: Compile) -> None:
        if next(numbers) % shares == share:
            forks.start(partial(in_turn, key, partial(leave, compile_kernel)))

    mode = CompileMode(start)
    try:
        with mode:
            run()
    except BaseException:
        forks.stop()
        raise
    finally:
        forks.wait()
    mode.num_failed = forks.num_failed
    return mode


def _compile_share_whole(run: Callable[[], None], share: int, shares: int) -> None:
    """As `_compile_share`; raises `RuntimeError` where a kernel was not compiled, for who started this process."""
    if failed := _compile_share(run, share, shares).num_failed:
        raise RuntimeError(f"{failed} kernels were not compiled")


def rehearse(run: Callable[[], None], ahead: Callable[[], bool] | None = None) -> bool:
    """Calls `run`, whose results mean nothing, and compiles the kernels that it would launch, if Triton can do so.

    `ahead` waits for another process that compiles the same kernels, and says whether it succeeded. Code that reads on
    the host what an unlaunched kernel should have written may raise: the rest is then left to the first real run, which
    raises again if the fault is its own. Returns whether all kernels were met.
    """
    if not can_rehearse():
        return False
    whole = True

    def as_far_as_it_goes() -> None:
        nonlocal whole
        try:
            run()
        except Exception as error:
            whole = False
            logger.debug("the rehearsal ended early: %s", error, exc_info=error)

    laps = Laps()
    with Zeros():
        mode = compile_in_forks(as_far_as_it_goes) if ahead is None else _collect(as_far_as_it_goes, ahead)
    laps.end("met and compiled")
    compiled = mode.load()
    laps.end("loaded")
    besides = f", of them compiled here: {', '.join(compiled)}" if compiled else ""
    logger.info("%d kernels: %s%s", len(mode), laps, besides)
    return whole


def can_rehearse() -> bool:
    """Whether this Triton has an asynchronous compile mode."""
    return _async_compile is not None


def _collect(run: Callable[[], None], ahead: Callable[[], bool]) -> CompileMode:
    """Calls `run` while another process compiles; compiles the kernels that it would launch if that process failed."""
    lacking: dict[str, Compile] = {}
    with CompileMode(lacking.__setitem__) as mode:
        run()
    if not ahead():
        forks = Forks(seconds=KERNEL_SECONDS, all_seconds=ALL_SECONDS)
        for key, compile_kernel in lacking.items():
            forks.start(partial(in_turn, key, partial(leave, compile_kernel)))
        forks.wait()
    return mode
