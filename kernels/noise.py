"""The counter-based Gumbel noise in Triton, for kernels that draw; the reference is `frame.core.ops.random`.

The integers equal the reference's bit for bit; the logarithms agree to an ulp.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TOKEN_1 = tl.constexpr(0x7FEB352D)
_TOKEN_2 = tl.constexpr(0x846CA68B)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Logical shift to the right of a signed 64-bit integer."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def stream_key(stream, position):
    """The int64 key of the draw at `position` of the random stream `stream`, both int64."""
    x = stream + position * 8
    x ^= _shift(x, 30)
    x *= _MIX_1
    x ^= _shift(x, 27)
    x *= _MIX_2
    x ^= _shift(x, 31)
    return x


@triton.jit
def shifted_key(key, first):
    """The int64 key under which token id t has the noise that `first` + t has under `key`."""
    return ((key >> 32) << 32) | ((key + first) & 0xFFFFFFFF)


@triton.jit
def noise_size(key, first, lane):
    """float32 in [0, 2^31]: the absolute hash of the token ids `first` + `lane` under an int64 key.

    The smaller the hash, the larger the noise of its token.
    """
    low, high = key.to(tl.uint32, bitcast=False), (key >> 32).to(tl.uint32, bitcast=False)
    x = lane.to(tl.uint32) + (low + first)  # the sum that all lanes share is computed once
    x ^= x >> 16
    x *= _TOKEN_1
    x ^= x >> 15
    x = x * _TOKEN_2 + high * _TOKEN_2  # (x + high) · _TOKEN_2 in one instruction
    x ^= x >> 16
    return tl.abs(x.to(tl.int32, bitcast=True).to(tl.float32))


@triton.jit
def gumbel_noise(key, token):
    """float32 Gumbel noise of the token ids `token` under an int64 key."""
    size = tl.minimum(tl.maximum(noise_size(key, 0, token), 0.25), 2147483520.0)
    return -tl.log(-_log1p(size * (-1.0 / 2147483648.0)))


@triton.jit
def _log1p(x):
    """log(1 + x) with the full precision of a small x (Kahan): x · log(u) / (u - 1) for u = 1 + x."""
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))
