"""What experts' codes tell of themselves when their weights are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from frame.ops import CodedWeights, Ops


class Noted(Ops):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def dequantize_table(self, *given: Any, **told: Any) -> Tensor:  # type: ignore[override]
        self.told.append(told)
        return Ops.dequantize_table(*given, **told)


@pytest.mark.parametrize("is_float4", [False, True])
def test_a_platform_is_told_of_4_bit_floats(is_float4: bool) -> None:
    codes, scales = torch.full((2, 3, 8), 0x76543210, dtype=torch.int32), torch.full((2, 3, 2), 127, dtype=torch.uint8)
    weight = CodedWeights(codes, scales, (1, 32), table=torch.arange(16.0), is_float4=is_float4)
    ops = Noted()
    found = weight.weight(ops, torch.float32)
    assert torch.equal(found, torch.arange(8.0).repeat(8).expand(2, 3, 64))
    assert ops.told == [{"is_float4": is_float4}]
