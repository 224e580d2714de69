"""The formats of quantised weights that ship with frame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from frame import Provider, hookimpl

_HERE = "frame.plugins.quantization"
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}}
_NESTED_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}

#: Format → (class, what it is, the rest of a `quantization_config` that the contract suite gives it; None: of no file).
_FORMATS: Mapping[str, tuple[str, str, Mapping[str, Any] | None]] = {
    "fp8": (
        f"{_HERE}.fp8:Fp8",
        "8-bit floats by tensor, row or block of 128 x 128; also made of other weights while they load",
        None,
    ),
    "int8": (f"{_HERE}.online:Int8", "8-bit integers by rows, made of weights while they load", None),
    "int4": (f"{_HERE}.online:Int4", "4-bit integers by groups of 128 inputs, made of weights while they load", None),
    "compressed-tensors": (
        f"{_HERE}.compressed_tensors:CompressedTensors",
        "what llm-compressor writes: fp8, int8, packed weights of 4 or 8 bits, nvfp4 and mxfp4",
        {"format": "pack-quantized", "ignore": ["lm_head"], "config_groups": _GROUPS},
    ),
    "gguf": (
        "frame.plugins.gguf.quantization:Gguf",
        "weights in the blocks of GGUF files: Q4_0 to Q8_0, Q2_K to Q6_K",
        {"default": "Q4_0"},
    ),
    "mxfp4": (
        f"{_HERE}.mxfp4:Mxfp4",
        "4-bit floats by groups of 32 inputs, as the experts of gpt-oss are stored",
        {},
    ),
    "gptq": (
        f"{_HERE}.gptq:Gptq",
        "GPTQ's 2, 3, 4 or 8 bits by groups of inputs, in any order of inputs (desc_act)",
        {"bits": 4, "group_size": 64},
    ),
    "awq": (
        f"{_HERE}.awq:Awq",
        "AWQ's 4 bits by groups of inputs (version gemm)",
        {"bits": 4, "group_size": 64},
    ),
    "bitsandbytes": (
        f"{_HERE}.bitsandbytes:Bitsandbytes",
        "bitsandbytes' nf4 and fp4 by blocks of 64 inputs, and its 8-bit integers, as weights alone",
        _NESTED_NF4,
    ),
    "modelopt": (
        f"{_HERE}.modelopt:ModelOpt",
        "ModelOpt's fp8, mxfp8 and nvfp4, as weights alone",
        {"quant_algo": "NVFP4"},
    ),
    "torchao": (
        f"{_HERE}.torchao:Torchao",
        "torchao's safetensors of int8 and fp8, by rows, groups or tensors",
        {"quant_type": {"default": _INT8}},
    ),
}


@hookimpl
def frame_quantizations() -> list[Provider]:
    """What weights may be stored as, or become while they load."""
    return [
        Provider(name, target, api=">=0.2.dev39,<0.3", summary=summary, tags=_tags(name, stored))
        for name, (target, summary, stored) in _FORMATS.items()
    ]


def _tags(name: str, stored: Mapping[str, Any] | None) -> dict[str, str]:
    return {} if stored is None else {"quantization_config": json.dumps({"quant_method": name, **stored})}
