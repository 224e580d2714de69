"""ModelOpt's files, and the 4-bit floats of compressed-tensors: weights, ranks, and tokens beside transformers'."""

import re

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LoaderSetup, UnconnectedGroup
from frame.layers import load_weights
from frame.ops import Ops
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.compressed_tensors import CompressedTensors
from frame.plugins.quantization.modelopt import ModelOpt
from frame.testing import QuantizationSuite
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import MemoryLoader
from tests.plugins.quantization.layers import setup_of, two_layers
from tests.plugins.quantization.stored import write_pair
from tests.plugins.quantization.test_checkpoints import expected, served

E4M3 = torch.float8_e4m3fn
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_fp4(values):
    """The nearest code of each number."""
    code = (values.abs()[..., None] - VALUES).abs().argmin(-1)
    return (code + 8 * (values < 0)).to(torch.uint8)


def from_fp4(codes):
    return VALUES[(codes & 7).int()] * (1 - 2.0 * (codes >> 3))


def nvfp4(name, weight):
    """As ModelOpt stores it: a scale of scales that multiplies."""
    parts = weight.unflatten(1, (-1, 16))
    number = weight.abs().amax() / (6 * 448)
    scales = (parts.abs().amax(-1) / 6 / number).to(E4M3)
    by = scales.float() * number
    codes = to_fp4(parts / by.clamp_min(1e-12)[..., None])
    back = (from_fp4(codes) * by[..., None]).flatten(1)
    flat = codes.flatten(1)
    found = {"weight": flat[:, 0::2] | flat[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": number}
    return {**found, "input_scale": torch.tensor(0.01 + len(name) / 1e4)}, back


def fp8(name, weight, kind="FP8"):
    """By tensor, row, or block of 128 with axes of one."""
    if kind == "MXFP8":
        parts = weight.unflatten(1, (-1, 32))
        exponents = (parts.abs().amax(-1) / 448).log2().ceil()
        codes = (parts / exponents.exp2()[..., None]).to(E4M3)
        found = {"weight": codes.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
        return found, (codes.float() * exponents.exp2()[..., None]).flatten(1)
    rows, columns = weight.shape
    r, c = {"FP8": (rows, columns), "FP8_PER_CHANNEL_PER_TOKEN": (1, columns), "FP8_PB_WO": (128, 128)}[kind]
    padded = torch.nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
    scale = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
    codes = (weight / spread).to(E4M3)
    shapes = {"FP8": (), "FP8_PB_WO": (scale.shape[0], 1, scale.shape[1], 1)}
    found = {"weight": codes, "weight_scale": scale.reshape(shapes.get(kind, (-1,)))}
    if kind == "FP8":
        found["input_scale"] = torch.tensor(0.01 + len(name) / 1e4)
    return found, codes.float() * spread


def compressed_floats(kind):
    """A quantization_config of compressed-tensors, and what the library stores and reads."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format_, group = f"{kind}-pack-quantized", 16 if kind == "nvfp4" else 32
    weights = {"num_bits": 4, "type": "float", "group_size": group, "symmetric": True}
    weights["strategy"] = "tensor_group" if kind == "nvfp4" else "group"
    if kind == "nvfp4":
        more = {"scale_dtype": E4M3, "zp_dtype": E4M3}
    else:
        more = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights, **more), format=format_)
    compressor = BaseCompressor.get_value_from_registry(format_)

    def quantize(name, weight):
        largest = weight.unflatten(1, (-1, group)).abs().amax(-1)
        state = {"weight": weight}
        if kind == "nvfp4":
            number = 448 * 6 / weight.abs().amax()
            state |= {"weight_scale": (largest / 6 * number).to(E4M3).float(), "weight_global_scale": number[None]}
        else:
            state["weight_scale"] = (largest / 6).log2().ceil().exp2()
        state = compressor.compress(state, scheme)
        found = {end: one for end, one in state.items() if one is not None}
        theirs = compressor.decompress(dict(state), scheme)["weight"].float()
        bytes_ = found["weight_packed"]
        by = found["weight_scale"]
        by = by.float() / found["weight_global_scale"] if kind == "nvfp4" else 2.0 ** (by.float() - 127)
        values = from_fp4(torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)).unflatten(1, (-1, group))
        back = (values * by[..., None]).flatten(1)
        torch.testing.assert_close(back, theirs, rtol=2**-7, atol=1e-6)  # which is computed in bfloat16
        return found, back

    config = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": format_}},
    }
    return config, quantize


def of(kind):
    """(format, configuration, what quantises a weight)."""
    if kind.startswith("compressed"):
        return CompressedTensors, *compressed_floats(kind.split()[1])
    config = {"quant_method": "modelopt", "quant_algo": kind}
    return ModelOpt, config, nvfp4 if kind == "NVFP4" else lambda name, weight: fp8(name, weight, kind)


KINDS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "compressed nvfp4", "compressed mxfp4")


def stored_layers(kind):
    """(format, configuration, tensors, dequantised weights) of `TwoLayers`."""
    format_, config, quantize = of(kind)
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {"mlp.down_proj.bias": torch.randn(64, generator=generator)}, {}
    for factor, (name, size) in enumerate(
        {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (64, 512)}.items()
    ):
        found, weights[name] = quantize(name, torch.randn(size, generator=generator) * (1 + factor))
        tensors |= {f"mlp.{name}.{end}": one.contiguous() for end, one in found.items()}
    return format_, config, tensors, weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_products_are_those_of_the_file(kind):
    """The weight exactly but for the order of two products; that of x to 1e-5. Fused parts keep scales of their own."""
    format_, config, tensors, weights = stored_layers(kind)
    model = two_layers(format_, config, tensors=tensors)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        load_weights(model, MemoryLoader(tensors))
        for layer, wanted in (
            (model.up, torch.cat((weights["gate_proj"], weights["up_proj"]))),
            (model.down, weights["down_proj"]),
        ):
            if hasattr(layer, "packed"):
                found = Ops().dequantize_table(layer.packed, layer.scales, layer.table, layer.numbers)
            else:
                found = Ops().dequantize(layer.codes, layer.scales, layer.method.block)
            if kind == "compressed nvfp4":  # what the file divides by is inverted when it is read
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
            else:
                assert torch.equal(found, wanted)
        wide = torch.cat((x @ weights["gate_proj"].T, x @ weights["up_proj"].T), -1)
        torch.testing.assert_close(model.up(x), wide, rtol=1e-5, atol=1e-4)


def test_every_exponent_is_its_power_of_two():
    """From the least, which float32 holds as a subnormal number, to the largest; 255 is no number."""
    _, config, tensors, _ = stored_layers("MXFP8")
    bytes_ = torch.arange(256).repeat(8).view(256, 8).to(torch.uint8)
    wanted = torch.tensor([2.0 ** (int(x) - 127) for x in range(255)] + [float("nan")]).repeat(8).view(256, 8)
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        tensors |= {f"mlp.{part}.weight_scale": bytes_.view(dtype) for part in ("gate_proj", "up_proj")}
        model = two_layers(ModelOpt, config, tensors=tensors)
        load_weights(model, MemoryLoader(tensors))
        torch.testing.assert_close(model.up.scales, torch.cat((wanted, wanted)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_their_parts(kind):
    format_, config, tensors, weights = stored_layers(kind)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))
    size = 2 if kind == "FP8_PB_WO" else 4

    def work(group):
        model = two_layers(format_, config, group, tensors)
        load_weights(model, MemoryLoader(tensors))
        share = 512 // size
        return model.up(x[:, :256]), model.down(x[:, share * group.rank : share * (group.rank + 1)])

    found = run_ranks(size, work)
    gates = torch.cat([up.chunk(2, -1)[0] for up, _ in found], -1)
    torch.testing.assert_close(gates, x[:, :256] @ weights["gate_proj"].T, rtol=1e-5, atol=1e-4)
    wanted = x @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
    torch.testing.assert_close(found[1][1], wanted, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", ["NVFP4", "compressed mxfp4"])
def test_shares_that_cut_a_group_are_one_sentence(kind):
    format_, config, _ = of(kind)
    with pytest.raises(ValueError, match="of 512, which cut groups of"):
        two_layers(format_, config, UnconnectedGroup(0, 64 if kind == "NVFP4" else 32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo of the quantization_config is 'W4A8_AWQ'; frame reads: FP8, "),
        ({"quant_algo": None}, "quant_algo of the quantization_config is None; frame reads: FP8, "),
        ({"group_size": 32}, "group_size of the quantization_config is 32; frame reads: 16"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT3"}}},
            "quant_algo of a of the quantization_config is 'INT3'; frame reads: FP8, ",
        ),
    ],
)
def test_settings_that_are_not_read_are_one_sentence(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ModelOpt(setup_of({"quant_method": "modelopt", "quant_algo": "NVFP4", **change}))


def test_tensors_that_contradict_are_one_sentence():
    _, config, tensors, _ = stored_layers("FP8")
    with pytest.raises(ValueError, match=r"says NVFP4 of mlp.gate_proj, whose weight is torch.float8_e4m3fn"):
        two_layers(ModelOpt, {**config, "quant_algo": "NVFP4"}, tensors=tensors)
    format_, config, tensors, _ = stored_layers("compressed nvfp4")
    model = two_layers(format_, config, tensors=tensors)
    tensors["mlp.up_proj.weight_global_scale"] *= 0
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight_global_scale must be above 0, got 0.0"):
        load_weights(model, MemoryLoader(tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_weights(kind, tmp_path):
    format_, config, _ = of(kind)
    model = two_layers(format_, config)
    load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
    found = model.up(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(found).all()
    assert 0.01 < found.std() < 100


@pytest.mark.matrix
def test_tokens_and_the_cache_that_hf_quant_config_asks_for(tmp_path):
    """Globs leave a part of a fused layer; config.json says nothing; the cache has the file's scales."""
    import json

    left = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
    given = {"k": torch.tensor(0.02), "v": torch.tensor([0.02, 0.03])}  # of the layer, and of each KV head
    names = {f"model.layers.{i}.self_attn.{part}_proj.{part}_scale": part for i in range(3) for part in "kv"}
    scales = {name: given[part].clone() for name, part in names.items()}
    quantised, plain = write_pair(
        tmp_path, "llama", {}, nvfp4, ignored=lambda name: name.endswith(left), more=scales
    )  # fmt: skip
    inner = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    inner["exclude_modules"] = ["lm_head", "model.layers.0.self_attn.k_*", "*layers.1.mlp.down_proj"]
    said = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": inner}
    (quantised / "hf_quant_config.json").write_text(json.dumps(said))
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    wanted = expected(plain, 12)
    assert served(quantised, 12, kv_cache_dtype="float32") == wanted
    assert served(quantised, 12, kv_cache_dtype="float32", tensor_parallel_size=2) == wanted
    with running(from_flat({**SMALL, "model": str(quantised)}), Registry.load()) as engine:
        assert {spec.dtype for group in engine.scheduler._layout.groups for spec in group.specs} == {"float8_e4m3fn"}
        assert all(len(tokens) == 12 for tokens in greedy(engine, prompts(512)))


def test_a_file_of_two_algorithms(tmp_path):
    layers = {"model.layers.0.mlp": {"quant_algo": "FP8"}, "model.layers.*.self_attn.*": {"quant_algo": "NVFP4"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    def quantize(name, weight):
        return (nvfp4 if "self_attn" in name else fp8)(name, weight)

    quantised, plain = write_pair(
        tmp_path, "llama", config, quantize, ignored=lambda name: "mlp" in name and "layers.0" not in name
    )
    assert served(quantised, 12) == expected(plain, 12)


@pytest.mark.parametrize(
    "kind", ["NVFP4", "MXFP8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("FP8", "compressed mxfp4"))]
)
def test_experts(kind, tmp_path):
    _, config, quantize = of(kind)
    if kind.startswith("compressed"):
        config["ignore"] = ["lm_head", r"re:.*mlp\.gate$"]
    quantised, plain = write_pair(tmp_path, "qwen3-moe", config, quantize, moe_intermediate_size=32)
    assert served(quantised, 12) == expected(plain, 12)


@pytest.mark.parametrize("kind", ["FP8", "NVFP4"])
def test_experts_without_gates(kind, tmp_path):
    """As in Nemotron 3, whose codes lie in two tensors for each expert."""
    _, config, quantize = of(kind)
    config["exclude_modules"] = ["lm_head", "*mixer.in_proj", "*mixer.out_proj"]
    quantised, plain = write_pair(tmp_path, "nemotron-h-experts", config, quantize, moe_intermediate_size=32)
    assert served(quantised, 12) == expected(plain, 12)


class TestFp8(QuantizationSuite):
    """The contract of fp8 by tensor; that of nvfp4 is the provider's tag."""

    plugin = "modelopt"

    def stored(self):
        return {"quant_method": "modelopt", "quant_algo": "FP8"}
