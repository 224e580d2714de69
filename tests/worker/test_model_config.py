import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.config.model_config import _REWRITTEN, ConfigReading, ModelConfig
from frame.core.ops import Ops
from frame.core.plugin_host.model_choice import read_model_config
from frame.core.plugin_host.offers import Offer, PluginError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import Build, Groups, ModelSetup, Provider
from frame.layers.rotary import rope_parameters
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES


def read(folder, registry=None, **values):
    """What is read from a config.json of `values`."""
    sizes = {"vocab_size": 32, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**sizes, **values}))
    return read_model_config(read_checkpoint(from_flat({"model": str(folder)})), registry or Registry.load())


@pytest.mark.few_families
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_says_what_transformers_reads_from_it(family, tmp_path):
    make_checkpoint(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_text())
    config, expected = ModelConfig(values), AutoConfig.from_pretrained(tmp_path)
    of_layers = {name for layer in values.get("per_layer_config", {}).values() for name in layer}  # of Gemma 4
    for name in values.keys() - _REWRITTEN - of_layers - {"per_layer_config"}:
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


OLD_NAMES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
    "mistral": "Mistral", "mixtral": "Mixtral", "gemma2": "Gemma2", "gpt_oss": "GptOss", "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}  # fmt: skip


@pytest.mark.parametrize("model_type", OLD_NAMES)
@pytest.mark.parametrize("scaling", OLD_ROPES)
def test_an_older_spelling_is_what_transformers_reads_from_it(model_type, scaling, tmp_path):
    values = {"model_type": model_type, "rope_theta": 500.0, "rope_scaling": scaling, "num_hidden_layers": 2}
    config = read(tmp_path, **values, architectures=[f"{OLD_NAMES[model_type]}ForCausalLM"])
    expected = AutoConfig.for_model(**values)
    found = rope_parameters(config)
    assert "complete" not in vars(config)
    for name, value in found.items():
        assert expected.rope_parameters[name] == value, name


def test_an_older_spelling_of_a_family_with_more_to_it_is_read_by_transformers(tmp_path):
    values = {"model_type": "phi3", "rope_theta": 500.0, "rope_scaling": None, "pad_token_id": 0}
    config = read(tmp_path, **values, architectures=["Phi3ForCausalLM"])
    assert config.rope_parameters["rope_theta"] == 500.0
    assert "complete" in vars(config)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"])
def test_what_files_of_a_family_leave_out_is_known_without_transformers(name, tmp_path):
    config = read(tmp_path, model_type="qwen3", architectures=[name])
    assert config.use_sliding_window is False
    assert "complete" not in vars(config)
    assert read(tmp_path, model_type="qwen3", architectures=[name], use_sliding_window=True).use_sliding_window is True


def test_numbers_of_gpt_oss_that_its_files_leave_out_are_known_without_transformers(tmp_path):
    """The class of transformers 5.17 knows neither."""
    config = read(tmp_path, model_type="gpt_oss", architectures=["GptOssForCausalLM"])
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    assert "complete" not in vars(config)
    assert read(tmp_path, model_type="gpt_oss", architectures=["GptOssForCausalLM"], swiglu_limit=2.0).swiglu_limit == 2


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
#: Family → what published files of it say of positions, in the spelling of before `rope_parameters`, and otherwise.
PUBLISHED = {
    "gpt-oss": {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}},
    "deepseek-v2": {"rope_theta": 10000, "rope_scaling": YARN},
    "deepseek-v2-lite": {"rope_theta": 10000, "rope_scaling": YARN, "q_lora_rank": None},
    "deepseek-v3": {"rope_theta": 50000.0, "rope_scaling": YARN, "model_type": "kimi_k2"},
    "mamba2": {},
}
#: What they were published without.
LATER = ("rope_parameters", "rope_interleave", "mlp_layer_types", "mlp_bias", "time_step_limit")


@pytest.mark.parametrize("family", PUBLISHED)
def test_models_of_published_files_are_built_without_transformers(family, tmp_path):
    """Each process that builds one would import it, which takes seconds where files are slow to open."""
    values = json.loads((make_checkpoint(tmp_path, family) / "config.json").read_text())
    config = read(tmp_path, **{name: values[name] for name in values.keys() - {*LATER}} | PUBLISHED[family])
    kind = torch.float32
    build = Build(
        config=config, dtype=kind, device=torch.device("cpu"), ops=Ops(), groups=Groups.single(), kv_dtype=kind,
        device_type="cpu", max_model_len=64,
    )  # fmt: skip
    Registry.load().make("model", config.architectures[0], ModelSetup(build))
    assert "complete" not in vars(config)


def test_a_type_that_transformers_lacks_is_completed_by_the_class_that_its_model_names(tmp_path):
    config = read(tmp_path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], n_routed_experts=8)
    assert (config.model_type, config.n_routed_experts) == ("kimi_k2", 8)
    assert config.kv_lora_rank == 512
    assert read(tmp_path, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"]).qk_nope_head_dim == 192
    known = ConfigReading(read_as="deepseek_v3")
    assert ModelConfig({"model_type": "llama"}, known).complete.model_type == "llama"


def test_a_model_of_another_package_says_how_its_files_are_read(tmp_path):
    def registry(tag):
        mine = Provider("MineForCausalLM", "mine:Mine", api=">=0.2.dev1,<0.3", tags={"config": tag})
        return Registry([Offer("model", mine, "mine", "1")], [])

    tag = '{"names": {"num_hidden_layers": "depth"}, "defaults": {"width": 8, "depth": 1}}'
    config = read(tmp_path, registry(tag), architectures=["MineForCausalLM"], depth=3)
    assert (config.num_hidden_layers, config.depth, config.width) == (3, 3, 8)
    for wrong in ("[1]", "{", '{"naems": {}}'):
        with pytest.raises(
            PluginError, match=r"tag 'config' of model 'MineForCausalLM' must be a JSON object of names"
        ):
            read(tmp_path, registry(wrong), architectures=["MineForCausalLM"])


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them():
    config = ModelConfig({"model_type": "bamba", "time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert config.time_step_limit == [0.0, float("inf")]
    assert config.mamba_d_conv == 4, "transformers' class is given them too"


def test_null_is_a_value_where_a_family_says_so(tmp_path):
    config = read(tmp_path, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], q_lora_rank=None)
    assert config.q_lora_rank is None
    assert "complete" not in vars(config)
    assert read(tmp_path, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"]).q_lora_rank == 1536


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
