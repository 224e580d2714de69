"""torchao's safetensors: weights as the library dequantises them, ranks, tokens, and what is refused by name."""

import re

import pytest
import torch

from frame.interfaces import LoaderSetup
from frame.layers import load_weights
from frame.ops import Ops
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.torchao import Torchao
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import MemoryLoader
from tests.plugins.quantization.layers import setup_of, two_layers
from tests.plugins.quantization.stored import write_pair
from tests.plugins.quantization.test_checkpoints import expected, served


def library_config(kind):
    from torchao import quantization as library
    from torchao.quantization.granularity import PerGroup, PerTensor

    return {
        "int8 rows": lambda: library.Int8WeightOnlyConfig(),
        "int8 dynamic": lambda: library.Int8DynamicActivationInt8WeightConfig(),
        "fp8 rows": lambda: library.Float8WeightOnlyConfig(),
        "fp8 tensor": lambda: library.Float8WeightOnlyConfig(granularity=PerTensor()),
        "int4 groups": lambda: library.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,
            granularity=PerGroup(32),
            mapping_type=library.quant_primitives.MappingType.ASYMMETRIC,
        ),
    }[kind]()


KINDS = ("int8 rows", "int8 dynamic", "fp8 rows", "fp8 tensor", "int4 groups")


def of(kind):
    """(quantization_config, what the library stores of a weight and what it makes of that)."""
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    made = library_config(kind)

    def quantize(name, weight):
        module = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        module[0].weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(module, made)
        tensors, _ = flatten_tensor_state_dict(module.state_dict())
        return {key.removeprefix("0."): one for key, one in tensors.items()}, module[0].weight.dequantize()

    return {"quant_method": "torchao", "quant_type": {"default": config_to_dict(made)}}, quantize


def stored_layers(kind):
    """(configuration, tensors, dequantised weights) of `TwoLayers`."""
    config, quantize = of(kind)
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {"mlp.down_proj.bias": torch.randn(64, generator=generator)}, {}
    for name, size in {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (64, 512)}.items():
        found, weights[name] = quantize(name, torch.randn(size, generator=generator))
        tensors |= {f"mlp.{name}.{end}": one for end, one in found.items()}
    return config, tensors, weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_ranks(kind):
    """The weight exactly, also after the same tensors arrive again; four ranks give its product."""
    config, tensors, weights = stored_layers(kind)
    model = two_layers(Torchao, config, tensors=tensors)
    for _ in range(2):
        load_weights(model, MemoryLoader(tensors))
        down = model.down
        found = Ops().dequantize(down.codes, down.scales, down.method.block, down.zeros)
        assert torch.equal(found, weights["down_proj"])
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))
    wanted = x @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
    torch.testing.assert_close(model.down(x), wanted, rtol=1e-5, atol=1e-4)

    def work(group):
        model = two_layers(Torchao, config, group, tensors)
        load_weights(model, MemoryLoader(tensors))
        return model.up(x[:, :256]), model.down(x[:, 128 * group.rank : 128 * (group.rank + 1)])

    shares = run_ranks(4, work)
    gates = torch.cat([up[:, :64] for up, _ in shares], -1)
    torch.testing.assert_close(gates, x[:, :256] @ weights["gate_proj"].T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(shares[2][1], wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["int8 rows", pytest.param("int4 groups", marks=pytest.mark.slow)])
def test_tokens(kind, tmp_path):
    """One part of a fused layer is not quantised, and an int8 file has layers of two kinds."""
    config, quantize = of(kind)
    left = ("layers.0.self_attn.k_proj",)
    config["modules_to_not_convert"] = list(left)
    quantised, plain = write_pair(tmp_path, "llama", config, quantize, ignored=lambda name: name.endswith(left))
    wanted = expected(plain, 12)
    assert served(quantised, 12) == wanted
    if kind == "int8 rows":
        assert served(quantised, 12, tensor_parallel_size=2) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_weights(kind, tmp_path):
    model = two_layers(Torchao, of(kind)[0])
    load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
    found = model.up(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(found).all()
    assert 0.01 < found.std() < 100


PACKED = {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": "tile_packed_to_4d"}}


@pytest.mark.parametrize(
    ("quant_type", "words"),
    [
        (
            {"default": PACKED},
            "quant_type of the quantization_config is 'Int4WeightOnlyConfig'; frame reads: Int8Weight",
        ),
        ("int4_weight_only", "quant_type of the quantization_config is 'int4_weight_only'; frame reads: "),
        (3, "quant_type of the quantization_config is 3; frame reads: "),
        (
            {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": PACKED}}}},
            "is 'Int4WeightOnlyConfig'; frame reads: ",
        ),
    ],
)
def test_configurations_that_are_not_read_are_one_sentence(quant_type, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        Torchao(setup_of({"quant_method": "torchao", "quant_type": quant_type}))
    assert "\n" not in str(caught.value)


def test_tensors_that_are_not_read_are_one_sentence():
    config, tensors, _ = stored_layers("int8 rows")
    with pytest.raises(ValueError, match=r"says torchao, but no tensor of the checkpoint ends in '_weight_qdata'"):
        Torchao(setup_of(config, {"mlp.up_proj.weight": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match=r"up._weight_scale_and_zero: torchao's tensors that are packed for a kernel"):
        Torchao(setup_of(config, {**tensors, "up._weight_scale_and_zero": torch.zeros(2, 2)}))
    packed = {**tensors, "mlp.up_proj._weight_qdata": torch.zeros(2, 2, 32, 4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"mlp.up_proj._weight_qdata is torch.int32 \[2, 2, 32, 4\]: frame reads"):
        two_layers(Torchao, config, tensors=packed)
    odd = {**tensors, "mlp.up_proj._weight_scale": torch.zeros(256, 5)}
    with pytest.raises(ValueError, match=r"_weight_scale \[256, 5\] does not divide its codes \[256, 256\]"):
        two_layers(Torchao, config, tensors=odd)
    del tensors["mlp.up_proj._weight_scale"]
    with pytest.raises(ValueError, match=r"has mlp.up_proj._weight_qdata, but no mlp.up_proj._weight_scale"):
        two_layers(Torchao, config, tensors=tensors)
