"""bitsandbytes: weights as the library dequantises them, products, ranks, and tokens beside transformers'."""

import json
import re

import pytest
import torch

from frame.interfaces import LoaderSetup, UnconnectedGroup
from frame.layers import load_weights
from frame.ops import Ops
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.bitsandbytes import Bitsandbytes
from frame.plugins.quantization.bitsandbytes_4bit import TABLES
from frame.testing import QuantizationSuite
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import MemoryLoader
from tests.plugins.quantization.layers import setup_of, two_layers
from tests.plugins.quantization.stored import write_pair
from tests.plugins.quantization.test_checkpoints import expected, served

KINDS = {"nf4": ("nf4", False), "nf4 nested": ("nf4", True), "fp4": ("fp4", False), "fp4 nested": ("fp4", True)}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def four_bits(kind):
    """(quantization_config, what the library stores of a weight and what it makes of that)."""
    import bitsandbytes.functional as library

    type_, nested = KINDS[kind]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    config |= {"bnb_4bit_quant_type": type_, "bnb_4bit_use_double_quant": nested}

    def quantize(name, weight):
        codes, state = library.quantize_4bit(weight, quant_type=type_, compress_statistics=nested, blocksize=64)
        found = {f"weight.{end}": one for end, one in state.as_dict(packed=True).items()}
        return {"weight": codes, **found}, library.dequantize_4bit(codes, state)

    return config, quantize


def eight_bits():
    """As `four_bits`, of integers."""
    import bitsandbytes.functional as library

    def quantize(name, weight):
        codes, largest, _ = library.int8_vectorwise_quant(weight.half())
        found = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return found, codes.float() * (largest / 127)[:, None]

    return EIGHT, quantize


def stored_layers(kind):
    """(configuration, tensors, dequantised weights) of `TwoLayers`."""
    config, quantize = eight_bits() if kind == "int8" else four_bits(kind)
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {"mlp.down_proj.bias": torch.randn(64, generator=generator)}, {}
    for name, size in {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (64, 512)}.items():
        found, weights[name] = quantize(name, torch.randn(size, generator=generator))
        tensors |= {f"mlp.{name}.{end}": one for end, one in found.items()}
    return config, tensors, weights


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_weights_and_products_are_those_of_the_library(kind):
    """The weight exactly, also after the same tensors arrive again; the product to 1e-5."""
    config, tensors, weights = stored_layers(kind)
    model = two_layers(Bitsandbytes, config, tensors=tensors)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        load_weights(model, MemoryLoader(tensors))
        for layer, wanted in (
            (model.up, torch.cat((weights["gate_proj"], weights["up_proj"]))),
            (model.down, weights["down_proj"]),
        ):
            if kind == "int8":
                assert torch.equal(layer.codes.float() * layer.scales, wanted)
            else:
                assert torch.equal(Ops().dequantize_table(layer.packed, layer.scales, layer.table), wanted)
        wide = torch.cat((x @ weights["gate_proj"].T, x @ weights["up_proj"].T), -1)
        torch.testing.assert_close(model.up(x), wide, rtol=1e-5, atol=1e-5)
        wanted = wide @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
        torch.testing.assert_close(model(x, None), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("type_", ["nf4", "fp4"])
def test_the_numbers_of_made_up_weights_are_the_librarys(type_):
    import bitsandbytes.functional as library

    assert torch.equal(torch.tensor(TABLES[type_]), library.get_4bit_type(type_, device="cpu"))


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_ranks_hold_their_parts(kind):
    """Also with scales of scales, whose blocks of 256 begin before a rank's own."""
    config, tensors, weights = stored_layers(kind)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))

    def work(group):
        model = two_layers(Bitsandbytes, config, group, tensors)
        load_weights(model, MemoryLoader(tensors))
        return model.up(x[:, :256]), model.down(x[:, 128 * group.rank : 128 * (group.rank + 1)])

    found = run_ranks(4, work)
    gates = torch.cat([up[:, :64] for up, _ in found], -1)
    torch.testing.assert_close(gates, x[:, :256] @ weights["gate_proj"].T, rtol=1e-5, atol=1e-4)
    wanted = x @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
    torch.testing.assert_close(found[2][1], wanted, rtol=1e-5, atol=1e-3)


