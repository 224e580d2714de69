"""Kernels that begin while the one before them ends (programmatic dependent launch, Hopper and later).

A decode step of one row is a chain of kernels of a few microseconds each, with gaps as long between them. A chained
kernel is launched early, may read weights at once, and waits before it reads what earlier kernels wrote. Every program
of it must wait, because the next kernel relies on that, even one that was launched before this one had waited.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(CHAINED: tl.constexpr, LONG: tl.constexpr = False):
    """Waits for all that kernels before this one wrote, and lets the next one begin.

    The next kernel begins when all programs have called this: before they wait, so that its launch is hidden behind two
    short kernels. Programs of a LONG kernel wait first, or programs of the next one would take room beside it and wait.
    """
    if CHAINED:
        if not LONG:
            gdc_launch_dependents()
        gdc_wait()
        if LONG:
            gdc_launch_dependents()


@lru_cache(maxsize=16)
def chained(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a chained kernel on `device`; plain ones where there is no such launch."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}
