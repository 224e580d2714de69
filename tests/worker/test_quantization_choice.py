"""Which format weights have: what the checkpoint says, what the user says, and what is refused before any is read."""

import json
import re

import pytest
import torch

from frame import API_VERSION, Provider
from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.quantization import make_quantization
from frame.interfaces import QuantizationSpec, Unquantized
from frame.plugins.models.llama import LlamaForCausalLM
from frame.settings import PluginError
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.tiny import write_tiny
from tests.contract.quantizations import Rounded


class Stored(Rounded):
    online = False

    @classmethod
    def reads(cls, quantization_config):
        return quantization_config.get("quant_method") == "stored"

    def supports(self, spec):
        return "bf16 is too wide" if spec.dtype == torch.bfloat16 else None


@pytest.fixture
def registry():
    made = Registry.load()
    for name, kind in (("stored", Stored), ("rounded", Rounded)):
        provider = Provider(name, f"{kind.__module__}:{kind.__qualname__}", api=f"=={API_VERSION}")
        made.offers.append(Offer("quantization", provider, HERE, ""))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    write_tiny(made, "LlamaForCausalLM")
    return made


def chosen(registry, folder, name=None, dtype=torch.float32, **overrides):
    config = from_flat({"model": str(folder), "quantization": name, "hf_overrides": overrides})
    spec = QuantizationSpec(torch.device("cpu"), dtype)
    return make_quantization(config, read_checkpoint(config), registry, LlamaForCausalLM, spec)


STORED = {"quant_method": "stored"}


def test_without_a_word_weights_are_what_they_are(registry, folder):
    assert isinstance(chosen(registry, folder), Unquantized)


def test_the_checkpoint_says_its_format_wherever_it_does(registry, folder, tmp_path):
    assert type(chosen(registry, folder, quantization_config=STORED)) is Stored
    assert type(chosen(registry, folder, "stored", quantization_config=STORED)) is Stored
    text = {**json.loads((folder / "config.json").read_text()), "quantization_config": STORED}
    assert type(chosen(registry, folder, text_config=text)) is Stored
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(STORED))
    assert type(chosen(registry, tmp_path)) is Stored


def test_tensors_are_named_as_layers_know_them(registry, folder):
    found = chosen(registry, folder, "rounded").setup
    assert found.quantization_config is None
    assert found.tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "stored", "words"),
    [
        ("no-such", None, "no quantization 'no-such'"),
        (None, {"quant_method": "odd"}, "quantised as 'odd', which no quantization reads; there are: "),
        (None, {"bits": 4}, "are quantised without a quant_method, which no quantization reads"),
        (
            "rounded",
            STORED,
            "'rounded' does not read the checkpoint, which is quantised as 'stored'; what reads it: stored",
        ),
        ("rounded", {"quant_method": "odd"}, "quantised as 'odd'; what reads it: none that is installed"),
        ("stored", None, "quantization 'stored': the checkpoint states no quantization_config, and of weights"),
    ],
)
def test_what_does_not_agree_is_one_sentence(registry, folder, name, stored, words):
    with pytest.raises((ValueError, PluginError), match=re.escape(words)) as caught:
        chosen(registry, folder, name, **({"quantization_config": stored} if stored else {}))
    assert "\n" not in str(caught.value)


def test_a_format_that_cannot_compute_here_says_why(registry, folder):
    with pytest.raises(ValueError, match="quantization 'stored' cannot be used on cpu: bf16 is too wide"):
        chosen(registry, folder, "stored", torch.bfloat16, quantization_config=STORED)


def test_a_configuration_that_is_no_object_is_named(registry, folder):
    with pytest.raises(ConfigError, match=r"quantization_config in .* must be an object, got 'fp8'"):
        chosen(registry, folder, quantization_config="fp8")


def test_an_engine_serves_weights_that_it_quantised(registry, folder):
    """And shares no KV block with one that did not."""
    given, layouts = prompts(512), []
    for name in (None, "rounded"):
        with running(from_flat({**SMALL, "model": str(folder), "quantization": name}), registry) as engine:
            assert all(len(tokens) == 12 for tokens in greedy(engine, given))
            layouts.append(engine.scheduler._layout)
    assert layouts[0].numerics != layouts[1].numerics
    assert layouts[0].model != layouts[1].model
