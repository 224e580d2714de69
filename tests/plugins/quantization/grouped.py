"""Writers of GPTQ and AWQ, apart from frame's own packing: numpy, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_bits(codes: np.ndarray, bits: int) -> Tensor:
    """Codes [count, …] → int32 [count · bits / 32, …]: one after the other, the lowest bit first."""
    each = (codes.astype(np.int64)[:, None] >> np.arange(bits).reshape(-1, *[1] * (codes.ndim - 1))) & 1
    lines = each.reshape(-1, 32, *codes.shape[1:])
    places = (1 << np.arange(32, dtype=np.uint64)).reshape(32, *[1] * (codes.ndim - 1))
    return torch.from_numpy((lines.astype(np.uint64) * places).sum(1).astype(np.uint32).view(np.int32))


def pack_awq(codes: np.ndarray) -> Tensor:
    """Codes [rows, N] → int32 [rows, N / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(AWQ_COLUMNS):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def rounded(weight: Tensor, bits: int, group: int, groups: Tensor | None = None, *, symmetric: bool = False) -> Any:
    """(codes [K, N], zero points [G, N], float16 scales [G, N], the group of each column, the dequantised weight)."""
    columns = weight.shape[1]
    size = group if group > 0 else columns
    if groups is None:
        groups = torch.arange(columns) // size
    most, wide = 2**bits - 1, weight.t()
    codes, zeros, scales = torch.zeros_like(wide), [], []
    for number in range(columns // size):
        own = wide[groups == number]
        low, high = own.amin(0).clamp(max=0), own.amax(0).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).clamp_min(1e-4).half()
        zero = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scale.float()).round().clamp(0, most)
        codes[groups == number] = (own / scale.float() + zero).round().clamp(0, most)
        zeros.append(zero)
        scales.append(scale)
    zero, scale = torch.stack(zeros), torch.stack(scales)
    back = (codes - zero[groups]) * scale.float()[groups]
    return codes.numpy().astype(np.int64), zero.numpy().astype(np.int64), scale, groups, back.t().contiguous()


def gptq(bits: int, group: int, *, ordered: bool = False, symmetric: bool = False, version: int = 1) -> Any:
    """(quantization_config, what quantises a weight) of GPTQ; version 1 stores zero points less one."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // (group if group > 0 else columns)
        if ordered:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(len(name)))]
        codes, zeros, scales, groups, back = rounded(weight, bits, group, groups, symmetric=symmetric)
        kept = (zeros - 1) % 2**bits if version == 1 else zeros
        found = {
            "qweight": pack_bits(codes, bits),
            "qzeros": pack_bits(kept.T, bits).T.contiguous(),
            "scales": scales,
            "g_idx": groups.to(torch.int32),
        }
        return found, back

    return config, quantize


def awq(group: int) -> Any:
    """(quantization_config, what quantises a weight) of AWQ."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales, _, back = rounded(weight, 4, group)
        return {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros), "scales": scales}, back

    return config, quantize
