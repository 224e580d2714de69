"""The formats of quantised weights that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.quantization"
_API = ">=0.2.dev39,<0.3"
_GROUPS = """{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
"config_groups": {"group_0": {"targets": ["Linear"], "weights": {
"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}}}"""


@hookimpl
def frame_quantizations() -> list[Provider]:
    """What weights may be stored as, or become while they load."""
    return [
        Provider(
            "fp8",
            f"{_HERE}.fp8:Fp8",
            api=_API,
            summary="8-bit floats by tensor, row or block of 128 x 128; also made of other weights while they load",
        ),
        Provider(
            "int8",
            f"{_HERE}.online:Int8",
            api=_API,
            summary="8-bit integers by rows, made of weights while they load",
        ),
        Provider(
            "int4",
            f"{_HERE}.online:Int4",
            api=_API,
            summary="4-bit integers by groups of 128 inputs, made of weights while they load",
        ),
        Provider(
            "compressed-tensors",
            f"{_HERE}.compressed_tensors:CompressedTensors",
            api=_API,
            summary="what llm-compressor writes: fp8, int8, packed weights of 4 or 8 bits, nvfp4 and mxfp4",
            tags={"quantization_config": _GROUPS},
        ),
        Provider(
            "gguf",
            "frame.plugins.gguf.quantization:Gguf",
            api=_API,
            summary="weights in the blocks of GGUF files: Q4_0 to Q8_0, Q2_K to Q6_K",
            tags={"quantization_config": '{"quant_method": "gguf", "default": "Q4_0"}'},
        ),
        Provider(
            "mxfp4",
            f"{_HERE}.mxfp4:Mxfp4",
            api=_API,
            summary="4-bit floats by groups of 32 inputs, as the experts of gpt-oss are stored",
            tags={"quantization_config": '{"quant_method": "mxfp4"}'},
        ),
        Provider(
            "gptq",
            f"{_HERE}.gptq:Gptq",
            api=_API,
            summary="GPTQ's 2, 3, 4 or 8 bits by groups of inputs, in any order of inputs (desc_act)",
            tags={"quantization_config": '{"quant_method": "gptq", "bits": 4, "group_size": 64}'},
        ),
        Provider(
            "awq",
            f"{_HERE}.awq:Awq",
            api=_API,
            summary="AWQ's 4 bits by groups of inputs (version gemm)",
            tags={"quantization_config": '{"quant_method": "awq", "bits": 4, "group_size": 64}'},
        ),
        Provider(
            "bitsandbytes",
            f"{_HERE}.bitsandbytes:Bitsandbytes",
            api=_API,
            summary="bitsandbytes' nf4 and fp4 by blocks of 64 inputs, and its 8-bit integers, as weights alone",
            tags={
                "quantization_config": '{"quant_method": "bitsandbytes", "load_in_4bit": true, '
                '"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true}'
            },
        ),
        Provider(
            "modelopt",
            f"{_HERE}.modelopt:ModelOpt",
            api=_API,
            summary="ModelOpt's fp8, mxfp8 and nvfp4, as weights alone where the chip has no such products",
            tags={"quantization_config": '{"quant_method": "modelopt", "quant_algo": "NVFP4"}'},
        ),
        Provider(
            "torchao",
            f"{_HERE}.torchao:Torchao",
            api=_API,
            summary="torchao's safetensors of int8 and fp8, by rows, groups or tensors",
            tags={
                "quantization_config": '{"quant_method": "torchao", "quant_type": {"default": '
                '{"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}'
            },
        ),
    ]
