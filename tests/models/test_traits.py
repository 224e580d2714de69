"""What families tell as data: each trait of a row changes its logits, and what cannot be served is refused by name."""

import json
import random
from dataclasses import fields, replace
from functools import cache, partial

import pytest
import torch
from transformers.activations import ACT2FN

from frame.core.config.model_config import ModelConfig
from frame.core.ops import Ops
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.layers import WeightError
from frame.plugins.models.activations import ACTIVATIONS, gate_activation, plain_activation
from frame.plugins.models.dense import DenseDecoder, Rope, Traits
from frame.plugins.models.gemma import GemmaForCausalLM
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES, TINY, dense
from tests.models.dense import make_model, run

#: The rows whose layers are told by traits; Gemma 3n and 4 have layers of their own.
TOLD = [family for family in dense.ROWS if not family.startswith(("gemma3n", "gemma4"))]
IDS = random.Random(1).choices(range(3, 512), k=40)


class Parts:
    """As much of a build as activations need."""

    ops = Ops()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a family's checkpoint, which nobody changes."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp("traits"), family))


def model_class(family):
    registry = Registry.load()
    return registry.resolve(registry.choose("model", FAMILIES[family].architecture))


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def reference(folder):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]


def near(logits, expected):
    return (logits - expected).abs().max() < 2e-4 * expected.abs().max()


def without_each(traits, head_dim, base):
    """(name, the traits with this one as Llama has it), of each trait of a layer that cannot be without effect.

    Which settings of rope a layer type has, and what part of a head turns, may be in the file as well.
    """
    for field in fields(Traits):
        if field.name != "rope" and getattr(traits, field.name) not in (field.default, head_dim**-0.5):
            yield field.name, replace(traits, **{field.name: field.default})
    if traits.rope is None:
        yield "rope", replace(traits, rope=Rope())
        return
    for name in ("interleaved", "base", "after_norms", "growth"):
        rope = replace(traits.rope, **{name: getattr(Rope(), name)})
        if rope != traits.rope and traits.rope.base != base:
            yield f"rope.{name}", replace(traits, rope=rope)


@pytest.mark.parametrize("family", TOLD)
def test_each_trait_of_a_row_changes_its_logits(family, published, monkeypatch):
    folder, found = published(family), model_class(family)
    expected, original = run(make_model(folder), IDS, [40]), found.traits
    config = ModelConfig(json.loads((folder / "config.json").read_text()))
    base = config.rope_parameters.get("rope_theta")
    count = config.num_hidden_layers
    layers = [dict(without_each(original(config, index), TINY["head_dim"], base)) for index in range(count)]
    for name in {name for layer in layers for name in layer}:
        if (FAMILIES[family].architecture, name) == ("NanoChatForCausalLM", "rope.after_norms"):
            continue  # norms without weights give the same before and after a rotation

        def changed(config, index, name=name):
            return layers[index].get(name, original(config, index))

        with monkeypatch.context() as patch:
            patch.setattr(found, "traits", staticmethod(changed))
            try:
                logits = run(make_model(folder), IDS, [40])
            except (WeightError, PluginError):
                continue  # other tensors, or a part that cannot be built so
            assert not near(logits, expected), name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    torch.manual_seed(0)
    gate = torch.cat((torch.linspace(-12, 12, 1018), torch.tensor([0.0, -0.0, 1e-4, -1e-4, 60.0, -60.0]))).view(4, 256)
    up = torch.randn(gate.shape)
    expected = ACT2FN[name](gate)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=2e-6)
    close(plain_activation(Parts, name)(gate.clone()), expected)
    close(gate_activation(Parts, name)(torch.cat((gate, up), -1)), expected * up)


