"""mxfp4, as gpt-oss is stored: routed experts of 4-bit floats, with a power of two for each 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from frame.interfaces import ExpertMethod, ExpertSpec, LinearMethod, LinearSpec, Quantization, QuantizationSetup

from .codebook import Floats
from .codebook_experts import JoinedFloatExperts
from .names import Names
from .settings import name_list

JOINED = Floats("_blocks", "_scales", 32, torch.uint8)


class Mxfp4(Quantization):
    """All but the experts is left as it is. Computed in the model's type."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        self._ignored = Names(name_list("modules_to_not_convert", config.get("modules_to_not_convert")), setup.renames)
        if setup.tensors and not any(name.endswith(JOINED.codes) for name in setup.tensors):
            raise ValueError("the quantization_config says mxfp4, and the checkpoint has no tensor of _blocks")

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "mxfp4"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return None

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return None if prefix in self._ignored else JoinedFloatExperts(JOINED)

    @property
    def numerics(self) -> str:
        return "mxfp4 experts, dequantised"
