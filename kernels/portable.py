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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as real_mma_v2

#: Whether kernels run in Python.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

gluon: Any = real_gluon
gl: Any = real_gl
mma_v2: Any = real_mma_v2


def _no_layout(*_: Any, **__: Any) -> None:
    return None


class _Plain(SimpleNamespace):
    """`triton.language` by Gluon's names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


if INTERPRETED:
    gluon = SimpleNamespace(jit=triton.jit)
    layouts = ("DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "BlockedLayout")
    gl = _Plain(
        **dict.fromkeys(layouts, _no_layout),
        arange=lambda first, end, layout=None: tl.arange(first, end),
        zeros=lambda shape, dtype, layout=None: tl.zeros(shape, dtype),
        full=lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
        full_like=lambda like, value: like * 0 + value,
        convert_layout=lambda value, layout, assert_trivial=False: value,
    )

    def mma_v2(a: Any, b: Any, acc: Any) -> Any:
        """a b + acc."""  # numpy has no bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