def test_shares_that_cut_a_block_are_one_sentence():
    config, _ = four_bits("nf4")
    with pytest.raises(ValueError, match="of 512, which cut groups of 64 columns"):
        two_layers(Bitsandbytes, config, UnconnectedGroup(0, 16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_in_8bit": True}, "must say one of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": False}, "must say one of load_in_4bit and load_in_8bit"),
        ({"bnb_4bit_quant_type": "fp3"}, "bnb_4bit_quant_type of the quantization_config is 'fp3'; frame reads: nf4, "),
    ],
)
def test_settings_that_are_not_read_are_one_sentence(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Bitsandbytes(setup_of({**four_bits("nf4")[0], **change}))


def test_tensors_that_contradict_are_one_sentence():
    config, tensors, _ = stored_layers("nf4 nested")
    with pytest.raises(
        ValueError, match=r"says bitsandbytes of 4 bits, but no tensor of the checkpoint ends in '.weigh"
    ):
        Bitsandbytes(setup_of(config, {"mlp.up_proj.weight": torch.zeros(2, 2)}))
    model = two_layers(Bitsandbytes, config, tensors=tensors)
    name = "mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))

    def broken(text):
        data = text.ljust(len(tensors[name])).encode()[: len(tensors[name])]
        return MemoryLoader({**tensors, name: torch.tensor(list(data), dtype=torch.uint8)})

    with pytest.raises(ValueError, match=r"quant_state of mlp.up_proj.weight says \[8, 8\] in blocks of 64, but its"):
        load_weights(model, broken(json.dumps({**state, "shape": [8, 8]}, separators=(",", ":"))))
    with pytest.raises(ValueError, match=r"quant_state of mlp.up_proj.weight is not what bitsandbytes writes"):
        load_weights(model, broken("{"))
    other = tensors["mlp.up_proj.weight.quant_map"].flip(0).contiguous()
    with pytest.raises(ValueError, match=r"up_proj.weight.quant_map differs from that of a tensor with which"):
        load_weights(model, MemoryLoader({**tensors, "mlp.up_proj.weight.quant_map": other}))
    without = {name: one for name, one in tensors.items() if "up_proj.weight.quant_state" not in name}
    with pytest.raises(ValueError, match=r"has mlp.up_proj.weight.absmax, but no mlp.up_proj.weight.quant_state"):
        two_layers(Bitsandbytes, config, tensors=without)
    del tensors["mlp.up_proj.weight.nested_absmax"]
    with pytest.raises(ValueError, match=r"1 missing: mlp.up_proj.weight.nested_absmax"):
        load_weights(two_layers(Bitsandbytes, config, tensors=tensors), MemoryLoader(tensors))


def test_bytes_in_another_order_are_one_sentence():
    config, tensors, _ = stored_layers("int8")
    model = two_layers(Bitsandbytes, config, tensors=tensors)
    tensors["mlp.up_proj.weight_format"] += 2
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight_format is 2: frame reads 8-bit weights in rows \(0\)"):
        load_weights(model, MemoryLoader(tensors))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["nf4 nested", pytest.param("int8", marks=pytest.mark.slow)])
def test_tokens_on_one_rank_and_on_two(kind, tmp_path):
    """One part of a fused layer and a whole one are not quantised."""
    config, quantize = eight_bits() if kind == "int8" else four_bits(kind)
    left = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
    quantised, plain = write_pair(
        tmp_path, "llama", config, quantize, ignored=lambda name: name.endswith(left), intermediate_size=128,
        head_dim=32,
    )  # fmt: skip
    wanted = expected(plain, 12)
    assert served(quantised, 12) == wanted
    assert served(quantised, 12, tensor_parallel_size=2) == wanted


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_made_up_weights(kind, tmp_path):
    config, _ = (EIGHT, None) if kind == "int8" else four_bits(kind)
    model = two_layers(Bitsandbytes, config)
    load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
    found = model.up(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(found).all()
    assert 0.01 < found.std() < 100


class TestEightBits(QuantizationSuite):
    """The contract of the 8-bit form; that of nested 4 bits is the provider's tag."""

    plugin = "bitsandbytes"

    def stored(self):
        return EIGHT
