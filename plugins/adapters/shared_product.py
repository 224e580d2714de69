"""One product for a layer's weight and the A of all slots, whose rows lie behind the weight's. Knows no request.

A product of a decode step takes as long as reading what it multiplies by, so that the rows of A, which are few, cost no
more than their share there, and no launches of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import AdapterSetup, LinearMethod, LinearSpec
from frame.layers import PlainLinear, WeightSlot

#: The rows of A are at most this share of the weight's: more would take steps with prompts longer than they save.
MOST = 1 / 8


def fits(spec: LinearSpec, inner: LinearMethod, setup: AdapterSetup, height: int) -> bool:
    """Whether a layer of the method `inner` may share its product with `height` rows of A.

    Its weight must be a plain one that stays where it is made.
    """
    return type(inner) is PlainLinear and not setup.weights_move and height <= spec.out_features * MOST


class SharedProduct:
    """The memory of `layer.weight`, which it makes, with `height` rows behind it."""

    def __init__(self, layer: Any, height: int) -> None:
        outputs = layer.spec.out_features
        #: weight and A, [out_features + height, width]
        self.whole: Tensor = layer.empty(outputs + height, layer.spec.width).data
        self.down = self.whole[outputs:].zero_()  # memory may have outlived a process that had adapters
        layer.weight = nn.Parameter(self.whole[:outputs], requires_grad=False)
        self._bias: Tensor | None = None
        if layer.spec.bias:
            self._bias = torch.zeros(outputs + height, dtype=layer.dtype, device=layer.device)

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        """As those of `PlainLinear`."""
        return WeightSlot.sharded("weight", layer.weight, layer.spec, transposed=layer.spec.transposed)

    def pack(self, layer: Any) -> None:
        """Takes over the bias that has been loaded. The weight is not packed: it would lie elsewhere."""
        if self._bias is not None:
            self._bias[: layer.spec.out_features].copy_(layer.bias)

    def given(self, layer: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """The weight, and the layer's `bias`, with what lies behind them.

        None where bits must not depend on what is multiplied beside the weight, or where it was put elsewhere.
        """
        if layer.ops.invariant or layer.weight.data_ptr() != self.whole.data_ptr():
            return None
        return self.whole, None if bias is None else self._bias
