"""Gemma 3n and 4: what the table of families does not show: stored factors, tensors that nobody reads, refusals."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.config.model_config import ModelConfig
from frame.interfaces import ForwardStep, ModelInputs
from frame.plugins.models.shared_keys import shares_keys
from frame.testing.checkpoints import make_checkpoint
from tests.models.dense import make_model, run

IDS = random.Random(1).choices(range(3, 512), k=40)


@pytest.fixture(params=["gemma4-shared", "gemma3n"])
def shared(request, tmp_path):
    """The folder of a checkpoint whose last layers have no keys of their own, with embeddings for each layer."""
    return make_checkpoint(tmp_path / "shared", request.param)


of_gemma4 = pytest.mark.parametrize("shared", ["gemma4-shared"], indirect=True)


def reference(folder):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]


def near(logits, expected):
    return (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@of_gemma4
def test_the_factor_of_each_layer_is_read(shared):
    plain = run(make_model(shared), IDS, [40])
    file = shared / "model.safetensors"
    tensors = load_file(file)
    factors = {name: torch.full_like(tensors[name], 0.7) for name in tensors if name.endswith("layer_scalar")}
    assert len(factors) == 6
    save_file({**tensors, **factors}, file, metadata={"format": "pt"})
    logits = run(make_model(shared), IDS, [40])
    assert near(logits, reference(shared))
    assert not near(logits, plain)


def test_keys_of_layers_that_share_others_are_not_read(shared):
    expected = run(make_model(shared), IDS, [40])
    file = shared / "model.safetensors"
    tensors = load_file(file)
    assert "model.layers.5.self_attn.k_proj.weight" not in tensors
    for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = torch.randn(3, 5)
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(run(make_model(shared), IDS, [40]), expected)


def test_layers_that_share_keys_have_no_cache(shared):
    from frame.core.layers.attention import Attention

    kept = [module.name for module in make_model(shared).modules() if isinstance(module, Attention)]
    assert kept == [f"model.layers.{index}.self_attn" for index in range(3)]


def test_no_release_of_transformers_need_say_which_layers_share_keys(shared, monkeypatch):
    """The classes of transformers 5.17 have no `kv_sharing_modes`."""
    from transformers import Gemma3nTextConfig, Gemma4TextConfig

    expected = run(make_model(shared), IDS, [40])
    for made in (Gemma3nTextConfig, Gemma4TextConfig):
        monkeypatch.delattr(made, "kv_sharing_modes", raising=False)
    assert torch.equal(run(make_model(shared), IDS, [40]), expected)


@pytest.mark.parametrize(("number", "first"), [(0, 4), (1, 3), (2, 2)])
def test_the_last_layers_share_keys(number, first):
    config = SimpleNamespace(num_hidden_layers=4, num_kv_shared_layers=number, layer_types=["near", "far"] * 2)
    assert [shares_keys(config, index) for index in range(4)] == [index >= first for index in range(4)]


@pytest.mark.parametrize("number", [3, 4, 5])
def test_keys_that_no_layer_keeps_are_not_shared(number):
    config = SimpleNamespace(num_hidden_layers=4, num_kv_shared_layers=number, layer_types=["near", "far"] * 2)
    with pytest.raises(ValueError, match=f"layer 3 of type 'far' shares keys, .* num_kv_shared_layers={number} keeps"):
        shares_keys(config, 3)


def test_embeddings_in_place_of_ids_are_refused(shared):
    model = make_model(shared)
    inputs = ModelInputs(torch.arange(2)[None], None, torch.zeros(2, 64))
    with pytest.raises(ValueError, match="needs the ids of tokens"):
        model(inputs, ForwardStep(plans=[None], batches=[None]))


@of_gemma4
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported; use: "),
        ({"enable_moe_block": True, "num_experts": 4}, "experts needs num_experts, top_k_experts and moe_inter"),
    ],
    ids=["attention ahead", "sizes of experts"],
)
def test_what_is_not_served_is_named(values, said, shared):
    values = {**json.loads((shared / "config.json").read_text()), **values}
    with pytest.raises(ValueError, match=f"Gemma 4 with {said}"):
        make_model(shared, config=ModelConfig(values))


def test_the_text_part_of_a_checkpoint_that_sees(shared, tmp_path):
    expected = run(make_model(shared), IDS, [40])
    folder = tmp_path / "sees"
    shutil.copytree(shared, folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.patch_embedder.x", "audio_tower.layers.0.y", "embed_vision.z", "embed_audio.z")
    renamed |= {f"model.{name}.weight": torch.zeros(1) for name in others}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    seeing = values["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    config = ModelConfig({**values, "architectures": [seeing]})
    assert torch.equal(run(make_model(folder, config=config), IDS, [40]), expected)
