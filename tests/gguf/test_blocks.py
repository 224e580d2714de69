"""Blocks of weights have the values that gguf's own dequantiser gives them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from frame.plugins.gguf.blocks import PACKED, dequantize
from frame.plugins.gguf.types import BY_NAME, TYPES
from tests.gguf.files import random_blocks


@pytest.mark.parametrize("kind", PACKED)
def test_values_are_those_of_the_library(kind):
    blocks = random_blocks(kind, (7, 5), seed=3)
    want = gguf.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[kind])
    found = dequantize(torch.from_numpy(blocks), kind)
    assert np.isfinite(want).all()
    assert np.abs(want).max() > 0
    assert found.shape == want.shape
    assert (found.numpy().view(np.uint32) == want.view(np.uint32)).all()


def test_sizes_are_those_of_the_library():
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.values, kind.num_bytes)
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} == set(PACKED)
    assert set(PACKED) < set(BY_NAME)
