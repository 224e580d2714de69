import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from frame.core.config.model_config import _REWRITTEN, ModelConfig
from frame.layers.rotary import rope_parameters
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_says_what_transformers_reads_from_it(family, tmp_path):
    make_checkpoint(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_text())
    config, expected = ModelConfig(values), AutoConfig.from_pretrained(tmp_path)
    for name in values.keys() - _REWRITTEN:
        wanted = getattr(expected, name)
        assert getattr(config, name) == (list(wanted) if isinstance(wanted, tuple) else wanted), name


def test_what_a_file_leaves_out_comes_from_the_family():
    config = ModelConfig({"model_type": "gpt2", "n_embd": 48})
    assert (config.n_embd, config.hidden_size, config.n_head) == (48, 48, 12)
    assert config.to_dict()["n_embd"] == 48
    assert ModelConfig({"model_type": "llama", "num_attention_heads": 8}).num_key_value_heads == 8
    with pytest.raises(AttributeError, match="nothing_like_it"):
        config.nothing_like_it  # noqa: B018


OLD_ROPES = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2"])
@pytest.mark.parametrize("scaling", OLD_ROPES)
def test_an_older_spelling_is_what_transformers_reads_from_it(model_type, scaling):
    values = {"model_type": model_type, "rope_theta": 500.0, "rope_scaling": scaling, "num_hidden_layers": 2}
    config, expected = ModelConfig(values), AutoConfig.for_model(**values)
    found = rope_parameters(config)
    assert "complete" not in vars(config)
    for name, value in found.items():
        assert expected.rope_parameters[name] == value, name


def test_an_older_spelling_of_a_family_with_more_to_it_is_read_by_transformers():
    config = ModelConfig({"model_type": "phi3", "rope_theta": 500.0, "rope_scaling": None})
    assert config.rope_parameters["rope_theta"] == 500.0
    assert "complete" in vars(config)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them():
    config = ModelConfig({"model_type": "bamba", "time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert config.time_step_limit == [0.0, float("inf")]
    assert config.mamba_d_conv == 4, "transformers' class is given them too"


def test_an_unknown_model_type_has_what_its_file_says():
    config = ModelConfig({"model_type": "unheard_of", "depth": 3})
    assert config.depth == 3
    assert config.model_type == "unheard_of"
    assert getattr(config, "width", None) is None


def test_the_demo_model_starts_without_transformers():
    program = (
        "import sys\n"
        "from frame.core.config.flat import from_flat\n"
        "from frame.offline.in_process import make_engine\n"
        "from frame.core.plugin_host.registry import Registry\n"
        "make_engine(from_flat({'kv_cache_memory_bytes': 1 << 24}), Registry.load()).close()\n"
        "print('transformers' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