@pytest.mark.parametrize(("make", "kind"), [(plain_activation, "activation"), (gate_activation, "gated activation")])
def test_an_unknown_activation_is_named_with_the_choices(make, kind):
    with pytest.raises(ValueError, match=f"no {kind} 'gelu_9'; there are: gelu, gelu_accurate, "):
        make(Parts, "gelu_9")


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("gemma", {"hidden_act": "softplus"}, "no gated activation 'softplus'; there are: gelu, "),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("arcee", {"hidden_act": "mish"}, "no activation 'mish'; there are: gelu, "),
        ("glm", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "no rope variant 'axial'; there are: "),
        ("glm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.45}}, "must be even"),
        ("exaone4", {"layer_types": ["chunked_attention"] * 4}, "layer 0 is of type 'chunked_attention'; there are: "),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "needs original_max_position_embeddings"),
    ],
)
def test_values_that_are_not_supported_are_named(family, values, message, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    config = ModelConfig({**json.loads((folder / "config.json").read_text()), **values})
    with pytest.raises(ValueError, match=message):
        make_model(folder, config=config)


def test_gelu_of_the_first_gemmas_is_its_approximation(tmp_path):
    folder = make_checkpoint(tmp_path, "gemma")
    expected = run(make_model(folder), IDS, [40])
    values = {**json.loads((folder / "config.json").read_text()), "hidden_act": "gelu"}
    assert GemmaForCausalLM.traits(ModelConfig(values), 0).activation == "gelu_pytorch_tanh"
    edit(folder, hidden_act="gelu")
    assert near(run(make_model(folder, config=ModelConfig(values)), IDS, [40]), expected)
    assert near(reference(folder), expected)


@pytest.mark.parametrize("family", ["glm", "glm4", "nemotron"])
def test_half_of_each_head_turns_where_the_file_says_nothing(family, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config = ModelConfig(json.loads((folder / "config.json").read_text()))
    assert near(run(make_model(folder, config=config), IDS, [40]), reference(folder))


def test_nemotron_without_a_number_of_key_heads_has_one_for_each_query_head(tmp_path):
    folder = make_checkpoint(tmp_path, "nemotron", num_key_value_heads=4)
    expected = reference(folder)
    edit(folder, num_key_value_heads=None)
    assert near(run(make_model(folder), IDS, [40]), expected)


def test_constants_of_a_learned_activation_are_read_or_known(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "apertus")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = reference(folder)
    constants = [name for name in tensors if name.endswith(("act_fn.beta", "act_fn.eps"))]
    assert len(constants) == 6
    changed = {name: torch.full_like(tensors[name], 0.9 if name.endswith("beta") else -0.5) for name in constants}
    save_file({**tensors, **changed}, file, metadata={"format": "pt"})
    other = run(make_model(folder), IDS, [40])
    assert near(other, reference(folder))
    assert not near(other, plain)
    save_file({name: tensors[name] for name in tensors.keys() - constants}, file, metadata={"format": "pt"})
    assert near(run(make_model(folder), IDS, [40]), plain)


@pytest.mark.parametrize("family", ["olmo", "nanochat"])
def test_norms_without_weights_have_no_tensors(family, tmp_path):
    from safetensors.torch import load_file

    assert not [name for name in load_file(make_checkpoint(tmp_path, family) / "model.safetensors") if "norm" in name]


def test_weights_that_arrive_again_change_what_was_made_of_them(tmp_path):
    """Norms of weight + 1 and learned activations keep numbers made from their weights."""
    from safetensors.torch import load_file

    for family in ("nemotron", "apertus"):
        first = make_checkpoint(tmp_path / family / "first", family)
        second = make_checkpoint(tmp_path / family / "second", family, seed=1)
        model = make_model(first)
        for _ in range(2):
            model.load(load_file(second / "model.safetensors").items())
            model.finish_load()
        assert torch.equal(run(model, IDS, [40]), run(make_model(second), IDS, [40]))


def test_families_of_traits_are_dense_decoders():
    assert all(issubclass(model_class(family), DenseDecoder) for family in TOLD)
