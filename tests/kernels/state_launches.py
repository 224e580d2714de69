"""What layers with states launch, by the sizes of published models; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from frame.ops import ScanWeights, StateRows
from frame.plugins.platforms.cuda.ops import CudaOps

from .ahead import DEVICE

BF16, F32 = torch.bfloat16, torch.float32
#: heads, size of a head, size of a state, groups: of Mamba-2 2.7B and of Nemotron-H 8B
SCANS = {"Mamba-2": (80, 64, 128, 1), "Nemotron-H": (128, 64, 128, 8)}


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _rows(longest: int) -> StateRows:
    blocks, begins = _empty(64, dtype=torch.int32), _empty(64, dtype=torch.bool)
    return StateRows(_empty(65, dtype=torch.int32), blocks, begins, longest)


def _tokens(longest: int) -> int:
    """Of a step whose longest row has so many."""
    return 256 if longest <= 256 else 4 * longest


def _state(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return _empty(65, *shape, dtype=dtype)


def mixer(name: str, longest: int, dtype: torch.dtype = BF16, kept: torch.dtype = F32) -> None:
    """The convolution and the scan of a Mamba-2 mixer, of rows of up to so many tokens, with states of type `kept`."""
    heads, size, width, groups = SCANS[name]
    ops, rows, channels = CudaOps(), _rows(longest), heads * size + 2 * groups * width
    count = _tokens(longest)
    given = _empty(count, channels, dtype=dtype), _empty(channels, 4, dtype=dtype), _empty(channels, dtype=dtype)
    ops.causal_conv(*given, _state(channels, 3, dtype=dtype), rows)
    weights = ScanWeights(*(_empty(heads, dtype=F32) for _ in range(3)))
    x, dt = _empty(count, heads, size, dtype=dtype), _empty(count, heads, dtype=dtype)
    b, c = (_empty(count, groups, width, dtype=dtype) for _ in range(2))
    ops.ssd_scan(x, dt, b, c, weights, _state(heads, size, width, dtype=kept), rows)


def lightning(longest: int) -> None:
    """MiniMax-01's, a scan without a bias of steps."""
    count, weights = _tokens(longest), ScanWeights(_empty(64, dtype=F32))
    x, ones = _empty(count, 64, 128), _empty(count, 64, dtype=BF16)
    CudaOps().ssd_scan(x, ones, x, x, weights, _state(64, 128, 128), _rows(longest))


def channels(longest: int) -> None:
    """Falcon-Mamba's scan and, without silu, LFM2's convolution."""
    ops, rows, inner = CudaOps(), _rows(longest), 8192
    weights = ScanWeights(_empty(inner, 16, dtype=F32), _empty(inner, dtype=F32), _empty(inner, dtype=F32))
    ops.selective_scan(*(_empty(256, size) for size in (inner, inner, 16, 16)), weights, _state(inner, 16), rows)
    ops.causal_conv(_empty(256, 2048), _empty(2048, 3), None, _state(2048, 2, dtype=BF16), rows, silu=False)


def delta_net(
    longest: int, dtype: torch.dtype = BF16, kept: torch.dtype = F32, *, by_feature: bool = False, width: int = 128
) -> None:
    """Qwen3-Next's, or with a decay for each feature Kimi-Linear's; `width` is that of heads."""
    (keys, heads), tokens = (32, 32) if by_feature else (16, 32), _tokens(longest)
    decay = _empty(tokens, heads, *((width,) if by_feature else ()), dtype=F32)
    query, key, value = (_empty(tokens, count, width, dtype=dtype) for count in (keys, keys, heads))
    beta = _empty(tokens, heads, dtype=dtype)
    state = _state(heads, width, width, dtype=kept)
    CudaOps().gated_delta(query, key, value, decay, beta, state, _rows(longest))


def state_launches() -> dict[str, Callable[[], None]]:
    """By name."""
    found: dict[str, Callable[[], None]] = {}
    for kind, longest in {"single tokens": 1, "prompts": 200, "long prompts": 4000}.items():
        found |= {f"{name}, {kind}": partial(mixer, name, longest) for name in SCANS}
        found[f"Mamba-2 in float32, {kind}"] = partial(mixer, "Mamba-2", longest, F32)
        found[f"lightning, {kind}"] = partial(lightning, longest)
        if longest <= 256:
            found[f"Mamba-1 and short convolution, {kind}"] = partial(channels, longest)
        found[f"delta net, {kind}"] = partial(delta_net, longest)
        found[f"delta net in float32, {kind}"] = partial(delta_net, longest, F32)
        found[f"delta net by features, {kind}"] = partial(delta_net, longest, by_feature=True)
        found[f"Mamba-2 with states of 16 bits, {kind}"] = partial(mixer, "Mamba-2", longest, kept=BF16)
        found[f"delta net with states of 16 bits, {kind}"] = partial(delta_net, longest, kept=BF16)
        found[f"delta net of wide heads, {kind}"] = partial(delta_net, longest, width=256)
    return found
