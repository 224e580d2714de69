"""Weights of blocks are taken apart without a change, and multiplied as float32 says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from frame.ops import Ops
from frame.plugins.gguf.blocks import PACKED, dequantize
from frame.plugins.gguf.held import held_as
from frame.plugins.gguf.types import BY_NAME
from frame.plugins.platforms.cpu_ops import CpuOps
from tests.gguf.drawn import random_blocks

ROWS, DEPTH = 37, 512


def blocks_of(kind: str) -> torch.Tensor:
    return torch.from_numpy(random_blocks(kind, (ROWS, DEPTH // BY_NAME[kind].values), seed=5, size=1 / 64))


def layer_of(kind: str, ops: Ops) -> tuple[SimpleNamespace, torch.Tensor]:
    layer = SimpleNamespace(ops=ops, empty=lambda *shape, dtype: torch.empty(shape, dtype=dtype))
    held, blocks = held_as(kind), blocks_of(kind)
    for parameter in held.create(layer, ROWS + 3, DEPTH):
        parameter[ROWS:].zero_()
    held.put(layer, slice(0, 5), blocks[:5])
    held.put(layer, slice(5, ROWS), blocks[5:])
    return layer, dequantize(blocks, kind)


@pytest.mark.parametrize("kind", PACKED)
def test_values_are_those_of_the_file(kind: str) -> None:
    layer, expected = layer_of(kind, Ops())
    assert torch.equal(held_as(kind).values(layer, slice(0, ROWS), torch.float32), expected)
    ids = torch.tensor([30, 2, 2], dtype=torch.int32)
    assert torch.equal(held_as(kind).values(layer, ids, torch.bfloat16), expected[ids].bfloat16())
    assert not held_as(kind).values(layer, slice(ROWS, None), torch.float32).any()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_parts(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.plugins.gguf.held._IN_CACHE", 5 * DEPTH)
    for ops in (Ops(), CpuOps(), CpuOps(compiled=True)):
        for ops.invariant in (False, True):
            layer, values = layer_of(kind, ops)
            x, bias = torch.randn(6, DEPTH).to(dtype), torch.randn(ROWS + 3).to(dtype)
            found = held_as(kind).apply(layer, x, bias)
            expected = torch.nn.functional.pad(x.double() @ values.double().T, (0, 3)) + bias.double()
            far = (found.double() - expected).abs().max() / expected.abs().max()
            assert found.dtype == dtype
            assert far < (1e-5 if dtype == torch.float32 else 1e-2)
