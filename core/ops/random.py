"""Counter-based randomness: noise as a pure function of (request seed, position, token id).

Nothing is drawn from a generator, so batching, order, preemption and sharding cannot shift a request's noise. The
integer part is the same bits on every platform; the two logarithms agree to an ulp. Knows no request and no batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOKEN_1 = 0x7FEB352D
_TOKEN_2 = 0x846CA68B - (1 << 32)
#: Elements computed at once, so that they stay in the processor's cache.
CHUNK = 1 << 18


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def seed_stream(seed: int) -> int:
    """The stream of a request's 64-bit seed, as a signed integer: mix(seed + φ). Taken once, on the host."""
    x = (seed + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK_64
    return _signed(x ^ (x >> 31))


def stream_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """int64 [N]: a key for each (stream, position): mix(stream + 8·position), wrapping.

    `streams` int64 [N] are `seed_stream`s, `positions` int64 [N] those of the tokens to be drawn. `mix` is the
    finaliser of splitmix64 (Steele, Lea & Flood 2014), its shifts logical.
    """
    x = streams + positions * 8
    x ^= (x >> 30).bitwise_and_((1 << 34) - 1)
    x *= _signed(_MIX_1)
    x ^= (x >> 27).bitwise_and_((1 << 37) - 1)
    x *= _signed(_MIX_2)
    x ^= (x >> 31).bitwise_and_((1 << 33) - 1)
    return x


def shifted_keys(keys: Tensor, first: int) -> Tensor:
    """int64 keys under which token id t has the noise that `first` + t has under `keys`."""
    low = (keys + first) & 0xFFFFFFFF
    return (keys >> 32 << 32) | low


def token_hash(keys: Tensor, token_ids: Tensor) -> Tensor:
    """int32, the 32 hash bits of `token_ids` int32 under `keys` int64; the two broadcast.

    The lowbias32 mixer (Wellons 2018) keyed twice: the key's low word is added before, its high word in the middle.
    All arithmetic is 32-bit and wraps; shifts are logical.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    x = token_ids + low
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= _TOKEN_1
    torch.bitwise_right_shift(x, 15, out=shifted)
    x ^= shifted.bitwise_and_(0x1FFFF)
    x += high
    x *= _TOKEN_2
    torch.bitwise_right_shift(x, 16, out=shifted)
    x ^= shifted.bitwise_and_(0xFFFF)
    return x


def gumbel(bits: Tensor) -> Tensor:
    """float32 Gumbel noise of int32 hash bits: -log(-log1p(-u)), u = |bits| / 2^31, 2^-33 for 0.

    Small u keeps its full relative precision, which is where the noise is large and decides an argmax. Always finite:
    between -2.82 and 22.88.
    """
    x = bits.to(torch.float32).abs_().clamp_(0.25, 2.0**31 - 2.0**7)
    return x.mul_(-(2.0**-31)).log1p_().neg_().log_().neg_()


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 noise of `token_ids` int32 under `keys` int64 (broadcast)."""
    return gumbel(token_hash(keys, token_ids))


def add_gumbel_noise(scores: Tensor, keys: Tensor) -> None:
    """scores[i, v] += noise of token v under keys[i]; `scores` float32 [N, V], in place."""
    rows, width = scores.shape
    token_ids = torch.arange(width, dtype=torch.int32, device=scores.device)
    step = max(1, CHUNK // width)
    for start in range(0, rows, step):
        scores[start : start + step] += gumbel_noise(keys[start : start + step, None], token_ids)
