"""Stands for the capturer of pieces on a CPU: tapes of torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Operators in the order in which they were called; replaying writes their results where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Tensor | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        places = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, None))
        elif isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in places:
            if out.is_floating_point():
                out.fill_(torch.nan)  # as on a device that only captures: nothing has its value yet
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            if out is not None:
                out.copy_(again)


class TapeCapturer:
    """Implements `Capturer`; counts what is begun, ended and forgotten.

    From the piece `fails_after` on it fails with `error`, the number of `failures` given or for ever.
    """

    def __init__(self, fails_after: int = 1 << 30, error: Exception | None = None, failures: int = 1 << 30) -> None:
        self.fails_after = fails_after
        self.error = error or torch.OutOfMemoryError("no memory")
        self.failures = failures
        self.open: Tape | None = None
        self.ended = self.forgotten = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.open is not None:
                self.open.__exit__(None, None, None)
                self.open = None

    def begin(self) -> None:
        assert self.open is None
        self.open = Tape()
        self.open.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.open is not None
        if self.ended >= self.fails_after and self.failures:
            self.failures -= 1
            raise self.error
        tape, self.open = self.open, None
        tape.__exit__(None, None, None)
        self.ended += 1
        return tape.replay

    def see(self, tensor: Tensor) -> Tensor:
        return tensor

    def forget(self) -> None:
        self.forgotten += 1
