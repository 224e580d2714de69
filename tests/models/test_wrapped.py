"""What wrapped classes of transformers are asked, given and refused."""

import gc
import json
import logging
import random
import weakref

import pytest
import torch

from frame.interfaces import LoaderSetup
from frame.layers import load_weights
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.loaders.safetensors import SafetensorsLoader
from frame.plugins.models.wrapped.parts import ExpertsPart
from frame.plugins.models.wrapped.trial import Sight, UnfitError, check_keywords, see
from frame.settings import PluginError
from frame.testing.checkpoints import make_checkpoint
from frame.testing.ranks import run_ranks
from tests.models.any_class import write_checkpoint
from tests.models.dense import make_model, run

IDS = random.Random(1).choices(range(3, 500), k=40)


def edited(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def wrapped(folder, group=None, **given):
    return make_model(folder, group, name="*", **given)


def near(logits, expected):
    return (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3", "gpt2", "olmo2", "phi3"])
def test_logits_equal_native_ones_over_ranks_too(family, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    expected = run(make_model(folder), IDS, [40])
    assert near(run(wrapped(folder), IDS, [25, 10, 1, 1, 3]), expected)
    for logits in run_ranks(2, lambda group: run(wrapped(folder, group), IDS, [40])):
        assert near(logits, expected)


def test_a_model_that_is_dropped_is_gone(tmp_path):
    """Else its weights would stay on the device for the life of the process."""
    model = wrapped(make_checkpoint(tmp_path, "qwen3-moe"))
    run(model, IDS, [40])
    parts = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not [part for part in parts if part() is not None]


def test_more_ranks_than_key_heads(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    expected = run(make_model(folder), IDS, [40])
    for logits in run_ranks(4, lambda group: run(wrapped(folder, group), IDS, [40])):
        assert near(logits, expected)


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_over_ranks_by_the_plan_of_the_class(name, tmp_path):
    model_type = {"GPTNeoXForCausalLM": "gpt_neox", "MixtralForCausalLM": "mixtral"}.get(name, "deepseek_v3")
    folder = write_checkpoint(tmp_path, name, model_type)
    expected = run(wrapped(folder), IDS, [40])
    for logits in run_ranks(2, lambda group: run(wrapped(folder, group), IDS, [40])):
        assert near(logits, expected)


def test_experts_of_a_release_that_knows_no_norm_behind_them(tmp_path, monkeypatch):
    """As in transformers 5.17, whose experts do not say `has_post_expert_norm`."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    make = MixtralExperts.__init__
    folder = write_checkpoint(tmp_path, "MixtralForCausalLM", "mixtral")
    expected = run(wrapped(folder), IDS, [40])

    def make_older(self, *args, **more):
        make(self, *args, **more)
        vars(self).pop("has_post_expert_norm", None)

    monkeypatch.setattr(MixtralExperts, "__init__", make_older)
    model = wrapped(folder)
    assert any(isinstance(module, ExpertsPart) for module in model.modules())
    assert torch.equal(run(model, IDS, [40]), expected)


def test_other_weights_under_the_names_of_a_checkpoint(tmp_path):
    from safetensors.torch import load_file

    first = write_checkpoint(tmp_path / "first", "MixtralForCausalLM", "mixtral")
    second = make_checkpoint(tmp_path / "second", "llama")
    model = wrapped(first)
    expected = run(model, IDS, [40])
    tensors = load_file(first / "model.safetensors")
    assert any(".block_sparse_moe.experts.3.w1." in name for name in tensors)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    assert model.load(tensors.items()) == set(tensors)
    model.finish_load()
    assert torch.equal(run(wrapped(first), IDS, [40]), expected)
    with pytest.raises(ValueError, match="missing"):
        load_weights(model, SafetensorsLoader(LoaderSetup(second)))


def test_dummy_weights_give_finite_logits(tmp_path):
    model = wrapped(make_checkpoint(tmp_path, "llama"))
    load_weights(model, DummyLoader(LoaderSetup(tmp_path, named=True)))
    assert torch.isfinite(run(model, IDS, [40])).all()


def allowed(window):
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


def test_what_masks_let_tokens_see():
    assert see(lambda batch, head, query, key: key <= query, 100) == Sight()
    assert see(allowed(24), 100) == Sight(window=24)
    assert see(allowed(100), 100) == Sight()
    assert see(lambda batch, head, query, key: key >= 0, 100) == Sight(causal=False)
    with pytest.raises(UnfitError, match="see neither"):
        see(lambda batch, head, query, key: (key <= query) & (key // 16 == query // 16), 100)
    with pytest.raises(UnfitError, match="more than their positions"):
        see(lambda batch, head, query, key: torch.empty(3, device="meta")[key] > 0, 100)


def test_unknown_keywords_are_errors():
    check_keywords("layer", {"sliding_window": 4, "position_ids": torch.zeros(1), "position_bias": None})
    with pytest.raises(UnfitError, match="layer calls attention with position_bias, which frame does not know"):
        check_keywords("layer", {"position_bias": torch.zeros(1)})


def open_llm(folder, **settings):
    from frame import LLM

    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=40, **settings)


def test_one_line_says_that_a_class_is_wrapped(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    open_llm(write_checkpoint(tmp_path, "StableLmForCausalLM", "stablelm"), model_impl="transformers").close()
    lines = [record.message for record in caplog.records if record.name == "frame.models"]
    assert lines == ["model: StableLmForCausalLM of transformers, with frame's attention and layers"]


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ({"architectures": ["NoSuchForCausalLM"], "auto_map": {"AutoModel": "a.B"}}, {}, "does not run"),
        ({"architectures": ["NoSuchForCausalLM"]}, {}, "no model 'NoSuchForCausalLM'.*has no class NoSuchForCausalLM"),
        ({"architectures": ["DogeForCausalLM"]}, {"model_impl": "frame"}, "no model 'DogeForCausalLM'"),
        (
            {"architectures": ["PegasusForConditionalGeneration"], "model_type": "pegasus", "is_encoder_decoder": True},
            {},
            "PegasusForConditionalGeneration is an encoder with a decoder",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(values, settings, reason, tmp_path):
    folder = edited(make_checkpoint(tmp_path, "llama"), **values)
    with pytest.raises((PluginError, ValueError), match=reason):
        open_llm(folder, **settings)


def test_a_recomputed_class_runs_on_one_rank(tmp_path):
    folder = write_checkpoint(tmp_path, "BloomForCausalLM", "bloom")
    with pytest.raises(ValueError, match="runs on 1 rank; sizes that work: 1"):
        open_llm(folder, model_impl="transformers", tensor_parallel_size=2)
