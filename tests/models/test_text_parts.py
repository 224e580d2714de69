"""Text parts of models that see, against transformers: positions of three axes, equal and unequal, names, the head."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_choice import read_model_config
from frame.core.plugin_host.registry import Registry
from frame.layers import RotaryEmbedding
from frame.layers.rotary import frequency_axes
from frame.testing.checkpoints import roughen
from frame.testing.families import FAMILIES, TINY
from tests.models.dense import make_model, run

IDS = random.Random(3).choices(range(3, 512), k=40)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_HALF = {**_ROPE, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_SEES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
}  # fmt: skip
_DEEP = {**_SEES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
#: Model type → configuration of its text part, of the part that sees.
PARTS = {
    "qwen2_vl": (
        {"rope_parameters": _ROPE},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64, "patch_size": 8},
    ),
    "qwen2_5_vl": ({"rope_parameters": _ROPE}, {**_SEES, "fullatt_block_indexes": [0]}),
    "qwen3_vl": ({"rope_parameters": _ROPE}, _DEEP),
    "qwen3_vl_moe": ({"rope_parameters": _ROPE, "num_experts": 4, "mlp_only_layers": [1], **_EXPERTS}, _DEEP),
    "qwen3_5": (
        {**FAMILIES["qwen3-5"].config, "rope_parameters": {**_HALF, "mrope_section": [2, 1, 1]}},
        {**_SEES, "num_position_embeddings": 16},
    ),
    "glm4v": ({"rope_parameters": _HALF, "attention_bias": True}, {**_SEES, "image_size": 16}),
    "glm4v_moe": (
        {
            "rope_parameters": _HALF, "attention_bias": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "n_shared_experts": 1, **_EXPERTS,
        },
        {**_SEES, "image_size": 16},
    ),
}  # fmt: skip


def made(folder, kind, **more):
    """transformers' model of random weights, written to `folder`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision = PARTS[kind]
    text = {**TINY, **text, "initializer_range": 0.2}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        roughen(model, 1.0)
    model.save_pretrained(folder)
    return model


def model_of(folder, **settings):
    """frame's model of a folder, configured as an engine would."""
    checkpoint, registry = read_checkpoint(from_flat({"model": str(folder), **settings})), Registry.load()
    text = read_model_config(checkpoint, registry)
    return make_model(folder, config=SimpleNamespace(get_text_config=lambda: text), name=checkpoint.architecture)


def close(found, want):
    return (found - want).abs().max() < 2e-4 * want.abs().max()


def as_with_a_picture():
    """int64 [3, T]: text, the 3 × 4 patches of a picture, text that goes on behind its longer side."""
    rows = torch.arange(len(IDS)).repeat(3, 1)
    patches = torch.arange(12)
    rows[:, 10:22] = 10 + torch.stack((patches * 0, patches // 4, patches % 4))
    rows[:, 22:] = torch.arange(14, 14 + len(IDS) - 22)
    return rows


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in PARTS), ("qwen2_vl", True), ("qwen3_5", True)])
def test_logits_equal_transformers_for_equal_and_unequal_axes(kind, tied, tmp_path):
    reference = made(tmp_path, kind, tie_word_embeddings=tied)
    places = as_with_a_picture()
    with torch.inference_mode():
        text = reference(input_ids=torch.tensor([IDS])).logits[0]
        seen = reference(input_ids=torch.tensor([IDS]), position_ids=places[:, None]).logits[0]
    assert not close(seen, text)
    assert model_of(tmp_path).position_axes == 3
    for chunks, rows, want in (
        ([15, 23, 1, 1], None, text),
        ([40], torch.arange(40)[None], text),
        ([40], places, seen),
        ([15, 23, 1, 1], places, seen),
    ):
        assert close(run(model_of(tmp_path), IDS, chunks, rows), want)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_file_with_the_text_beside_the_vision_config_is_read(kind, tmp_path):
    reference = made(tmp_path, kind)
    file = tmp_path / "config.json"
    nested = json.loads(file.read_text())
    text = {**nested.pop("text_config"), **nested, "rope_theta": 10000.0}
    sections = text.pop("rope_parameters")["mrope_section"]
    text.pop("layer_types")
    file.write_text(json.dumps({**text, "rope_scaling": {"type": "mrope", "mrope_section": sections}}))
    with torch.inference_mode():
        want = reference(input_ids=torch.tensor([IDS])).logits[0]
    model = model_of(tmp_path)
    assert model.position_axes == 3
    assert close(run(model, IDS, [40]), want)


def test_axes_of_frequencies():
    assert frequency_axes([2, 3, 3], 8, mixed=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert frequency_axes([4, 2, 2], 8, mixed=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert frequency_axes([11, 11, 10], 32, mixed=True).bincount().tolist() == [11, 11, 10]


@pytest.mark.parametrize("sections", [[4, 4], [4, 2, 3], [8, 0, 0, 0], "abc", [4.0, 2, 2], [10, -1, -1], None, 8])
def test_sections_that_are_not_all_frequencies_are_refused(sections):
    with pytest.raises(ValueError, match="must be three numbers of frequencies, 8 together: half of the features"):
        frequency_axes(sections, 8, mixed=False)


def test_a_checkpoint_says_whether_axes_are_mixed(tmp_path):
    made(tmp_path, "qwen3_vl")
    for stated, runs in ((True, False), (False, True)):
        overrides = {"text_config": {"rope_parameters": {"mrope_interleaved": stated}}}
        parts = model_of(tmp_path, hf_overrides=overrides).modules()
        rotary = next(one for one in parts if isinstance(one, RotaryEmbedding))
        assert (rotary.axes.tolist() == sorted(rotary.axes.tolist())) == runs


def test_greedy_tokens_of_the_engine_equal_transformers(tmp_path, monkeypatch):
    from frame.testing.engines import SMALL, drain, request, running

    reference = made(tmp_path, "qwen3_vl")
    given, turn = set(), RotaryEmbedding.forward

    def noted(self, positions, *tensors):
        given.add(len(positions))
        return turn(self, positions, *tensors)

    monkeypatch.setattr(RotaryEmbedding, "forward", noted)
    prompts = [IDS[:30], IDS[5:12], IDS[3:4]]
    config = from_flat({"model": str(tmp_path), **SMALL, "max_num_batched_tokens": 16})
    with running(config, Registry.load()) as engine:
        outputs = drain(engine, [request(f"{place}", one, 8) for place, one in enumerate(prompts)])
    assert given == {3}
    for place, prompt in enumerate(prompts):
        found = [token for one in outputs[f"{place}"] for token in one.token_ids]
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=False
            )
        assert found == whole[0, len(prompt) :].tolist()
