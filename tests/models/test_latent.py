"""Latent attention as checkpoints are published: old configurations, further layers, quantised forms, other weights."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frame.core.config.flat import from_flat
from frame.core.layers.latent import UpWeights
from frame.core.plugin_host.registry import Registry
from frame.plugins.models.latent import ignored_layers, stretched_scale
from frame.testing.checkpoints import make_checkpoint, roughen
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.families import FAMILIES
from frame.testing.latent_case import latent_spec
from tests.models.dense import make_model, run

#: Keys of the file of a DeepSeek V3 that its first readers wrote, which newer ones replace.
OLD_ROPE = {
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with running(from_flat({**SMALL, "model": str(folder), "num_threads": 1, **settings}), Registry.load()) as engine:
        found: list[list[int]] = greedy(engine, prompts(400))
        return found


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes config.json; None takes a key out."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("kimi_k2", "DeepseekV3ForCausalLM"),
        ("kimi_k2", "KimiK2ForCausalLM"),
    ],
)
def test_configurations_of_published_checkpoints(model_type: str, architecture: str, tmp_path: Path) -> None:
    """Kimi K2 has a model type that transformers lacks, and no key that says how positions are turned."""
    make_checkpoint(tmp_path, "deepseek-v3")
    expected = tokens(tmp_path)
    published = {"rope_parameters": None, "rope_interleave": None, "head_dim": None, "qk_head_dim": None, **OLD_ROPE}
    rewrite(tmp_path, model_type=model_type, architectures=[architecture], mlp_layer_types=None, **published)
    assert tokens(tmp_path) == expected


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe-lite", "longcat-flash"])
def test_layers_that_predict_further_tokens_are_not_loaded(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    expected = tokens(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = "model.mtp." if family == "longcat-flash" else "model.layers.3."
    more = {name.replace("model.layers.1.", further): value.clone() for name, value in tensors.items() if ".1." in name}
    more[f"{further}eh_proj.weight"] = torch.zeros(3)
    save_file({**tensors, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    assert tokens(tmp_path) == expected


def test_only_layers_behind_the_last_one_are_ignored() -> None:
    pattern = re.compile(ignored_layers(SimpleNamespace(num_hidden_layers=12)))
    for name, ignored in (("11", False), ("1", False), ("12", True), ("13", True), ("110", True)):
        assert bool(pattern.fullmatch(f"model.layers.{name}.self_attn.o_proj.weight")) == ignored


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "default"}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}, 1.3688879454113936**2),
        ({"rope_type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"type": "yarn", "factor": 40.0, "mscale_all_dim": 0.5}, 1.1844439727056968**2),
    ],
)
def test_yarn_scales_scores_by_the_square(parameters: dict[str, Any], expected: float) -> None:
    assert stretched_scale(SimpleNamespace(rope_parameters={"rope_theta": 1e4, **parameters})) == pytest.approx(
        expected
    )


class Halved(nn.Module):
    """A layer that keeps its weight in another form."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter((weight * 2).to(torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ (self.weight / 2).to(x.dtype).t()
        return out


def test_weights_in_another_form_are_multiplied_out() -> None:
    """And stay where they are when others come, since recorded steps hold the address."""
    first, second = torch.randn(6, 5), torch.randn(6, 5)
    layer = Halved(first)
    build: Any = SimpleNamespace(device=torch.device("cpu"))
    made = UpWeights(build, layer, latent_spec(num_heads=2, nope_dim=1, value_dim=2, rank=5))
    made.finish_load()
    assert torch.allclose(made.weight, first.view(2, 3, 5))
    address = made.weight.data_ptr()
    layer.weight.copy_(second * 2)
    made.finish_load()
    assert torch.allclose(made.weight, second.view(2, 3, 5))
    assert made.weight.data_ptr() == address


def test_plain_weights_are_not_copied(tmp_path: Path) -> None:
    model: Any = make_model(make_checkpoint(tmp_path, "deepseek-v2-lite"))
    attention = model.layers[0].attention.attention
    assert attention.made.weight.data_ptr() == attention.up.weight.data_ptr()
    assert "made.weight" not in dict(attention.named_parameters())


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("deepseek-v2", {"topk_method": "best"}, "no topk_method 'best' of a router; there are: greedy, group_limited"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob of DeepSeek V2 is not supported"),
        ("longcat-flash", {"router_bias": True}, "router_bias of LongCat-Flash is not supported"),
        ("glm-moe-dsa", {"indexer_types": ["shared", "full", "full"]}, r"indexer_types\[0\] is 'shared'"),
        ("deepseek-v3", {"hidden_act": "softsign"}, "no gated activation 'softsign'"),
    ],
)
def test_values_that_are_not_supported_are_named(family: str, changes: dict, said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        make_model(tmp_path)


def test_other_eight_bit_latents_are_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    said = "KV-cache dtype float8_e5m2 not supported by latent attention, which caches float32 or float8_e4m3fn"
    with pytest.raises(Exception, match=said):
        tokens(tmp_path, kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("beta", [0.5, 0.0])
def test_mistral4_equals_transformers(beta: float, tmp_path: Path) -> None:
    """By its own class, which transformers' table of causal models lacks."""
    from transformers import Mistral4Config, Mistral4ForCausalLM

    rope: dict[str, Any] = {**OLD_ROPE["rope_scaling"], "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"rope_type": rope.pop("type"), "factor": 16.0, "llama_4_scaling_beta": beta}
    config = {**FAMILIES["deepseek-v3"].config, "norm_topk_prob": beta > 0, "rope_parameters": rope}
    torch.manual_seed(0)
    model = Mistral4ForCausalLM(Mistral4Config(**config, initializer_range=0.2)).eval()
    roughen(model, 1.0)
    model.save_pretrained(tmp_path)
    ids = random.Random(0).choices(range(3, 512), k=60)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    for chunks in ([60], [33, 20, 1, 1, 1, 1, 1, 1, 1]):
        logits = run(make_model(tmp_path), ids, chunks)
        assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()
