"""Blocks of weights have the values that gguf's own dequantiser gives them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from frame.plugins.gguf.blocks import PACKED, dequantize
from frame.plugins.gguf.types import BY_NAME, TYPES
from tests.gguf.drawn import random_blocks


@pytest.mark.parametrize("kind", PACKED)
def test_values_are_those_of_the_library(kind):
    blocks = random_blocks(kind, (7, 5), seed=3)
    want = gguf.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[kind])
    found = dequantize(torch.from_numpy(blocks), kind)
    assert np.isfinite(want).all()
    assert np.abs(want).max() > 0
    assert found.shape == want.shape
    assert (found.numpy().view(np.uint32) == want.view(np.uint32)).all()


def test_exponents_are_those_of_the_library():
    blocks = random_blocks("MXFP4", (256, 1), seed=4)
    blocks[:, 0, 0] = np.arange(256)
    with np.errstate(over="ignore"):  # twelve times the largest
        want = gguf.dequantize(blocks.reshape(256, -1), gguf.GGMLQuantizationType.MXFP4)
    found = dequantize(torch.from_numpy(blocks), "MXFP4").numpy()
    assert (found.view(np.uint32) == want.view(np.uint32)).all()


def test_sizes_are_those_of_the_library():
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.values, kind.num_bytes)
    fours, others = {"IQ4_NL", "IQ4_XS", "MXFP4"}, {"TQ1_0", "TQ2_0"}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", *fours, *others} == set(
        PACKED
    )
    assert set(PACKED) < set(BY_NAME)
