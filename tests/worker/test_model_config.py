import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from frame.core.testing.checkpoints import FAMILIES, make_checkpoint
from frame.core.worker.model_config import _REWRITTEN, ModelConfig


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_says_what_transformers_reads_from_it(family, tmp_path):
    make_checkpoint(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_text())
    config, expected = ModelConfig(values), AutoConfig.from_pretrained(tmp_path)
    for name in values.keys() - _REWRITTEN:
        assert getattr(config, name) == getattr(expected, name), name


def test_what_a_file_leaves_out_comes_from_the_family():
    config = ModelConfig({"model_type": "gpt2", "n_embd": 48})
    assert (config.n_embd, config.hidden_size, config.n_head) == (48, 48, 12)
    assert config.to_dict()["n_embd"] == 48
    assert ModelConfig({"model_type": "llama", "num_attention_heads": 8}).num_key_value_heads == 8
    with pytest.raises(AttributeError, match="nothing_like_it"):
        config.nothing_like_it  # noqa: B018


def test_an_older_spelling_is_read_by_transformers():
    config = ModelConfig({"model_type": "llama", "rope_theta": 500.0, "rope_scaling": None})
    assert config.rope_parameters["rope_theta"] == 500.0


def test_an_unknown_model_type_has_what_its_file_says():
    config = ModelConfig({"model_type": "unheard_of", "depth": 3})
    assert config.depth == 3
    assert config.model_type == "unheard_of"
    assert getattr(config, "width", None) is None


def test_the_demo_model_starts_without_transformers():
    program = (
        "import sys\n"
        "from frame.core.config.flat import from_flat\n"
        "from frame.core.engine.engine import make_engine\n"
        "from frame.core.registry import Registry\n"
        "make_engine(from_flat({'kv_cache_memory_bytes': 1 << 24}), Registry.load()).close()\n"
        "print('transformers' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
