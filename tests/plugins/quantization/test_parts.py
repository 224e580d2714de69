"""The parts that formats are made of: packing, names, and layers over ranks; each against another reckoning of it."""

import json
import re

import pytest
import torch

from frame.core.layers.methods import Methods
from frame.interfaces import LoaderSetup, Model, ModelSetup, QuantizationSetup, QuantizationSpec, UnconnectedGroup
from frame.layers import load_weights
from frame.ops import Ops, quantize_rows, unpack_nibbles
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.compressed_tensors import CompressedTensors
from frame.plugins.quantization.fp8 import Fp8
from frame.plugins.quantization.names import Names
from frame.plugins.quantization.online import Int4, Int8
from frame.plugins.quantization.packing import AWQ_ORDER, pack, pack_nibbles, unpack
from frame.testing import QuantizationSuite
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import MemoryLoader, make_build
from tests.plugins.quantization.test_checkpoints import FORMATS


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("count", [7, 32, 40])
def test_codes_of_any_width_come_back(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    words = pack(codes, bits)
    bits_of = "".join(format(code, f"0{bits}b")[::-1] for code in codes[1].tolist())
    first = int(bits_of.ljust(32, "0")[:32][::-1], 2)
    assert words[1, 0].item() & 0xFFFFFFFF == first
    assert torch.equal(unpack(words, bits, count), codes)


def test_packing_is_that_of_the_library():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (3, 4, 8):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 64)).to(torch.int8)
        packed = helpers.pack_to_int32(values, bits)
        assert torch.equal(unpack(packed, bits, 64).to(torch.int16) - 2 ** (bits - 1), values.to(torch.int16))


def test_nibbles_lie_in_one_order():
    codes = torch.randint(0, 16, (4, 24)).to(torch.uint8)
    assert torch.equal(pack_nibbles(codes), pack(codes, 4))
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_nibbles(word).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack(word, 4, 8, AWQ_ORDER).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize(
    ("names", "layer", "meant"),
    [
        (["lm_head"], "lm_head", True),
        (["lm_head"], "model.lm_head_norm", False),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.10.mlp.up_proj", False),
        (["mlp.gate"], "model.layers.3.mlp.gate", True),
        (["mlp.gate"], "model.layers.3.mlp.gate_proj", False),
        (["gate.weight"], "model.layers.3.mlp.gate", True),
        (["re:.*mlp.gate$"], "model.layers.3.mlp.gate", True),
        (["re:.*mlp.gate$"], "model.layers.3.mlp.gate_proj", False),
        (["re:vision.*"], "model.vision.up", False),
        (["*self_attn*"], "model.layers.0.self_attn.q_proj", True),
        (["model.layers.[01].*"], "model.layers.2.mlp", False),
        (["layers.5"], "model.layers.5.mlp", True),
        (["language_model.layers.5"], "model.layers.5.mlp", True),
        ([], "anything", False),
    ],
)
def test_names_of_lists(names, layer, meant):
    assert (layer in Names(names, ((r"^language_model\.", "model."),))) is meant


def test_a_part_of_a_name_counts_where_a_format_says_so():
    assert "model.layers.3.mlp.gate_proj" in Names(["mlp.gate"], parts=True)


def test_rows_of_zeros_have_no_nan():
    codes, scales = quantize_rows(torch.zeros(2, 8), torch.float8_e4m3fn)
    assert torch.equal(codes.float() * scales, torch.zeros(2, 8))


def stored(kind):
    format_, inputs, weights = FORMATS[kind]
    if weights.get("group_size") and format_ != "mxfp8-quantized":  # whose groups have one size
        weights = {**weights, "group_size": 64}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group": group}}


