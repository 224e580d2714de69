"""Each flag of `vllm serve` has one verdict: it works, it is translated, or it is judged by value with a reason."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from frame import EngineArgs
from frame.core.cli.serve import ServeCommand
from frame.core.config.errors import ConfigError
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import config_from_arguments
from frame.core.config.leaves import leaves
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.setup import Setup
from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.unused import UNUSED

from .serve_flags import SERVE_FLAGS


def config(line: str) -> FrameConfig:
    parser = FlagParser(prog="frame serve")
    ServeCommand(Setup()).add_arguments(parser)
    return config_from_arguments(parser.parse_args(shlex.split(line)))


def test_the_list_of_flags_is_complete() -> None:
    assert len(SERVE_FLAGS) == len(set(SERVE_FLAGS)) == 261


@pytest.mark.parametrize("name", SERVE_FLAGS)
def test_every_flag_has_one_verdict(name: str) -> None:
    verdicts = [name in leaves() or name == "config", name in TRANSLATIONS, name in UNUSED]
    assert verdicts.count(True) == 1
    if name in UNUSED:
        assert len(UNUSED[name].reason) > 10


def test_every_flag_is_parsed() -> None:
    parser = FlagParser(prog="frame serve")
    ServeCommand(Setup()).add_arguments(parser)
    known = {action.dest for action in parser._actions} | {"config", "model_tag"}
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert not [name for name in SERVE_FLAGS if name not in known and f"--{name.replace('_', '-')}" not in flags]


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("-O0", "--enforce-eager"),
        ("-O3", ""),
        ("-O 0", "--enforce-eager"),
        ("-cc.mode 0", "--enforce-eager"),
        ("-cc.cudagraph_mode=NONE", "--enforce-eager"),
        ('--compilation-config \'{"mode": 3, "use_inductor": true}\'', ""),
        ("--compilation-config 3", ""),
        ("--cudagraph-capture-sizes 1 2 4", "--plugin.cuda.graph_sizes '[1, 2, 4]'"),
        ("--max-cudagraph-capture-size 4", "--plugin.cuda.graph_sizes '[1, 2, 4]'"),
        ("--max-cudagraph-capture-size 0", "--enforce-eager"),
        ("--disable-cascade-attn", "--shared-prefix-min-tokens 0"),
        ("--spec-method ngram --spec-tokens 3", "--speculator ngram --num-speculative-tokens 3"),
        ("-sc.method ngram -sc.num_speculative_tokens 3", "--speculator ngram --num-speculative-tokens 3"),
        ("-ac.backend torch", "--attention-backend torch"),
        ("--shutdown-timeout 5", "--drain-seconds 5"),
        ("-dp 1 -tp 1 -pp 1 -asc 2", "--api-server-count 2"),
        ("--mm-processor-cache-gb 0 --max-loras 4 --distributed-timeout-seconds 600", "--max-loras 4"),
        (
            "--enable-eplb -ep -tp 2 --eplb-config.window_size 100 --eplb-config.policy sticky",
            "--enable-eplb -ep -tp 2 --eplb-window-size 100 --expert-balancer sticky",
        ),
        ("--lora-target-modules q_proj k_proj", ""),
        ("--no-enable-eplb --fingerprint-mode full --moe-backend auto", ""),
    ],
)
def test_a_line_of_vllm_gives_the_settings_of_our_line(line: str, ours: str) -> None:
    plain = config(ours)
    assert config(line).model_dump(mode="json") == plain.model_dump(mode="json")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--ubatch-size 2",
            "ubatch_size=2 cannot be honoured: engines divide a model by tensors, layers and experts so far",
        ),
        ("--enable-ep-weight-filter", "devices read all weights of their experts"),
        ("--eplb-config.depth 2", "eplb_config"),
        ("--grpc", "requests come over HTTP only"),
        ("--cpu-offload-params mlp", "give --cpu-offload-gb"),
        ("--default-chat-template-kwargs '{\"enable_thinking\": false}'", "requests give chat_template_kwargs"),
        ("--kernel-config.moe_backend triton", "kernels are chosen by shape and device"),
        ("-O9", "no optimization_level 9; there are: 0, 1, 2, 3"),
        ("-cc.turbo 1", "compilation_config has no turbo here; there are: mode, cudagraph_mode"),
        ("--numa-bind", "start frame under numactl instead"),
        ("--spec-model /draft", "no draft models yet"),
        ("--cudagraph-metrics", "this is not measured"),
        (
            "--kv-offloading-size 1 --plugin.offload.size 2",
            "kv_offloading_size means plugin.offload.size=1, but plugin.offload.size='2' is given too; leave one out",
        ),
    ],
)
def test_values_that_would_change_something_are_refused_with_the_remedy(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(line)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_transfer_config": "x"}, "kv_transfer_config must be a mapping of names to values, got 'x'"),
        ({"attention_config": 7}, "attention_config must be a mapping of names to values, got 7"),
        ({"structured_outputs_config": {1: 2}}, "structured_outputs_config must be a mapping of names to values"),
        ({"profiler_config": 3}, "profiler_config must be a mapping"),
        ({"pooler_config": 3}, "pooler_config must be a mapping"),
        ({"speculative_config": [1]}, "speculative_config must be a mapping"),
        ({"task": [1]}, "no task [1]; there are: auto, generate"),
        ({"shutdown_timeout": "x"}, "drain_seconds must be a valid number"),
        ({"compilation_config": 9}, "no compilation_config.mode 9; there are: NONE, STOCK_TORCH_COMPILE"),
        ({"compilation_config": {"cudagraph_mode": "some"}}, "no compilation_config.cudagraph_mode 'some'; there are:"),
    ],
)
def test_values_of_another_form_are_refused_in_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model="", **given).create_engine_config()
    assert said in str(caught.value)


def test_arguments_without_effect_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    config("--swap-space 4 --lora-dtype auto")
    assert [record.getMessage() for record in caplog.records] == [
        "arguments of vLLM's that have no effect here: lora_dtype, swap_space"
    ]
