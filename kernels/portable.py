"""Gluon's language for kernels that are tested under Triton's interpreter too, which Gluon ignores.

There a kernel is one of plain Triton: layouts are left out, and no layout changes what a kernel computes. Instructions
of the chip that have no counterpart are for kernels to replace where `INTERPRETED` is set.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon as real_gluon
from triton.experimental.gluon import language as real_gl
from triton.experimental.gluon.language.nvidia import hopper as real_hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy as real_async_copy, mma_v2 as real_mma_v2

#: Whether kernels run in Python.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

gluon: Any = real_gluon
gl: Any = real_gl
mma_v2: Any = real_mma_v2
hopper: Any = real_hopper
async_copy: Any = real_async_copy


def _no_layout(*_: Any, **__: Any) -> None:
    return None


class _Shared:
    """Shared memory: a list of tensors, or one of them."""

    def __init__(self, tensors: list[Any], order: tuple[int, ...] | None = None) -> None:
        self.tensors, self.order = tensors, order

    def index(self, at: Any) -> _Shared:
        """The memory of one."""
        return _Slot(self, int(at.handle.data[0]) if hasattr(at, "handle") else int(at))


class _Slot(_Shared):
    def __init__(self, memory: _Shared, at: int, order: tuple[int, ...] | None = None) -> None:
        super().__init__(memory.tensors, order)
        self.memory, self.at = memory, at

    def store(self, value: Any) -> None:
        """Writes it."""
        self.tensors[self.at] = value

    def permute(self, order: tuple[int, ...]) -> _Slot:
        """With other dimensions."""
        return _Slot(self.memory, self.at, order)

    def read(self) -> Any:
        """What is there."""
        found = self.tensors[self.at]
        return found if self.order is None else tl.permute(found, self.order)


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = tl.dot(a.to(tl.float32), b.read().to(tl.float32), input_precision="ieee")
    return product + acc if use_acc else product


class _Plain(SimpleNamespace):
    """`triton.language` by Gluon's names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


if INTERPRETED:
    gluon = SimpleNamespace(jit=triton.jit, constexpr_function=real_gluon.constexpr_function)
    hopper = SimpleNamespace(
        warpgroup_mma=_multiply,
        warpgroup_mma_init=lambda value: value,
        warpgroup_mma_wait=lambda count, deps: deps if len(deps) > 1 else deps[0],
        fence_async_shared=lambda: None,
    )
    async_copy = SimpleNamespace(
        async_copy_global_to_shared=lambda place, source, mask=None: place.store(tl.load(source, mask=mask)),
        commit_group=lambda: None,
        wait_group=lambda count: None,
    )
    layouts = ("DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "BlockedLayout",
               "NVMMASharedLayout")  # fmt: skip
    gl = _Plain(
        **dict.fromkeys(layouts, _no_layout),
        arange=lambda first, end, layout=None: tl.arange(first, end),
        zeros=lambda shape, dtype, layout=None: tl.zeros(shape, dtype),
        full=lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
        allocate_shared_memory=lambda dtype, shape, layout: _Shared([None] * int(shape[0])),
        barrier=lambda: None,
        full_like=lambda like, value: like * 0 + value,
        convert_layout=lambda value, layout, assert_trivial=False: value,
    )

    def mma_v2(a: Any, b: Any, acc: Any) -> Any:
        """a b + acc."""  # numpy has no bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
