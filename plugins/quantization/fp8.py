"""fp8: weights as 8-bit floats, with a scale for a tensor, for each row, or for each block of 128 x 128.

Read from checkpoints whose quant_method is fp8 or fbgemm_fp8 (DeepSeek-V3, Qwen3-FP8, AutoFP8), and made of others
while they load, by rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from frame.interfaces import ExpertMethod, ExpertSpec, LinearMethod, LinearSpec, Quantization, QuantizationSetup

from .experts import RoundedExperts, StoredExperts
from .joined import by_parts
from .names import Names
from .online import is_rounded
from .scaled import RoundedLinear, ScaledLinear, Stored, exponent_type

E4M3 = torch.float8_e4m3fn
_CODES = (E4M3, torch.float8_e5m2)
#: Ends of the names of scales, by file: transformers', vLLM's and AutoFP8's.
_SCALES, _INPUT_SCALES = ("weight_scale_inv", "weight_scale"), ("input_scale", "activation_scale")


class Fp8(Quantization):
    """`weight` e4m3 [N, K] times `weight_scale` or `weight_scale_inv`, which multiplies as well."""

    online = True

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        ignored = [*(config.get("ignored_layers") or ()), *(config.get("modules_to_not_convert") or ())]
        self._ignored = Names(ignored, setup.renames)
        self._block = _block_of(config)
        self._is_static = config.get("activation_scheme") == "static"
        self._by_rows = config.get("quant_method") == "fbgemm_fp8"

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") in ("fp8", "fbgemm_fp8")

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if self.setup.quantization_config is None:
            return RoundedLinear(E4M3) if is_rounded(spec) else None
        if spec.exact and not self.setup.tensors:
            return None
        per = self._block[0] if self._block else 1
        cuts = any(part.count % per for part in spec.rows[:-1])  # so that a block lies in two tensors
        return by_parts(spec, self._stored, ScaledLinear, lambda stored: cuts)

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        if self.setup.quantization_config is None:
            return RoundedExperts(E4M3)
        stored = self._stored(f"{prefix}.0.{spec.names[0]}")
        if stored is None:
            return None
        block = stored.block if stored.block[0] else (1, 0)
        ignored = (stored.input_scale,) if stored.input_scale else ()
        return StoredExperts(
            stored.dtype,
            block,
            ("weight", stored.scale),
            per_tensor=not stored.block[0],
            ignored=ignored,
            exponents=stored.exponents,
            rounds=stored.rounds,
        )

    @property
    def numerics(self) -> str:
        if self.setup.quantization_config is None:
            return "fp8 weights by rows"
        kind = f"blocks of {self._block[0]} x {self._block[1]}" if self._block else "tensors or rows"
        return f"fp8 weights by {kind}, {'static' if self._is_static else 'dynamic'} activations"

    def _stored(self, name: str) -> Stored | None:
        """How the tensor "NAME.weight" is stored; None where it is not quantised.

        DeepSeek names no layers to leave: there the type of the tensor says so.
        """
        if name in self._ignored:
            return None
        tensors = self.setup.tensors
        weight = tensors.get(f"{name}.weight")
        if weight is not None and weight.dtype not in _CODES:
            return None
        dtype = E4M3 if weight is None else weight.dtype
        scale = next((end for end in _SCALES if f"{name}.{end}" in tensors), _SCALES[0 if self._block else 1])
        static = ""
        if self._is_static:
            static = next((end for end in _INPUT_SCALES if f"{name}.{end}" in tensors), _INPUT_SCALES[0])
        if self._block:
            exponents = exponent_type(tensors, f"{name}.{scale}")
            return Stored(dtype, self._block, scale, static, rounds=True, exponents=exponents)
        found = tensors.get(f"{name}.{scale}")
        shape = found.shape if found is not None else (0, 1) if self._by_rows else ()
        if len(shape) == 0 or shape == (1,):
            return Stored(dtype, (0, 0), scale, static, rounds=True)
        return Stored(dtype, (1, 0), scale, static, flat=len(shape) == 1, rounds=True)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size` of a configuration; raises `ValueError` for one that is no pair of sizes."""
    block = config.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"weight_block_size of the quantization_config must be two sizes, got {block!r:.80}")
    return block[0], block[1]
