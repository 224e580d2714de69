"""What models with states refuse by name, and the text part of one that sees."""

import json
import random

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import greedy, prompts, running
from frame.testing.families import FAMILIES
from tests.models.dense import make_model, run

IDS = random.Random(1).choices(range(3, 512), k=40)
#: row, what its config.json says besides, what is said of that
REFUSED = [
    ("mamba", {"hidden_act": "gelu"}, "followed by 'silu', not by 'gelu'"),
    ("mamba2", {"hidden_act": "gelu"}, "followed by 'silu', not by 'gelu'"),
    ("qwen3-next", {"hidden_act": "gelu_pytorch_tanh"}, "followed by 'silu', not by 'gelu_pytorch_tanh'"),
    (
        "qwen3-5",
        {"layer_types": ["sliding_attention"] * 4},
        "no layer type 'sliding_attention'; there are: full_attention",
    ),
    ("lfm2", {"layer_types": ["sliding_attention"] * 3}, "no layer type 'sliding_attention'; there are: conv"),
    ("bamba", {"hidden_act": "gelu"}, "followed by 'silu', not by 'gelu'"),
    ("granite-hybrid", {"position_embedding_type": "alibi"}, "no position_embedding_type 'alibi'; there are: null"),
    ("nemotron-h", {"layers_block_type": ["moe"] * 4, "moe_latent_size": 8}, "moe_latent_size 8 of Nemotron-H"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "of 'relu2', not of 'silu'"),
    ("nemotron-h", {"sliding_window": 64}, "sliding_window 64 of Nemotron-H is not supported"),
    ("jamba", {"hidden_act": "gelu"}, "followed by 'silu', not by 'gelu'"),
    ("zamba2", {"hidden_act": "relu"}, "no hidden_act 'relu'; there are: gelu, silu"),
    ("zamba2", {"num_key_value_heads": 2}, "as many key/value heads as heads, not 2"),
    ("minimax", {"hidden_act": "gelu"}, "of 'silu', not of 'gelu'"),
    ("kimi-linear", {"q_lora_rank": 8}, "q_lora_rank 8 of Kimi-Linear is not supported"),
]


@pytest.mark.parametrize(("family", "values", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(family, values, message, tmp_path):
    folder = make_checkpoint(tmp_path, family)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(ValueError, match=message):
        make_model(folder)


def test_heads_that_ranks_cannot_divide_are_named(tmp_path):
    from frame.testing.ranks import run_ranks

    folder = make_checkpoint(tmp_path, "mamba2")
    with pytest.raises(Exception, match=r"the heads of backbone.layers.0.mixer: 8 cannot be split over 3 ranks"):
        run_ranks(3, lambda group: make_model(folder, group))


def test_the_text_part_of_qwen3_5_with_pictures(tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**FAMILIES["qwen3-5"].config, "initializer_range": 0.2}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
    }
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([IDS])).logits[0]
    logits = run(make_model(tmp_path), IDS, [40])
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "family", ["mamba2", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("mamba", "qwen3-next", "minimax"))]
)
def test_states_of_16_bits_take_half_and_change_little(family, tmp_path):
    """Prompts in chunks, many decodes, and prefixes whose states come from the cache."""
    given = {"max_model_len": 160, "kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": 32, "dtype": "float32"}
    given["model"] = str(make_checkpoint(tmp_path, family))
    found = {}
    for kind in ("auto", "float32", "float16"):
        with running(from_flat({**given, "mamba_ssm_cache_dtype": kind}), Registry.load()) as engine:
            look = {"function": lambda worker: worker.runner.layout.groups}
            groups = engine.executor.call("run", look)[0]
            size = sum(spec.state_bytes for group in groups if group.keeps_states for spec in group.specs)
            tokens = [greedy(engine, prompts(400, (3, 70, 41)), 24) for _ in range(2)]
            found[kind] = size, tokens
    assert found["auto"] == found["float32"]
    assert found["float16"][1] == found["auto"][1]
    assert found["float16"][0] < 0.75 * found["auto"][0]
