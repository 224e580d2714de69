"""Whole checkpoints in the forms in which they are published: sharded, 16-bit, tied, with pictures, over ranks."""

import json
import random
from functools import cache

import pytest
import torch

from frame.core.interfaces.model import Model
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LoaderSetup
from frame.layers import load_weights
from frame.plugins.loaders.dummy import DummyLoader
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES
from frame.testing.ranks import run_ranks
from tests.models.dense import fuse_experts, make_model, run

IDS = random.Random(1).choices(range(3, 512), k=40)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a family's checkpoint, which nobody changes."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp("published"), family))


def reference_logits(folder, ids=IDS):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]


def assert_near(logits, reference):
    assert (logits - reference).abs().max() < 2e-4 * reference.abs().max()


#: But MiniMax-01: transformers reads the decays of states from the file, where they are rounded, too.
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "minimax"])
def test_sharded_bfloat16(family, tmp_path):
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_near(run(make_model(folder), IDS, [40]), reference_logits(folder))


@pytest.mark.product
@pytest.mark.each_cache
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_over_ranks(family, size, published):
    folder = published(family)
    expected = run(make_model(folder), IDS, [40])
    for logits in run_ranks(size, lambda group: run(make_model(folder, group), IDS, [40])):
        assert_near(logits, expected)


def test_experts_fused_in_the_checkpoint(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    expected = run(make_model(folder), IDS, [40])
    fuse_experts(folder)
    assert torch.equal(run(make_model(folder), IDS, [40]), expected)


def test_text_part_of_gemma3_with_pictures(tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**FAMILIES["gemma3"].config, "initializer_range": 0.2}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([IDS])).logits[0]
    assert_near(run(make_model(tmp_path), IDS, [40]), expected)


def test_weights_of_another_checkpoint_by_name(tmp_path):
    from safetensors.torch import load_file

    first = make_checkpoint(tmp_path / "first", "qwen2", seed=0)
    second = make_checkpoint(tmp_path / "second", "qwen2", seed=1)
    model = make_model(first)
    for name, tensor in load_file(second / "model.safetensors").items():
        model.load([(name, tensor)])
    model.finish_load()
    assert torch.equal(run(model, IDS, [40]), run(make_model(second), IDS, [40]))


@pytest.mark.each_cache
@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_give_finite_logits(family, published):
    model = make_model(published(family))
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, DummyLoader(LoaderSetup(published(family), named=True)))
    assert torch.isfinite(run(model, IDS, [40])).all()


@pytest.mark.each_cache
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_stay_near(family, published):
    folder = published(family)
    expected = run(make_model(folder), IDS, [40])
    logits = run(make_model(folder, dtype=torch.bfloat16), IDS, [40])
    assert logits.dtype == torch.bfloat16
    # transformers' own 16-bit logits of Zamba2's row stay as near: 0.92
    assert torch.cosine_similarity(logits.float(), expected, dim=-1).mean() > (0.85 if family == "zamba2" else 0.95)


def test_every_offered_model_is_one():
    registry = Registry.load()
    offered = {provider.name: registry.resolve(provider) for provider in registry.providers("model")}
    assert all(issubclass(found, Model) for found in offered.values())
    assert {family.architecture for family in FAMILIES.values()} <= set(offered)


def test_a_window_that_is_switched_off_is_none(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 8, "use_sliding_window": False}))
    assert_near(run(make_model(folder), IDS, [40]), reference_logits(folder))
