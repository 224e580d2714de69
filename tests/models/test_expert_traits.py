"""What configurations of families with routed experts say changes their logits, and what is not served is refused."""

from __future__ import annotations

import json
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.interfaces.mesh import Mesh
from frame.core.layers.build import Build
from frame.core.plugin_host.registry import Registry
from frame.layers import Router, rope_frequencies
from frame.layout.check import sketch
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES
from tests.models.dense import make_model, run

IDS = random.Random(3).choices(range(3, 512), k=60)
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
#: (row, name of the value): another value, with which the same weights must give other logits.
CHANGES = {
    ("mixtral", "sliding_window"): None,
    ("mixtral", "num_experts_per_tok"): 1,
    ("qwen2-moe", "norm_topk_prob"): True,
    ("olmoe", "clip_qkv"): None,
    ("olmoe", "norm_topk_prob"): True,
    ("phimoe", "router_jitter_noise"): 0.0,
    ("phimoe", "sliding_window"): None,
    ("granite-moe", "embedding_multiplier"): 1.0,
    ("granite-moe", "attention_multiplier"): 0.25,
    ("granite-moe", "residual_multiplier"): 1.0,
    ("granite-moe", "logits_scaling"): 1.0,
    ("glm4-moe", "norm_topk_prob"): False,
    ("glm4-moe", "routed_scaling_factor"): 1.0,
    ("glm4-moe", "topk_group"): 4,
    ("glm4-moe", "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    ("dots1", "sliding_window"): 500,
    ("gpt-oss", "swiglu_limit"): 7.0,
    ("gpt-oss", "swiglu_alpha"): 1.0,
    ("gpt-oss", "sliding_window"): 500,
    ("gpt-oss", "rope_parameters"): {**_YARN, "beta_fast": 8.0, "beta_slow": 1.5, "truncate": True},
    ("minimax-m2", "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    ("ernie4.5-moe", "moe_norm_min"): 1e-12,
    ("hunyuan-moe", "moe_topk"): [2, 1, 2],
    ("hunyuan-moe", "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0},
    ("hy3", "router_scaling_factor"): 1.0,
    ("afmoe", "mup_enabled"): False,
    ("afmoe", "route_scale"): 1.0,
    ("afmoe", "sliding_window"): 500,
    ("exaone-moe", "routed_scaling_factor"): 1.0,
    ("exaone-moe", "sliding_window"): 500,
    ("mellum", "sliding_window"): 500,
    ("mimo-v2", "sliding_window"): 500,
    ("mimo-v2", "attention_value_scale"): None,
    ("gemma4-moe", "top_k_experts"): 1,
    ("gemma4-moe-shared", "top_k_experts"): 1,
    ("llama4", "attention_chunk_size"): 500,
    ("llama4", "attn_temperature_tuning"): False,
    ("llama4", "floor_scale"): 16,
    ("llama4", "attn_scale"): 0.1,
    ("llama4", "use_qk_norm"): False,
    ("llama4", "no_rope_layers"): [1, 1, 1, 1],
}
#: By row: the end of the names of tensors that only count for choosing experts, or weigh a shared one.
TENSORS = {
    "qwen2-moe": "shared_expert_gate.weight",
    "glm4-moe": "e_score_correction_bias",
    "minimax-m2": "e_score_correction_bias",
    "ernie4.5-moe": "e_score_correction_bias",
    "hy3": "expert_bias",
    "afmoe": "expert_bias",
    "exaone-moe": "e_score_correction_bias",
    "gpt-oss": "sinks",
    "mimo-v2": "sink_bias",
    "gemma4-moe": "router.per_expert_scale",
    "gemma4-moe-shared": "router.scale",
}
REFUSED = {
    ("mixtral", "hidden_act"): ("quick_gelu", "no activation 'quick_gelu' of experts; there are: silu, swish"),
    ("phimoe", "num_experts_per_tok"): (3, "num_experts_per_tok is 3; a sparsemixer's choice is of 2 experts"),
    ("minimax-m2", "scoring_func"): ("softmax", "scoring_func is 'softmax'; experts of MiniMax-M2 are chosen by"),
    ("minimax-m2", "shared_intermediate_size"): (64, "shared_intermediate_size is 64; MiniMax-M2 is served without"),
    ("hunyuan-moe", "use_cla"): (True, "use_cla is true; layers of Hunyuan that share keys and values"),
    ("hunyuan-moe", "moe_intermediate_size"): ([96, 96, 48], "moe_intermediate_size is 48 in a layer"),
    ("mimo-v2", "v_head_dim"): (32, "v_head_dim is 32; values are served up to the width of keys, 24"),
    ("hunyuan-moe", "num_shared_expert"): (2, "num_shared_expert is 2 in a layer"),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, logits) of a row's checkpoint, whose configuration tests change and put back."""

    def made(row):
        folder = make_checkpoint(tmp_path_factory.mktemp("traits"), row)
        return folder, run(make_model(folder), IDS, [60])

    return cache(made)


def changed(folder, to, **values):
    """A copy of the checkpoint with other values in its configuration."""
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return to


@pytest.mark.parametrize(("row", "name"), CHANGES)
def test_each_value_changes_the_logits(row, name, published, tmp_path):
    folder, logits = published(row)
    other = run(make_model(changed(folder, tmp_path, **{name: CHANGES[row, name]})), IDS, [60])
    assert (other - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize("row", TENSORS)
def test_each_of_these_tensors_changes_the_logits(row, published, tmp_path):
    folder, logits = published(row)
    path = changed(folder, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith(TENSORS[row])]
    assert names
    save_file({**tensors, **{name: tensors[name] * 0 for name in names}}, path, {"format": "pt"})
    other = run(make_model(tmp_path), IDS, [60])
    assert (other - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize(("row", "name"), REFUSED)
def test_what_is_not_served_is_refused(row, name, published, tmp_path):
    value, words = REFUSED[row, name]
    folder = changed(published(row)[0], tmp_path, **{name: value})
    with pytest.raises(ValueError, match=words):
        make_model(folder)


@pytest.mark.parametrize(("length", "kind", "scale"), [(256, "short_factor", 1.2), (257, "long_factor", 1.3)])
def test_phi_3_5_moe_scales_positions_by_the_served_length(length, kind, scale):
    """As its authors do; transformers 5.23 takes the short factors with the long scale beyond the trained length."""
    rope = FAMILIES["phimoe-longrope"].config["rope_parameters"]
    frequencies, found = rope_frequencies(
        SimpleNamespace(rope_parameters=rope, max_position_embeddings=512), 16, length
    )
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(frequencies, plain / torch.tensor(rope[kind]))
    assert found == scale


def test_files_of_minimax_m2_say_themselves_how_many_features_turn(published):
    """Transformers 5.17 makes no `partial_rotary_factor` of their `rotary_dim`."""
    folder, logits = published("minimax-m2")
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    assert torch.equal(run(make_model(folder, config=config), IDS, [60]), logits)


def test_windows_of_published_mimo_v2_have_so_many_tokens_before_the_query(published, tmp_path):
    folder = changed(published("mimo-v2")[0], tmp_path, sliding_window_size=24)
    config, registry = from_flat({"model": str(folder)}), Registry.load()
    _, build = sketch(config, read_checkpoint(config), registry, Mesh(), Build)
    windows = {layer.backend_spec.window for layer in build.caches.values()}
    assert windows == {0, 25} == {0, AutoConfig.from_pretrained(folder).sliding_window}


@pytest.mark.parametrize("row", ["glm4-moe", "ernie4.5-moe", "hunyuan-moe", "hy3", "dots1"])
def test_routers_that_families_keep_in_float32_stay_there(row, published):
    routers = [one for one in make_model(published(row)[0], dtype=torch.bfloat16).modules() if isinstance(one, Router)]
    assert routers
    assert {one.linear.weight.dtype for one in routers} == {torch.float32}


def test_what_routers_of_gemma4_are_given_is_rounded_as_in_transformers(tmp_path):
    folder = make_checkpoint(tmp_path, "gemma4-moe", hidden_size=48)  # whose root is no power of two
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model
    hidden = 3 * torch.randn(500, 48, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    for ours, other in zip(make_model(folder, dtype=torch.bfloat16).layers, theirs.layers, strict=True):
        with torch.inference_mode():
            weights, ids = ours.experts.router(hidden)
            _, wanted, chosen = other.router(hidden)
        assert torch.equal(ids.long(), chosen)
        torch.testing.assert_close(weights, wanted)


def text_part_equals(folder, config, *, exchanged=False, **vision):
    """Whether the text part of a checkpoint with pictures gives transformers' logits.

    With `exchanged` its joined experts have their last two axes the other way round.
    """
    from transformers import AutoModelForImageTextToText

    made = AutoConfig.for_model(config, **vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(made, dtype=torch.float32)
    model.save_pretrained(folder)
    with torch.inference_mode():
        want = model.eval()(input_ids=torch.tensor([IDS])).logits[0]
    if exchanged:
        file = folder / "model.safetensors"
        tensors = {name: one.mT.contiguous() if ".experts." in name else one for name, one in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return (run(make_model(folder), IDS, [60]) - want).abs().max() < 2e-4 * want.abs().max()


@pytest.mark.parametrize("exchanged", [False, True], ids=["as transformers saves", "as published"])
@pytest.mark.parametrize("inner", [24, 32, 64], ids=["plain", "square gate and up", "square down"])
def test_text_part_of_qwen3_vl_moe(inner, exchanged, tmp_path):
    """Published files have the inputs of experts first, and transformers saves them last.

    How a square tensor lies, the other one tells.
    """
    text = {**FAMILIES["qwen3-moe"].config, "initializer_range": 0.2, "mlp_only_layers": [1]}
    text |= {"hidden_size": 64, "moe_intermediate_size": inner}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision = {**sizes, "deepstack_visual_indexes": [0], "patch_size": 8, "num_position_embeddings": 16}
    assert text_part_equals(tmp_path, "qwen3_vl_moe", exchanged=exchanged, text_config=text, vision_config=vision)


def test_text_part_of_llama4(tmp_path):
    text = {**FAMILIES["llama4"].config, "initializer_range": 0.2}
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8, "vision_output_dim": 16, "projector_input_dim": 16}
    vision["projector_output_dim"] = 16
    assert text_part_equals(tmp_path, "llama4", text_config=text, vision_config=vision)


def test_text_part_of_gemma4(tmp_path):
    text = {**FAMILIES["gemma4-moe"].config, "initializer_range": 0.2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64}
    assert text_part_equals(tmp_path, "gemma4", text_config=text, vision_config=vision)
