"""GPTQ and AWQ: weights as a numpy reader has them, products, ranks, and tokens beside transformers'."""

import re

import pytest
import torch

from frame.interfaces import LoaderSetup, UnconnectedGroup
from frame.layers import load_weights
from frame.ops import Ops
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.awq import Awq
from frame.plugins.quantization.gptq import Gptq
from frame.testing import QuantizationSuite
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import MemoryLoader
from tests.plugins.quantization.grouped import awq, gptq
from tests.plugins.quantization.layers import setup_of, two_layers
from tests.plugins.quantization.stored import write_pair
from tests.plugins.quantization.test_checkpoints import expected, served

KINDS = {
    **{f"gptq {bits} bits": (Gptq, lambda group, bits=bits: gptq(bits, group)) for bits in (2, 3, 4, 8)},
    "gptq symmetric": (Gptq, lambda group: gptq(4, group, symmetric=True)),
    "gptq v2": (Gptq, lambda group: gptq(4, group, version=2)),
    "gptq 3 bits v2": (Gptq, lambda group: gptq(3, group, version=2)),
    "gptq all inputs": (Gptq, lambda group: gptq(4, -1)),
    "gptq ordered": (Gptq, lambda group: gptq(4, group, ordered=True)),
    "gptq 3 bits ordered": (Gptq, lambda group: gptq(3, group, ordered=True, symmetric=True)),
    "gptq 8 bits ordered": (Gptq, lambda group: gptq(8, group, ordered=True)),
    "awq": (Awq, awq),
    "awq all inputs": (Awq, lambda group: awq(-1)),
}
UNDIVIDED = ("gptq all inputs", "awq all inputs", "gptq 8 bits ordered")


def stored_layers(kind, group=32):
    """(format, configuration, tensors, dequantised weights) of `TwoLayers`."""
    format_, make = KINDS[kind]
    config, quantize = make(group)
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {"mlp.down_proj.bias": torch.randn(64, generator=generator)}, {}
    for name, size in {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (64, 512)}.items():
        found, weights[name] = quantize(name, torch.randn(size, generator=generator))
        tensors |= {f"mlp.{name}.{end}": one for end, one in found.items()}
    return format_, config, tensors, weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_products_are_those_of_the_file(kind):
    """The weight exactly, also after the same tensors arrive again; the product but for the rounding of sums."""
    format_, config, tensors, weights = stored_layers(kind)
    model = two_layers(format_, config, tensors=tensors)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        load_weights(model, MemoryLoader(tensors))
        down = model.down
        found = (
            Ops().dequantize(down.codes, down.scales, down.method.block, down.zeros)
            if "8 bits" in kind
            else Ops().dequantize_packed(down.packed, down.scales, down.zeros)
        )
        order = slice(None) if getattr(down, "order", None) is None else down.order.long()
        assert torch.equal(found, weights["down_proj"][:, order])
        wide = torch.cat((x @ weights["gate_proj"].T, x @ weights["up_proj"].T), -1)
        torch.testing.assert_close(model.up(x), wide, rtol=1e-5, atol=1e-6 * float(wide.abs().max()))
        wanted = wide @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
        torch.testing.assert_close(model(x, None), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNDIVIDED])
def test_ranks_hold_their_parts(kind):
    """Each of four ranks the rows and columns of the same weight, although words are cut."""
    format_, config, tensors, weights = stored_layers(kind)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))

    def work(group):
        model = two_layers(format_, config, group, tensors)
        load_weights(model, MemoryLoader(tensors))
        return model.up(x[:, :256]), model.down(x[:, 128 * group.rank : 128 * (group.rank + 1)])

    found = run_ranks(4, work)
    gates = torch.cat([up[:, :64] for up, _ in found], -1)
    torch.testing.assert_close(gates, x[:, :256] @ weights["gate_proj"].T, rtol=1e-5, atol=1e-4)
    wanted = x @ weights["down_proj"].T + tensors["mlp.down_proj.bias"]
    torch.testing.assert_close(found[2][1], wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gptq 4 bits", "of 512, which cut groups of 64 columns"),
        ("gptq 8 bits", "of 512, which cut groups of 64 columns"),
        ("gptq 8 bits ordered", "gptq of 8 bits with desc_act is not divided over ranks"),
        ("awq", "which cut groups of 64 columns"),
    ],
)
def test_shares_that_cut_a_group_are_one_sentence(kind, words):
    format_, make = KINDS[kind]
    config, _ = make(64)
    with pytest.raises(ValueError, match=words):
        two_layers(format_, config, UnconnectedGroup(0, 16))


def test_the_bias_that_writers_add_must_be_zero():
    format_, config, tensors, _ = stored_layers("gptq 4 bits")
    model = two_layers(format_, config, tensors=tensors)
    load_weights(model, MemoryLoader({**tensors, "mlp.up_proj.bias": torch.zeros(256).half()}))
    with pytest.raises(ValueError, match=r"mlp.up_proj.bias is not zero, and the model adds no bias there"):
        load_weights(model, MemoryLoader({**tensors, "mlp.up_proj.bias": torch.ones(256).half()}))


