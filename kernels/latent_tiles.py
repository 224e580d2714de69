"""What the kernels of latent attention of single tokens for Hopper share, in Gluon. Knows no products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import barrier

#: Latents of a tile, and the parts of a latent that there are kernels for.
TILE, RANK, ROPE = 64, 512, 64


class Memory(NamedTuple):
    """Shared memory for queries or tiles, 64 numbers of each apart, and barriers: what is there, and what is free."""

    first: Any
    turned: Any
    ready: Any
    free: Any


class Part(NamedTuple):
    """The tokens from `low` to below `high` of a row, and its blocks."""

    low: Any
    high: Any
    table: Any


@gluon.jit
def store_latent(cache, latent, place, turned_place, LINE: gl.constexpr):
    """Stores a new latent, so that copies that begin behind it find it."""
    wide = gl.arange(0, 512, LINE)
    gl.store(cache + place + wide, gl.load(latent + wide))
    narrow = gl.arange(0, 64, LINE)
    gl.store(cache + turned_place + narrow, gl.load(latent + 512 + narrow))
    # copies read memory another way than stores write it
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [wide], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()


@gluon.jit
def leave_empty(out, lse, first_head, real_heads, split, splits, SPLIT: gl.constexpr, LINE: gl.constexpr):
    """What a program without tokens leaves: sums of no weight, or zeros."""
    lane = gl.arange(0, 64, LINE)
    if SPLIT:
        empty = gl.full([64], float("-inf"), gl.float32, LINE)
        gl.store(lse + (first_head + lane) * splits + split, empty, mask=lane < real_heads)
    else:
        wide = gl.arange(0, 512, LINE)
        for head in range(gl.minimum(real_heads, 64)):
            gl.store(out + (first_head + head) * 512 + wide, gl.zeros([512], out.dtype.element_ty, LINE))


@gluon.jit
def barriers_of(shape: gl.constexpr):
    """Barriers in shared memory, of whatever shape."""
    return gl.allocate_shared_memory(gl.int64, shape, mbarrier.MBarrierLayout())


def serves(query: Tensor, kv_cache: Tensor, rank: int) -> bool:
    """Whether there is a kernel for such queries [N, H, rank + rope] and such a cache, on a Hopper GPU."""
    whole = kv_cache.stride(2) == 1 and kv_cache.stride(1) == RANK + ROPE and kv_cache.stride(0) % (RANK + ROPE) == 0
    return (
        whole
        and rank == RANK
        and query.shape[2] == RANK + ROPE
        and query.dtype == kv_cache.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.shape[1] in (16, 32, 64, 128, 256)
        and kv_cache.data_ptr() % 16 == 0
    )