STORED = {
    **{kind: ("compressed-tensors", stored(kind)) for kind in FORMATS},
    "fp8": ("fp8", {"quant_method": "fp8"}),
    "fp8 static": ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 rows": ("fp8", {"quant_method": "fbgemm_fp8"}),
    "fp8 blocks": ("fp8", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "fp8 odd blocks": ("fp8", {"quant_method": "fp8", "weight_block_size": [64, 32]}),
}


class _Stored(QuantizationSuite):
    said: dict

    def stored(self):
        return self.said


for _place, (_kind, (_plugin, _config)) in enumerate(STORED.items()):
    _title = "Test" + re.sub(r"\W", "", _kind.title())
    _suite = type(_title, (_Stored,), {"plugin": _plugin, "said": _config, "__module__": __name__})
    globals()[_title] = pytest.mark.matrix(_suite) if _place % 2 else _suite
del _suite


class Rows(Model):
    """Columns of 256 over ranks, then rows."""

    def __init__(self, setup, options=None):
        super().__init__(setup, options)
        self.up = setup.build.linear("up", 256, 512, shard="column")
        self.down = setup.build.linear("down", 512, 64, shard="row", bias=True)

    def forward(self, inputs, step):
        return self.down(self.up(inputs))

    def logits(self, hidden):
        raise NotImplementedError


def made(kind, group=None):
    plugin, config = STORED[kind]
    format_ = CompressedTensors if plugin == "compressed-tensors" else Fp8
    build = make_build(group)
    setup = QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32), config)
    build.methods = Methods(format_(setup))
    return Rows(ModelSetup(build))


@pytest.mark.parametrize("kind", STORED)
def test_four_ranks_give_what_one_gives(kind, tmp_path):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))

    def work(group):
        model = made(kind, group)
        load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
        return model(x, None)

    (expected,) = run_ranks(1, work)
    for found in run_ranks(4, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("w4a16", 16, "cut groups of 64 columns"),
        ("fp8 blocks", 16, "cut a unit of 64"),
        ("w8a16", 16, "cut a unit of 64"),
    ],
)
def test_shares_that_cut_a_group_are_named(kind, size, words):
    with pytest.raises(ValueError, match=words):
        made(kind, UnconnectedGroup(0, size))


@pytest.mark.parametrize("kind", [Fp8, Int8, Int4])
def test_weights_that_are_quantised_take_little_beside_themselves(kind):
    """No more than the largest tensor, and a second loading gives the same."""
    build = make_build()
    build.methods = Methods(kind(QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32))))
    model = Rows(ModelSetup(build))
    tensors = {"up.weight": torch.randn(512, 256), "down.weight": torch.randn(64, 512), "down.bias": torch.randn(64)}
    alive, most = [], []

    def fill(pieces):
        for target, read in list(pieces):
            alive.append(target.data_ptr())
            most.append(target.nbytes)
            target.copy_(read())

    load_weights(model, MemoryLoader(tensors), fill)
    assert sorted(most) == [64 * 4, 64 * 512 * 4, 512 * 256 * 4]
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held < 0.35 * sum(tensor.nbytes for tensor in tensors.values())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.load(list(tensors.items()))
    model.finish_load()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}}, "int of 3 bits by group"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized int of 4 bits by group; frame reads: "),
    ],
)
def test_schemes_that_are_not_read_are_named(change, words):
    config = json.loads(json.dumps(stored("w4a16")))
    config["config_groups"]["group"] |= change
    with pytest.raises(ValueError, match=words) as caught:
        CompressedTensors(QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32), config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Fp8, Int4])
def test_large_tensors_are_rounded_in_runs_of_rows(kind, monkeypatch):
    weight = torch.randn(512, 256)
    found = []
    for most in (1 << 22, 1000):
        monkeypatch.setattr("frame.plugins.quantization.scaled._MOST_AT_ONCE", most)
        build = make_build()
        build.methods = Methods(kind(QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32))))
        layer = build.linear("up", 256, 512)
        layer.weight_slots()[0].write(weight)
        found.append([parameter.clone() for parameter in layer.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_the_oracle_of_rounded_rows():
    """What a platform that rounds x as well may give is near what the reference gives."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    codes, scales = quantize_rows(weight, torch.int8)
    rounded, own = quantize_rows(x, torch.int8)
    product = (rounded.int() @ codes.int().T) * own * scales.T
    torch.testing.assert_close(product, Ops().scaled_linear(x, codes, scales, (1, 64)), atol=0.2, rtol=0.02)
