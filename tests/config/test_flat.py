"""Flat settings to the tree: defaults, human integers, vLLM's names, errors of one sentence."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, fields

import pytest
from hypothesis import given, strategies as st

from frame.core.config.errors import ConfigError
from frame.core.config.flat import parse_integer
from frame.core.config.leaves import leaves, sections
from frame.core.config.tree import FrameConfig
from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.engine_args import AsyncEngineArgs, EngineArgs
from frame.vllm_names.unused import UNUSED

OTHER_VALUES = {
    "model": "/m", "dtype": "bfloat16", "logprobs_mode": "raw_logits", "kv_cache_dtype": "fp8_e5m2",
    "mamba_ssm_cache_dtype": "float16",
    "prefix_caching_hash_algo": "xxhash", "kv_role": "consumer", "kv_load_failure_policy": "fail",
    "gpu_memory_utilization": 0.5, "max_long_partial_prefills": 1, "profile_dir": "/tmp/p", "log_level": "debug",
    "uvicorn_log_level": "critical",
    "drain_seconds": 1.5, "ready_seconds": 2.5, "runner": "pooling", "convert": "embed", "returned_token_ids": [5],
    "max_body_bytes": 2048, "max_upload_bytes": 2048, "chat_template_bytes": 1 << 25,
    "chat_template_content_format": "openai", "max_head_bytes": 8192, "max_headers": 100, "ssl_cert_reqs": 2,
    "pipeline_layers": [5], "nnodes": 2, "node_rank": 1, "data_parallel_rank": 3, "data_parallel_rank_local": 1,
    "eplb_record": "/tmp/r", "model_impl": "frame", "safetensors_load_strategy": "eager",
    "lora_modules": ["a=/b"], "lora_root": "/c", "kv_events_endpoint": "tcp://127.0.0.1:5557",
    "kv_events_replay_endpoint": "ipc:///r", "kv_events_curve_file": "/k",
    "kv_events_format": "map", "kv_events_hashes": "bytes", "kv_events_buffer_bytes": 1 << 20,
}  # fmt: skip
#: What else must be given for a setting to make sense.
NEEDED = {
    "enable_eplb": {"enable_expert_parallel": True},
    "kv_events_connect": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
    "kv_events_curve_file": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
    "kv_events_replay_endpoint": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
    "num_redundant_experts": {"enable_eplb": True, "enable_expert_parallel": True},
    "eplb_record": {"enable_eplb": True, "enable_expert_parallel": True},
    "admin_port": {"admin_key": ["k"]},
    **{name: {"enable_lora": True} for name in ("lora_modules", "lora_root", "lora_resolver")},
    "nnodes": {"tensor_parallel_size": 2, "master_addr": "a"},
    "node_rank": {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "a"},
    "data_parallel_size_local": {"data_parallel_size": 9, "data_parallel_hybrid_lb": True},
    "data_parallel_start_rank": {
        "data_parallel_size": 9,
        "data_parallel_size_local": 2,
        "data_parallel_hybrid_lb": True,
    },
    "data_parallel_rank": {"data_parallel_size": 9},
    "data_parallel_rank_local": {"data_parallel_size": 9, "data_parallel_rank": 3},
    "data_parallel_external_lb": {"data_parallel_size": 9, "data_parallel_rank": 3},
    "data_parallel_hybrid_lb": {"data_parallel_size": 9, "data_parallel_size_local": 2},
    "headless": {
        "data_parallel_size": 9,
        "data_parallel_size_local": 2,
        "data_parallel_start_rank": 7,
        "data_parallel_address": "a",
        "data_parallel_secret_file": "/s",
    },
    "rpc_methods": {"admin_uds": "/tmp/a"},
    "cache_salt_per_key": {"api_key": ["k"]},
    "allow_credentials": {"allowed_origins": ["https://a.example"]},
    "ssl_keyfile": {"ssl_certfile": "c"},
    "ssl_ca_certs": {"ssl_certfile": "c", "ssl_cert_reqs": 2},
    "ssl_cert_reqs": {"ssl_certfile": "c", "ssl_ca_certs": "a"},
    "enable_ssl_refresh": {"ssl_certfile": "c"},
}


def other_value(name: str) -> object:
    """A valid value of a setting that differs from its default (where there are two)."""
    own = leaves()[name]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    values = {"bool": not own.default, "int": 7, "text": "x", "list": ["x"]}
    return {**values, "mapping": {"a": {"b": 1}}, "float": 0.5}[own.kind]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2m", 2_000_000), ("2M", 2 << 20), ("1g", 10**9),
        ("1G", 1 << 30), ("-1", -1), ("1_000", 1000), (" 8 ", 8),
    ],
)  # fmt: skip
def test_human_integers(text, value):
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5K", "1.0001k", "1e3", "0x10", "1kb", "1.5", "nan", "١"])
def test_what_is_no_integer_is_refused(text):
    with pytest.raises(ConfigError):
        parse_integer(text)


@given(st.integers(0, 10**9), st.sampled_from("kmgKMG"))
def test_suffixes_multiply(number, suffix):
    step = 1000 if suffix.islower() else 1024
    assert parse_integer(f"{number}{suffix}") == number * step ** (" kmg".index(suffix.lower()))


def test_every_setting_has_help_and_a_unique_name():
    assert all(own.help.endswith(".") for own in leaves().values())
    assert not set(leaves()) & (set(TRANSLATIONS) | set(UNUSED) | {"plugin"})
    assert all(about for about in sections().values())


@pytest.mark.parametrize("name", list(leaves()))
def test_each_setting_round_trips(name):
    value = other_value(name)
    needed = NEEDED.get(name, {})
    config = FrameConfig.from_flat(**{**needed, name: value})
    flat = {own.name: getattr(getattr(config, own.section), own.name) for own in leaves().values()}
    assert flat[name] == value
    assert FrameConfig.from_flat(**flat) == config
    assert FrameConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", [name for name, own in leaves().items() if own.section != "server"])
def test_engine_arguments_round_trip(name):
    values = {name: other_value(name), **NEEDED.get(name, {})}
    arguments = EngineArgs(**values)
    assert EngineArgs(**asdict(arguments)) == arguments
    assert EngineArgs(**vars(arguments)) == arguments
    config = arguments.create_engine_config()
    assert FrameConfig.from_flat(**asdict(arguments)) == config
    assert config == FrameConfig.from_flat(**values)


def test_every_argument_may_be_none():
    nothing = dict.fromkeys(field.name for field in fields(EngineArgs))
    assert EngineArgs(**nothing).create_engine_config() == FrameConfig()
    assert AsyncEngineArgs("x").create_engine_config().model.model == "x"


def test_engine_arguments_share_no_state():
    EngineArgs().hf_overrides["a"] = 1
    assert EngineArgs().hf_overrides == {}


def test_command_line_to_keyword_arguments():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--prompt", default="hello")
    parser.set_defaults(model="/m")
    typed = parser.parse_args(
        [
            "--max-model-len",
            "8k",
            "-tp",
            "1",
            "--no-enable-prefix-caching",
            "--hf-overrides",
            '{"a": 1}',
            "--swap-space",
            "4",
        ]
    )
    assert typed.max_model_len == 8000
    assert typed.max_num_seqs == 0
    arguments = EngineArgs.from_cli_args(typed)
    assert arguments.model == "/m"
    config = arguments.create_engine_config()
    assert not config.cache.enable_prefix_caching
    values = vars(typed)
    values.pop("prompt")
    assert FrameConfig.from_flat(**values) == config


def test_config_is_frozen_and_closed():
    with pytest.raises(ValueError, match="frozen"):
        FrameConfig().model.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        FrameConfig.model_validate({"cache": {"block": 1}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_length": 1}, "no setting 'max_model_length' (did you mean max_model_len"),
        ({"max_num_seqs": -1}, "max_num_seqs must be greater than or equal to 0, got -1"),
        ({"dtype": "fp4"}, "dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got 'fp4'"),
        ({"max_model_len": "1.5K"}, "max_model_len: '1.5K' mixes a fraction with the binary suffix K"),
        ({"block_size": True}, "block_size must be an integer, got True"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"max_long_partial_prefills": 3}, "max_long_partial_prefills 3 is above max_num_partial_prefills 1"),
        ({"profile_dir": "here"}, "profile_dir must be an absolute path, got 'here'"),
        ({"plugin": {"disk": 3}}, "plugin must map names to their settings"),
        ({"trust_remote_code": True}, "trust_remote_code=True cannot be honoured: no code of a checkpoint is ever run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} cannot be honoured"),
        ({"kv_transfer_config": {"kv_rank": 1}}, "kv_transfer_config has no kv_rank here"),
        ({"kv_transfer_config": {"kv_buffer_device": "tpu"}}, "no kv_buffer_device 'tpu'; there are: cuda, cpu"),
        (
            {"kv_transfer_config": {"kv_port": 5}},
            "kv_transfer_config.kv_port=5 cannot be honoured: connectors have ports",
        ),
        ({"kv_transfer_config": {"kv_connector_module_path": "a.b"}}, "a connector is a plugin"),
        ({"kv_transfer_config": {"kv_connector_extra_config": {"port": 5}}}, "must name it: give kv_connector"),
        ({"kv_transfer_config": {"kv_buffer_device": "cpu"}}, "must name it: give kv_connector"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "nixl",
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": "x",
                }
            },
            "kv_connector_extra_config must map names to values, got 'x'",
        ),
        ({"device": "cpu", "platform": "cuda"}, "device means platform='cpu', but platform='cuda' is given too"),
        ({"allowed_origins": '["*"'}, "is not a JSON list"),
        ({"api_key": ["k", " "]}, "api_key must not be empty"),
    ],
)
def test_errors_are_one_sentence_with_name_and_value(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        FrameConfig.from_flat(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("device", "plugin"), [("cpu", {"host_buffer": True, "port": 5}), ("cuda", {"port": 5})])
def test_the_buffer_of_transfers_is_an_option_of_the_connector(device, plugin):
    given = {"kv_connector": "nixl", "kv_buffer_device": device, "kv_connector_extra_config": {"port": 5}}
    assert FrameConfig.from_flat(kv_transfer_config=given).plugin == {"nixl": plugin}


def test_a_whole_kv_transfer_config_of_vllm_is_taken(caplog):
    given = {
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail", "kv_rank": None,
        "kv_parallel_size": 1, "kv_ip": "127.0.0.1", "kv_port": 14579, "kv_buffer_device": "cuda",
        "kv_buffer_size": 1e9,
        "kv_connector_extra_config": {"port": 5}, "kv_connector_module_path": None, "enable_permute_local_kv": False,
        "engine_id": "4f7a",
    }  # fmt: skip
    config = FrameConfig.from_flat(kv_transfer_config=given)
    assert (config.transfer.kv_connector, config.transfer.kv_load_failure_policy) == ("NixlConnector", "fail")
    assert config.plugin == {"NixlConnector": {"port": 5}}
    assert "no effect here: engine_id, kv_buffer_size" in caplog.text


@pytest.mark.parametrize(
    ("extra", "plugin"),
    [
        ({"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 6555}, {"server": "tcp:localhost:6555"}),
        ({"lmcache.mp.port": "7", "max_bytes": 9}, {"server": "tcp:localhost:7", "max_bytes": 9}),
        ({"lmcache.mp.host": "10.0.0.1"}, {"server": "tcp:10.0.0.1:5555"}),
        ({"server": "tcp:localhost:1"}, {"server": "tcp:localhost:1"}),
    ],
)
def test_vllms_names_of_an_lmcache_server(extra, plugin):
    given = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    assert FrameConfig.from_flat(kv_transfer_config=given).plugin == {"LMCacheMPConnector": plugin}


def test_vllm_names_and_values_mean_the_same(caplog):
    config = FrameConfig.from_flat(
        dtype="half",
        kv_cache_dtype="fp8",
        distributed_executor_backend="mp",
        attention_config={"backend": "triton"},
        kv_transfer_config={
            "kv_connector": "disk",
            "kv_role": "kv_producer",
            "kv_ip": "10.0.0.1",
            "kv_connector_extra_config": {"folder": "/tmp"},
        },
        served_model_name="one",
        max_model_len="auto",
        swap_space=4,
        trust_remote_code=False,
        enable_lora=False,
        generation_config="vllm",
    )
    assert config.model.dtype == "float16"
    assert config.cache.kv_cache_dtype == "fp8_e4m3"
    assert config.executor.executor == "process"
    assert config.attention.attention_backend == "triton"
    assert (config.transfer.kv_connector, config.transfer.kv_role) == ("disk", "producer")
    assert config.transfer.kv_ip == "10.0.0.1"
    assert config.plugin == {"disk": {"folder": "/tmp"}}
    assert config.model.served_model_name == ["one"]
    assert config.model.max_model_len == -1
    assert config.model.generation_config == "frame"
    said = [record.getMessage() for record in caplog.records if record.name.startswith("frame.vllm_names")]
    assert said == ["arguments of vLLM's that have no effect here: swap_space"]


def test_torch_dtypes_are_taken():
    import torch

    assert FrameConfig.from_flat(dtype=torch.bfloat16).model.dtype == "bfloat16"


def test_classes_travel_by_name():
    config = FrameConfig.from_flat(logits_processors=[argparse.Namespace, "a.b:C"])
    assert '["argparse:Namespace","a.b:C"]' in config.model_dump_json()

    class Here:
        pass

    with pytest.raises(ValueError, match="cannot be imported by another process"):
        FrameConfig.from_flat(logits_processors=[Here]).model_dump_json()


def test_the_environment_sets_nothing(monkeypatch):
    monkeypatch.setenv("FRAME_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("FRAME_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("FRAME_MAX_NUM_SEQS", "3")
    assert FrameConfig.from_flat() == FrameConfig()
    assert FrameConfig().server.port == 8000


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *dict.fromkeys(
            [
                "tensor_parallel_size", "pipeline_parallel_size", "nnodes", "node_rank", "data_parallel_size_local",
                "data_parallel_start_rank", "data_parallel_rank", "data_parallel_rank_local", "num_threads",
            ],
            4096,
        ).items(),
        ("num_redundant_experts", 65536),
        ("eplb_window_size", 2147483648),
        ("eplb_step_interval", 2147483648),
        ("eplb_rows_per_step", 65536),
        ("num_gpu_blocks_override", 2147483647),
        ("max_num_batched_tokens", 16777216),
    ],
)  # fmt: skip
def test_sizes_of_many_digits_are_refused_by_name(name, most):
    with pytest.raises(ConfigError, match=f"^{name} must be less than or equal to {most}, got 1"):
        FrameConfig.from_flat(**{name: 10**400})
