"""Two linear layers over ranks, with weights in a format: made up, or given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from frame.core.layers.methods import Methods
from frame.interfaces import Model, ModelSetup, QuantizationSetup, QuantizationSpec, StoredTensor
from tests.layers.test_weights import make_build


class TwoLayers(Model):
    """Columns of 256 over ranks, in two tensors, then rows."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build = setup.build
        self.up = build.linear("mlp", 256, 512, shard="column", parts={"gate_proj": 256, "up_proj": 256})
        self.down = build.linear("mlp.down_proj", 512, 64, shard="row", bias=True)

    def forward(self, inputs: Any, step: Any) -> Any:
        gate, up = self.up(inputs).chunk(2, -1)
        return self.down(torch.cat((gate, up), -1)) if gate.shape[-1] * 2 == self.down.spec.width else gate

    def logits(self, hidden: Any) -> Any:
        raise NotImplementedError


def setup_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> QuantizationSetup:
    """What a format is given on the CPU in float32, for a checkpoint with `tensors`."""
    spec = QuantizationSpec(torch.device("cpu"), torch.float32)
    stored = {name: StoredTensor(one.dtype, tuple(one.shape)) for name, one in (tensors or {}).items()}
    return QuantizationSetup(spec, config, stored)


def two_layers(format_: Any, config: Mapping[str, Any], group: Any = None, tensors: Any = None) -> TwoLayers:
    """The layers, whose weights have not been loaded."""
    build = make_build(group)
    build.methods = Methods(format_(setup_of(config, tensors)))
    return TwoLayers(ModelSetup(build))
