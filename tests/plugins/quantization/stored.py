"""Tiny checkpoints with quantised weights, made by the libraries that make real ones, each with a dequantised twin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from frame.testing.checkpoints import make_checkpoint

Tensors = dict[str, Tensor]
#: Quantises the weight "NAME.weight": the tensors to store by the ends of their names, and the dequantised weight.
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_pair(
    folder: Path,
    family: str,
    config: Mapping[str, Any],
    quantize: Quantize,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    more: Mapping[str, Tensor] | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """(quantised, dequantised) checkpoints of a family's row, the first with `config` as its quantization_config."""
    plain = make_checkpoint(folder / "plain", family, **overrides)
    stored, twin = dict(more or {}), {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base.rpartition(".")[2] in PARTS and tensor.dim() == 2 and not ignored(base):
            found, weight = quantize(base, tensor)
            stored |= {f"{base}.{end}": value.contiguous() for end, value in found.items()}
            twin[name] = weight.float().contiguous()
        else:
            stored[name] = twin[name] = tensor
    quantised = folder / "quantised"
    quantised.mkdir()
    for file in plain.iterdir():
        if file.suffix == ".json":
            (quantised / file.name).write_text(file.read_text())
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    save_file(twin, plain / "model.safetensors", {"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": dict(config)}))
    return quantised, plain


def compressed(
    format_: str, inputs: Mapping[str, Any] | None = None, **weights: Any
) -> tuple[dict[str, Any], Quantize]:
    """A quantization_config of compressed-tensors, and what the library stores by it.

    Groups of columns in any order, as older versions wrote, are made of a weight whose columns are in their order.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    whole, is_ordered = dict(weights), weights.pop("actorder", None) == "group"
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=format_,
    )
    compressor = BaseCompressor.get_value_from_registry(format_)

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        args, order = scheme.weights, torch.arange(weight.shape[1])
        if is_ordered:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
        scale, zero = ranges(weight[:, order], args)
        given = {"weight": weight[:, order], "weight_scale": scale, "weight_zero_point": zero}
        state = compressor.compress(given, scheme)
        back = compressor.decompress(dict(state), scheme)["weight"]
        if is_ordered:
            places = torch.argsort(order)
            codes = unpack_from_int32(state["weight_packed"], args.num_bits, torch.Size(weight.shape))
            state["weight_packed"] = pack_to_int32(codes[:, places].contiguous(), args.num_bits)
            state["weight_g_idx"], back = (places // args.group_size).to(torch.int32), back[:, places]
        if inputs is not None and inputs.get("dynamic") is False:
            state["input_scale"] = torch.tensor([0.01 + len(name) / 1e4])
        return {end: value for end, value in state.items() if value is not None}, back

    group = {"targets": ["Linear"], "weights": whole, "input_activations": inputs, "format": format_}
    config = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return config, quantize


def ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """The library's scales and zero points for the smallest and largest value of each of its units."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        r, c = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
        parts = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).transpose(1, 2).flatten(2)
    elif strategy == "group":
        parts = weight.unflatten(1, (-1, args.group_size))
    elif strategy == "channel":
        parts = weight[:, None]
    else:
        parts = weight.reshape(1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    return scale, zero
