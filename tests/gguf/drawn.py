"""Blocks of GGUF files whose codes are random. Needs no gguf."""

from __future__ import annotations

import numpy as np

from frame.plugins.gguf.types import BY_NAME

#: Bytes at which the float16 scales of a block lie.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
    "IQ3_S": (0,),
}  # fmt: skip


def random_blocks(kind: str, shape: tuple[int, ...], seed: int, size: float = 1.0) -> np.ndarray:
    """Blocks [*shape, bytes of a block] of random codes; values are about `size` in a type with one scale."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (*shape, BY_NAME[kind].num_bytes), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = draw.uniform(0.5, 1.0, (*shape, 1)).astype(np.float16) * np.float16(size)
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":  # a power of two near the size
        blocks[..., :1] = 127 + np.round(np.log2(size)).astype(int) + draw.integers(-3, 0, (*shape, 1))
    if kind == "IQ1_M":  # whose scale is in the upper bits of four words, the lowest first
        words = blocks[..., 48:].view(np.uint16)
        scales = draw.uniform(0.5, 1.0, (*shape, 1)).astype(np.float16) * np.float16(size)
        parts = scales.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks[..., 48:] = (words & 0xFFF | parts << 12).view(np.uint8)
    return blocks