@pytest.mark.parametrize(
    ("format_", "change", "words"),
    [
        (Gptq, {"bits": 5}, "bits of the quantization_config is 5; frame reads: 2, 3, 4, 8"),
        (Gptq, {"group_size": 0}, "group_size of the quantization_config must be a number above 0, or -1 for all"),
        (Gptq, {"group_size": "128"}, "group_size of the quantization_config must be"),
        (Gptq, {"checkpoint_format": "marlin"}, "checkpoint_format of the quantization_config is 'marlin'; frame "),
        (Gptq, {"dynamic": ["x"]}, "dynamic of the quantization_config must be an object, got ['x']"),
        (Gptq, {"dynamic": {"(": {}}}, "dynamic of the quantization_config has the pattern '(': "),
        (Gptq, {"dynamic": {"x": 3}}, "dynamic of the quantization_config has for 'x' no object: 3"),
        (Awq, {"modules_to_not_convert": "mlp"}, "modules_to_not_convert of the quantization_config must be a list of"),
        (Awq, {"bits": 8}, "bits of the quantization_config is 8; frame reads: 4"),
        (Awq, {"version": "gemv"}, "version of the quantization_config is 'gemv'; frame reads: gemm"),
        (Awq, {"zero_point": False}, "zero_point of the quantization_config is False; frame reads: True"),
    ],
)
def test_settings_that_are_not_read_are_one_sentence(format_, change, words):
    config = {"bits": 4, "group_size": 32, **change}
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        format_(setup_of(config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_", [Gptq, Awq])
def test_a_configuration_that_contradicts_the_tensors_is_one_sentence(format_):
    with pytest.raises(ValueError, match=r"but no tensor of the checkpoint ends in '.qweight'"):
        format_(setup_of({"bits": 4, "group_size": 32}, {"mlp.up_proj.weight": torch.zeros(2, 2)}))


def test_what_a_checkpoint_lacks_is_named_before_anything_is_read():
    format_, config, tensors, _ = stored_layers("gptq 4 bits")
    model = two_layers(format_, config, tensors=tensors)
    del tensors["mlp.up_proj.scales"]
    with pytest.raises(ValueError, match=r"1 missing: mlp.up_proj.scales"):
        load_weights(model, MemoryLoader(tensors))
    model = two_layers(format_, {**config, "group_size": 64}, tensors=tensors)
    with pytest.raises(ValueError, match=r"mlp.down_proj.scales is \[16, 64\], expected \[8, 64\]"):
        load_weights(model, MemoryLoader(tensors))


def test_patterns_change_layers_or_leave_them(tmp_path):
    """8 bits for some, groups of 32 for others, and two that are not quantised."""
    four, nibbles = gptq(4, 16)
    _, codes = gptq(8, 16)
    _, wide = gptq(4, 32, ordered=True)
    dynamic = {
        r"-:.*layers\.1\.self_attn\.k_proj": {},
        r"-:.*layers\.2\.mlp\..*": {},
        r"+:.*(v_proj|down_proj)$": {"bits": 8},
        r".*o_proj": {"group_size": 32, "desc_act": True},
    }

    def quantize(name, weight):
        made = codes if name.endswith(("v_proj", "down_proj")) else wide if name.endswith("o_proj") else nibbles
        return made(name, weight)

    left = re.compile(r".*(layers\.1\.self_attn\.k_proj|layers\.2\.mlp\.)")
    config = {**four, "dynamic": dynamic}
    quantised, plain = write_pair(tmp_path, "llama", config, quantize, ignored=lambda name: bool(left.match(name)))
    assert served(quantised, 12) == expected(plain, 12)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gptq 3 bits", marks=pytest.mark.slow),
        "gptq ordered",
        pytest.param("awq", marks=pytest.mark.matrix),
    ],
)
def test_tokens_on_one_rank_and_on_two(kind, tmp_path):
    config, quantize = KINDS[kind][1](16)
    quantised, plain = write_pair(tmp_path, "llama", config, quantize)
    wanted = expected(plain, 12)
    assert served(quantised, 12) == wanted
    assert served(quantised, 12, tensor_parallel_size=2) == wanted


def test_layers_that_awq_leaves(tmp_path):
    config, quantize = awq(16)
    config |= {"modules_to_not_convert": ["layers.0.self_attn.k_", "mlp.up"]}
    left = ("layers.0.self_attn.k_proj", "mlp.up_proj")
    quantised, plain = write_pair(tmp_path, "llama", config, quantize, ignored=lambda name: name.endswith(left))
    assert served(quantised, 12) == expected(plain, 12)


@pytest.mark.parametrize("kind", ["gptq 4 bits", pytest.param("awq", marks=pytest.mark.slow)])
def test_experts(kind, tmp_path):
    config, quantize = KINDS[kind][1](16)
    quantised, plain = write_pair(tmp_path, "qwen3-moe", config, quantize)
    assert served(quantised, 12) == expected(plain, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_weights_on_four_ranks_are_those_of_one(kind, tmp_path):
    format_, make = KINDS[kind]
    config, _ = make(64)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))

    def work(group):
        model = two_layers(format_, config, group)
        load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
        return model.up(x)

    size = 1 if kind in UNDIVIDED else 4
    (whole,) = run_ranks(1, work)
    assert torch.isfinite(whole).all()
    assert 0.01 < whole.std() < 100
    shares = run_ranks(size, work)
    halves = [torch.cat([share.chunk(2, -1)[half] for share in shares], -1) for half in range(2)]
    torch.testing.assert_close(torch.cat(halves, -1), whole, rtol=1e-4, atol=1e-4)


def _suite(kind, plugin):
    config = KINDS[kind][1](64)[0]
    return type("Suite", (QuantizationSuite,), {"plugin": plugin, "stored": lambda self: config})


class TestGptqOrdered(_suite("gptq ordered", "gptq")):
    """Its contract."""


class TestGptqBytes(_suite("gptq 8 bits", "gptq")):
    """Its contract."""


class TestAwq(_suite("awq", "awq")):
    """Its contract."""
