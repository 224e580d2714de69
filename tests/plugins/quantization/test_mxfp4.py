"""gpt-oss from files of mxfp4: the numbers of its blocks, its tokens beside transformers', and shares of ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.layers.methods import Methods
from frame.interfaces import (
    ExpertSpec,
    LoaderSetup,
    Model,
    ModelSetup,
    QuantizationSetup,
    QuantizationSpec,
    Routing,
    StoredTensor,
)
from frame.layers import load_weights
from frame.ops import Ops
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.quantization.codebook import FP4
from frame.plugins.quantization.mxfp4 import Mxfp4
from frame.testing.checkpoints import make_checkpoint
from frame.testing.ranks import run_ranks
from tests.layers.test_weights import make_build
from tests.plugins.quantization.test_checkpoints import expected, served

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def to_blocks(weight):
    """(blocks, scales) of a weight [E, K, N], as gpt-oss stores them: [E, N, K / 32, 16] and [E, N, K / 32]."""
    parts = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (parts.abs().amax(-1) / 6).clamp_min(1e-30).log2().ceil()
    near = (parts / exponents.exp2()[..., None])[..., None] - torch.tensor(FP4)
    codes = near.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write_mxfp4(folder, **overrides):
    """A gpt-oss whose experts are stored in mxfp4."""
    made = make_checkpoint(folder, "gpt-oss", **overrides)
    tensors = {}
    for name, tensor in load_file(made / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_blocks(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    values = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**values, "quantization_config": CONFIG}))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mxfp4(tmp_path_factory.mktemp("gpt-oss"))


def test_blocks_are_read_as_transformers_reads_them():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(90, 140, (3, 8, 2), generator=generator).to(torch.uint8)
    found = Ops().dequantize_table(blocks.view(torch.int32).flatten(-2), scales, torch.tensor(FP4))
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(found, theirs.transpose(1, 2))
    low, high = blocks & 15, blocks >> 4
    values = torch.tensor(FP4)[torch.stack((low, high), -1).int()].flatten(-2)
    assert torch.equal(found, (values * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2))


def test_gpt_oss_gives_the_tokens_of_transformers(folder):
    assert served(folder) == expected(folder)


@pytest.mark.parametrize("load_format", ["auto", pytest.param("dummy", marks=pytest.mark.slow)])
def test_two_ranks_of_which_each_holds_half_a_group(folder, load_format):
    """An inner size of 96 is three groups, and so each rank has one and a half."""
    whole = served(folder, 12, load_format=load_format)
    assert served(folder, 12, load_format=load_format, tensor_parallel_size=2) == whole


def test_ranks_that_hold_whole_experts(folder):
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert served(folder, 12, **settings) == expected(folder, 12)


class Experts(Model):
    """A layer of experts alone."""

    def __init__(self, setup, options=None):
        super().__init__(setup, options)
        spec = ExpertSpec(8, 64, 96, 2, bias=True, alpha=1.7, shift=1.0, limit=7.0, transposed=True, interleaved=True)
        self.experts = setup.build.experts("experts", spec)

    def forward(self, inputs, step):
        raise NotImplementedError

    def logits(self, hidden):
        raise NotImplementedError


def made(folder, group=None):
    build = make_build(group)
    build.methods = Methods(Mxfp4(QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32), CONFIG)))
    model = Experts(ModelSetup(build))
    load_weights(model, DummyLoader(LoaderSetup(folder, named=True)))
    return model.experts


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_few_tokens_compute_what_many_do(num_tokens, tmp_path):
    """Few dequantise the experts that they chose, many all; on four ranks a group lies on two of them."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 64, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(num_tokens)]).to(torch.int32)
    routing = Routing(torch.rand(num_tokens, 2, generator=generator), ids)
    layer = made(tmp_path)
    weights = {name: layer.method.dequantized(layer, name, torch.float32) for name in ("gate_up", "down")}
    wanted = torch.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), routing.weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (weights["gate_up"][expert] @ x[token] + layer.gate_up_bias[expert]).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.7 * gate)
            wanted[token] += share * (weights["down"][expert] @ inner + layer.down_bias[expert])
    torch.testing.assert_close(layer(x, routing), wanted, rtol=1e-5, atol=1e-5)
    for found in run_ranks(4, lambda group: made(tmp_path, group)(x, routing)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_configuration_that_contradicts_the_tensors_is_one_sentence():
    tensors = {"experts.gate_up_proj": StoredTensor(torch.bfloat16, (8, 64, 192))}
    setup = QuantizationSetup(QuantizationSpec(torch.device("cpu"), torch.float32), CONFIG, tensors)
    with pytest.raises(ValueError, match="says mxfp4, and the checkpoint has no tensor of _blocks"):
        Mxfp4(setup)
