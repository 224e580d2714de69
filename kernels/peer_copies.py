"""Sums of two GPUs whose values their copy engines carry, with the residual sum and norm that follow.

Copy engines need no multiprocessor, so that the values of one part of a product travel while the next part is
computed. A rank copies into the memory of its peer when that has read what came before; two words in the memory of each
rank say how far its peer is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm import normalized

#: Places of the two words in `CopyBuffers.signals`.
_ARRIVED, _TAKEN = tl.constexpr(0), tl.constexpr(1)


@dataclass(frozen=True)
class CopyBuffers:
    """What a rank and its peer share for one sum after another.

    `received` uint8 [bytes] is this rank's memory, into which the peer copies. `signals` int64 [2] are written by the
    peer: the last sum whose values it has copied here, and the last whose values it has read. `theirs` int64 [1] is the
    address of the peer's signals. `state` int64 [2] is the number of the last sum, and how many programs have ended the
    one that runs. All begin as zeros.
    """

    received: Tensor
    signals: Tensor
    theirs: Tensor
    state: Tensor


@triton.jit(do_not_specialize=["runs"])
def _await_taken(signals, state, runs):
    if runs > 0:
        last = tl.load(state, volatile=True)
        while tl.atomic_add(signals + _TAKEN, 0, sem="acquire", scope="sys") < last:
            pass


@triton.jit(do_not_specialize=["runs"])
def _tell_arrived(theirs, state, runs):
    if runs > 0:
        target = tl.load(theirs).to(tl.pointer_type(tl.int64)) + _ARRIVED
        tl.atomic_xchg(target, tl.load(state, volatile=True) + 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["runs"])
def _add_received(
    x, received, residual, weight, out, total, signals, theirs, state, runs, size, dim, eps, offset,
    DIM: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A row of `dim` of the sum; without NORM a run of `dim` elements of all `size`."""
    if runs > 0:
        number = tl.load(state, volatile=True) + 1
        while tl.atomic_add(signals + _ARRIVED, 0, sem="acquire", scope="sys") < number:
            pass
        tl.debug_barrier()
        lane = tl.arange(0, DIM)
        place = tl.program_id(0).to(tl.int64) * dim + lane
        kept = (lane < dim) & (place < size)
        mine = tl.load(x + place, mask=kept, other=0.0).to(tl.float32)
        other = tl.load(received + place, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
        value = (mine + other).to(x.dtype.element_ty)
        if NORM:
            value = value + tl.load(residual + place, mask=kept, other=0.0)
            tl.store(total + place, value, mask=kept)
            gain = tl.load(weight + lane, mask=lane < dim, other=0.0)
            value = normalized(value, gain, dim, eps, offset, OFFSET)
        tl.store(out + place, value, mask=kept)
        tl.debug_barrier()  # all threads have read what the peer may write over next
        if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
            tl.store(state + 1, 0)
            tl.store(state, number)
            target = tl.load(theirs).to(tl.pointer_type(tl.int64)) + _TAKEN
            tl.atomic_xchg(target, number, sem="release", scope="sys")


def await_taken(buffers: CopyBuffers, *, rehearsed: bool = False) -> None:
    """Ends when the peer has read the values of the last sum; `rehearsed` as for all of these: does nothing."""
    _await_taken[(1,)](buffers.signals, buffers.state, int(not rehearsed), num_warps=1)


def tell_arrived(buffers: CopyBuffers, *, rehearsed: bool = False) -> None:
    """Tells the peer that what was copied into its memory before is whole."""
    _tell_arrived[(1,)](buffers.theirs, buffers.state, int(not rehearsed), num_warps=1)


def add_received(x: Tensor, buffers: CopyBuffers, out: Tensor, *, rehearsed: bool = False) -> Tensor:
    """Writes x + the peer's x to `out`, which may be x; contiguous, of any shape."""
    size, part = x.numel(), 4096
    _launch(x, None, None, out, None, buffers, triton.cdiv(size, part), part, 0.0, 0.0, rehearsed)
    return out


def add_received_normed(
    x: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float, float],
    buffers: CopyBuffers,
    *,
    rehearsed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) for total = x + the peer's x + residual, all contiguous [T, dim].

    `norm` is (weight, eps, offset). Rounds as a sum followed by `norm.add_rms_norm` does.
    """
    weight, eps, offset = norm
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, buffers, len(x), x.shape[-1], eps, offset, rehearsed)
    return out, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, total: Tensor | None,
    buffers: CopyBuffers, rows: int, dim: int, eps: float, offset: float, rehearsed: bool,
) -> None:  # fmt: skip
    if not rows:
        return
    size = triton.next_power_of_2(dim)
    _add_received[(rows,)](
        x, buffers.received.view(x.dtype), residual, weight, out, total, buffers.signals, buffers.theirs, buffers.state,
        int(not rehearsed), x.numel(), dim, eps, offset,
        DIM=size, NORM=weight is not None, OFFSET=offset != 0.0, num_warps=max(4, min(16, size // 512)),
    )  # fmt: skip
