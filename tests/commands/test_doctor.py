"""`frame doctor` says before loading what the engine does afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from frame import LLM
from frame.core.cli.main import main
from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import Offer
from frame.interfaces import AttentionSpec, Provider, pool_bytes
from frame.plugins.attention.torch import TorchAttention
from frame.plugins.commands.doctor import memory, prediction
from frame.plugins.commands.doctor.facts import bytes_per_token
from frame.plugins.commands.doctor.layers import read_shape
from frame.plugins.commands.doctor.machine import Device, find_device
from frame.settings import ConfigError, Registry
from frame.testing import CommandSuite, make_checkpoint
from frame.testing.encoder_decoders import make_encoder_decoder
from frame.testing.families import FAMILIES
from frame.testing.pooling_checkpoints import make_pooling_checkpoint

GIB = 1 << 30


class TestDoctor(CommandSuite):
    plugin = "doctor"
    arguments = ("--json",)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert main(["doctor", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


#: transformers writes products of LongCat's experts without weights, which no model holds.
@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(("llama-", "longcat"))])
def test_predicted_blocks_and_bytes_are_those_of_the_engine(family, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    settings = {"kv_cache_memory_bytes": 3_000_000, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found = doctor(capsys, str(folder), *flags)
    engine = LLM(str(folder), **settings).llm_engine
    (layout,) = engine.collective_rpc(lambda worker: worker.started.memory.layout)
    (weights,) = engine.collective_rpc(lambda worker: sum(one.nbytes for one in worker.model.parameters()))
    cache = found["kv_cache"]
    assert cache["num_blocks"] == layout.pools[0] == engine.core.info.num_blocks
    widths = pool_bytes(layout)
    assert cache["num_bytes"] == sum(count * width for count, width in zip(layout.pools, widths, strict=True))
    assert (cache["states"] is not None) == (len(layout.pools) > 1) == (FAMILIES[family].states != "none")
    if cache["states"] is not None:
        kept, group = cache["states"], layout.groups[-1]
        assert (kept["bytes_per_state"], kept["num_live"], kept["checkpoint_tokens"]) == (
            widths[1],
            4,
            group.block_size,
        )
        assert 1 + kept["num_live"] + kept["num_checkpoints"] == layout.pools[1]
    assert [(group["layers"], group["window"]) for group in cache["groups"]] == [
        (len(group.layers), getattr(group.specs[0], "window", None)) for group in layout.groups
    ]
    assert found["capacity"]["longest_request"] == engine.core.info.max_model_len
    assert found["weights"]["num_bytes"] == weights
    assert found["weights"]["dtype"] == engine.core.info.dtype


def test_encoder_prompts_are_predicted_as_long_as_a_request_may_be(tmp_path, capsys):
    folder = make_encoder_decoder(tmp_path, "t5")
    settings = {"kv_cache_memory_bytes": 200_000, "block_size": 8, "max_num_seqs": 4}
    found = doctor(
        capsys, str(folder), *(word for name, value in settings.items() for word in (f"--{name}", str(value)))
    )
    engine = LLM(str(folder), skip_tokenizer_init=True, **settings).llm_engine
    (weights,) = engine.collective_rpc(lambda worker: sum(one.nbytes for one in worker.model.parameters()))
    cache, longest = found["kv_cache"], found["capacity"]["longest_request"]
    assert cache["num_blocks"] == engine.core.info.num_blocks
    assert [group["kind"] for group in cache["groups"]] == ["FullKV", "CrossKV"]
    assert longest == engine.core.info.max_model_len == (cache["num_blocks"] - 1) // 2 * 8 + 1 < 256
    assert found["weights"]["num_bytes"] == weights
    assert main(["doctor", str(folder)]) == 0
    assert "2 layers, every token of the encoder's, " in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mamba2", "lfm2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"enable_prefix_caching": False}, {"num_gpu_blocks_override": 30}, {"kv_cache_memory_bytes": 200_000}],
    ids=["default", "no prefixes", "override", "memory"],
)
def test_predicted_states_are_those_of_the_engine(family, settings, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    settings = {"max_num_seqs": 3, **settings}
    words = [
        "--no-enable-prefix-caching" if value is False else f"--{name}={value}" for name, value in settings.items()
    ]
    found = doctor(capsys, str(folder), *words)
    llm = LLM(str(folder), **settings)
    (layout,) = llm.llm_engine.collective_rpc(lambda worker: worker.started.memory.layout)
    llm.close()
    states = found["kv_cache"]["states"]
    assert found["kv_cache"]["num_blocks"] == layout.pools[0]
    assert (1 + states["num_live"] + states["num_checkpoints"], states["num_live"]) == (layout.pools[1], 3)
    assert (states["checkpoint_tokens"] > 0) == settings.get("enable_prefix_caching", True)
    assert found["capacity"]["full_length_requests"] <= 3


def test_the_text_tells_states_from_tokens(tmp_path, capsys):
    folder = str(make_checkpoint(tmp_path / "some", "lfm2"))
    flags = ("--max-num-seqs", "3", "--num-gpu-blocks-override", "30")
    assert main(["doctor", folder, *flags]) == 0
    text = capsys.readouterr().out
    assert "30 blocks of 16 tokens" in text
    assert "1 layers, every token, 256 B a token" in text
    assert "2 layers, a state of 1.00 KiB for each request" in text
    assert "states           3 of running requests, 40 of prefixes of a multiple of 16 tokens; 1.00 KiB each" in text
    assert main(["doctor", folder, *flags, "--no-enable-prefix-caching"]) == 0
    assert "states           3 of running requests, none of prefixes; 1.00 KiB each" in capsys.readouterr().out
    found = doctor(capsys, folder, "--kv-cache-memory-bytes", "9000", status=1)
    assert found["binding_limit"]["why"].endswith("hold no request beside states for max_num_seqs = 128 requests")
    assert found["binding_limit"]["change"] == "raise --kv-cache-memory-bytes, or lower --max-num-seqs"
    folder = str(make_checkpoint(tmp_path / "all", "mamba2"))
    assert main(["doctor", folder, "--max-num-seqs", "3"]) == 0
    text = capsys.readouterr().out
    assert "states alone (set by: full need)" in text
    assert "blocks of" not in text
    assert "capacity         any number of tokens; 3.0 requests of full length" in text
    assert "raise --max-num-seqs for more at once; the state of each takes " in text


def test_a_strange_model_without_attention_heads_is_one_sentence(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "mamba2")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "architectures": ["ForeignForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["doctor", str(folder)]) == 1
    assert "no model of this installation serves ForeignForCausalLM" in capsys.readouterr().err


class LongBlocks(TorchAttention):
    """Asks for long blocks, and for longer ones where layers have no window."""

    @classmethod
    def block_multiple(cls, spec: AttentionSpec) -> int:
        return 24 if spec.window else 64


@pytest.mark.parametrize("name", ["auto", "long"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_attention_backends_of_other_packages_are_asked_for_their_blocks(name, family, tmp_path, capsys, monkeypatch):
    provider = Provider("long", f"{__name__}:LongBlocks", api=">=0.2.dev1,<0.3", preference=99)
    load = Registry.load

    def with_long(only=None):
        registry = load(only)
        registry.offers.append(Offer("attention", provider, "strangers", "1.0"))
        return registry

    monkeypatch.setattr(Registry, "load", with_long)
    folder = str(make_checkpoint(tmp_path, family))
    found = doctor(capsys, folder, "--kv-cache-memory-bytes", "3000000", "--attention-backend", name)
    llm = LLM(folder, kv_cache_memory_bytes=3_000_000, attention_backend=name)
    engine = llm.llm_engine
    (layout,) = engine.collective_rpc(lambda worker: worker.started.memory.layout)
    assert layout.groups[0].block_size % 24 == 0 or layout.groups[0].block_size == 64
    assert found["kv_cache"]["num_blocks"] == layout.pools[0]
    assert found["kv_cache"]["block_size"] == layout.block_size
    assert found["capacity"]["longest_request"] == engine.core.info.max_model_len
    llm.close()


def test_a_backend_that_cannot_be_asked_here_is_an_assumption(tmp_path, capsys):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    flags = ("--platform", "cuda", "--memory-gib", "24", "--attention-backend", "flash")
    found = doctor(capsys, folder, *flags)
    (line,) = (line for line in found["assumptions"] if "longer blocks" in line)
    assert line.startswith("no attention backend asks for longer blocks: attention backend 'flash' cannot be used here")


@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(("llama-l", "longcat"))])
def test_weights_that_are_not_there_yet_are_counted_from_the_configuration(family, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    predicted = doctor(capsys, str(folder))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    found = doctor(capsys, str(folder))
    assert found["weights"]["elements"] == pytest.approx(predicted["weights"]["elements"], rel=0.01)
    assert found["kv_cache"] == predicted["kv_cache"]
    assert found["weights"]["files"] == 0
    assert any("no file of them is there yet" in line for line in found["assumptions"])
    assert main(["doctor", str(folder)]) == 0
    assert "not there yet: from config.json" in capsys.readouterr().out


def test_an_encoder_has_no_cache(tmp_path, capsys):
    folder = make_pooling_checkpoint(tmp_path, "bert")
    predicted = doctor(capsys, str(folder))
    assert predicted["kv_cache"]["num_blocks"] == predicted["kv_cache"]["num_bytes"] == 0
    assert predicted["capacity"]["tokens"] == predicted["capacity"]["max_num_batched_tokens"] == 2048
    assert predicted["capacity"]["full_length_requests"] == 2048 / 128
    assert predicted["binding_limit"]["name"] == "max_num_batched_tokens"
    assert main(["doctor", str(folder), "--platform", "cuda", "--memory-gib", "24"]) == 0
    text = capsys.readouterr().out
    assert "KV cache         none: each token of an encoder sees its whole prompt at once" in text
    assert "\ngraphs" not in text
    assert "blocks of" not in text
    found = doctor(capsys, str(folder), "--platform", "cuda", "--memory-gib", "0.1", status=1)
    assert found["binding_limit"]["name"] == "weights"
    (folder / "model.safetensors").unlink()
    assert doctor(capsys, str(folder))["weights"]["elements"] == pytest.approx(
        predicted["weights"]["elements"], rel=0.01
    )


def test_pickles_alone_are_refused(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert main(["doctor", str(folder)]) == 1
    assert "pickles (.bin, .pt) are refused" in capsys.readouterr().err


def test_the_demo_model_has_a_name(capsys):
    assert main(["doctor", "demo"]) == 0
    named = capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == named.splitlines()[0]


def test_the_default_cache_of_a_cpu_is_the_engines(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "gemma3", max_shard_size="100KB")
    found = doctor(capsys, str(folder), "--max-num-seqs", "3")
    info = LLM(str(folder), max_num_seqs=3).llm_engine.core.info
    assert found["kv_cache"]["set_by"] == "full need"
    assert found["kv_cache"]["num_blocks"] == info.num_blocks
    assert found["weights"]["files"] > 1


def plan(folder: Path, device: Device, **settings) -> prediction.Prediction:
    config = from_flat({"model": str(folder), **settings})
    return prediction.predict(config, read_checkpoint(config), device, 1.0)


def test_each_rule_can_bind(tmp_path, capsys):
    folder = str(make_checkpoint(tmp_path, "llama"))
    found = doctor(capsys, folder, "--num-gpu-blocks-override", "9")
    assert found["binding_limit"]["name"] == "kv_cache"
    assert found["capacity"]["longest_request"] == 129
    assert "set --max-model-len 129" in found["binding_limit"]["change"]
    assert "--num-gpu-blocks-override" in found["binding_limit"]["change"]
    found = doctor(capsys, folder, "--kv-cache-memory-bytes", "2_000_000".replace("_", ""), "--max-num-seqs", "100")
    assert found["binding_limit"]["name"] == "kv_cache"
    assert 1 < found["capacity"]["full_length_requests"] < 100
    found = doctor(capsys, folder, "--max-num-seqs", "2")
    assert found["binding_limit"]["name"] == "max_num_seqs"
    found = doctor(capsys, folder, "--memory-gib", "0.0001", status=1)
    assert found["binding_limit"]["name"] == "weights"
    assert found["starts"] is False
    found = doctor(capsys, folder, "--kv-cache-memory-bytes", "1000", status=1)
    assert "hold no request" in found["binding_limit"]["why"]


def test_weights_that_fill_the_memory_leave_no_cache_and_name_a_smaller_type(tmp_path, capsys):
    folder = str(make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16))
    assert main(["doctor", folder, "--memory-gib", "0.0001"]) == 1
    text = capsys.readouterr().out
    assert "KV cache         none: 0 B hold no request" in text
    assert "None" not in text
    assert "--dtype bfloat16 needs" in text
    assert "in 1 file)" in text
    assert "--max-num-batched-tokens" not in text  # a step's size is no part of what a CPU's cache gets
    assert main(["doctor", folder, "--memory-gib", "0.0001", "--dtype", "bfloat16"]) == 1
    assert "or take a smaller model" in capsys.readouterr().out


def test_a_gpu_is_planned_without_one(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    device = Device("cuda", "a GPU", 80 * GIB, 80 * GIB)
    made = plan(folder, device)
    assert (made.sizes.dtype, made.sizes.max_num_seqs) == ("bfloat16", 512)
    assert made.budget.kv_bytes == int(72 * GIB) - sum(made.budget.parts.values())
    assert made.graph_bytes > 0
    assert plan(folder, device, enforce_eager=True).graph_bytes == 0
    half = plan(folder, device, kv_cache_dtype="fp8_e4m3")
    assert bytes_per_token(half.layout) * 2 == bytes_per_token(made.layout)
    with pytest.raises(ValueError, match="lower it or free the device"):
        plan(folder, Device("cuda", "a busy GPU", 80 * GIB, 40 * GIB))
    assert main(["doctor", str(folder), "--platform", "cuda", "--memory-gib", "24"]) == 0
    text = capsys.readouterr().out
    assert "binding limit    max_num_seqs" in text
    assert "reserve          400.00 MiB" in text
    less = plan(folder, device, plugin={"cuda": {"graph_memory_bytes": 0}})
    assert less.budget.kv_bytes == made.budget.kv_bytes + made.graph_bytes


@pytest.mark.parametrize(
    ("vocab", "hidden", "inner", "measured_mib"),
    [(128256, 4096, 14336, 350), (151936, 1024, 3072, 358), (151936, 2048, 6144, 370)],
    ids=["8B", "0.6B", "30B-A3B"],
)
def test_graphs_take_about_what_was_measured_on_a_gpu(tmp_path, vocab, hidden, inner, measured_mib):
    """What engines of these shapes reserved on an H200 for nineteen sizes, without graphs over shared prefixes."""
    measured = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 513, 64)]
    folder = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    checkpoint = read_checkpoint(from_flat({"model": str(folder), "platform": "cuda"}))
    device = Device("cuda", "a GPU", 141 * GIB, 141 * GIB)
    plugins = {"cuda": {"graph_sizes": measured}}
    config = from_flat({"model": str(folder), "shared_prefix_min_tokens": 0, "plugin": plugins})
    sizes = memory.resolve_sizes(config, checkpoint, device)
    shape = replace(read_shape(checkpoint, "bfloat16"), hidden_size=hidden, intermediate_size=inner)
    found = memory.graph_bytes(config, device, sizes, shape, vocab)
    assert found / 2**20 == pytest.approx(measured_mib, rel=0.06)


def test_graphs_are_those_that_the_settings_leave(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    device = Device("cuda", "a GPU", 80 * GIB, 80 * GIB)
    alone = {"max_num_seqs": 8, "shared_prefix_min_tokens": 0}
    few = plan(folder, device, **alone).graph_bytes
    assert 32 << 20 < few < 64 << 20, "sizes 1, 2, 4 and 8, twice"
    assert plan(folder, device, max_num_seqs=8).graph_bytes - few == 4 * (4 << 20), "and once over shared prefixes"
    undrawn = plan(folder, device, **alone, plugin={"cuda": {"capture_draws": False}}).graph_bytes
    assert few - undrawn == 7 * (2 << 20)
    assert plan(folder, device, plugin={"cuda": {"graph_sizes": []}}).graph_bytes == 0


def test_steps_with_prompts_of_small_models_are_kept_once_more(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    device = Device("cuda", "a GPU", 80 * GIB, 80 * GIB)
    parts = plan(folder, device).budget.parts
    assert parts["piecewise graphs"] == parts["activations"]
    assert plan(folder, device, plugin={"cuda": {"capture_prompts": False}}).budget.parts["piecewise graphs"] == 0
    before, secret = plan(folder, device).budget, {"secret_file": "there"}
    pushes = plan(folder, device, kv_connector="push", kv_role="consumer", plugin={"push": secret}).budget
    assert pushes.parts["KV connector"] == before.kv_bytes - pushes.kv_bytes >= 256 << 20
    assert "KV connector" not in before.parts
    config = from_flat({"model": str(folder)})
    sizes = memory.resolve_sizes(config, read_checkpoint(config), device)
    shape = replace(read_shape(read_checkpoint(config), "bfloat16"), num_layers=32)
    assert memory.piece_share(config, sizes, shape, 16 * 10**9) == 512 / 8192


def test_constants_are_those_of_the_platforms():
    from frame.plugins.platforms import cpu, cpu_linear, options
    from frame.plugins.platforms.cuda import memory as cuda_memory, platform as cuda
    from frame.plugins.platforms.cuda.graphs import cuda_graphs, piecewise as cuda_pieces, shapes

    assert memory.CPU_KV_BYTES == cpu.DEFAULT_KV_BYTES
    assert memory.CPU_LEAST_PACKED == cpu_linear.LEAST_PACKED
    for dtype in ("float32", "bfloat16", "float16"):
        assert memory.packs(dtype) == cpu_linear.packs(getattr(torch, dtype))
    assert memory.CUDA_RESERVE_BYTES == cuda_memory.RESERVE_BYTES
    assert {
        "cpu": (cpu.CpuPlatform.default_num_seqs, cpu.CpuPlatform.default_num_batched_tokens),
        "cuda": (cuda.CudaPlatform.default_num_seqs, cuda.CudaPlatform.default_num_batched_tokens),
    } == memory.STEP_SIZES
    captured = options.CudaOptions().graph_sizes
    assert (shapes.MAX_ROWS, tuple(captured)) == (memory.CUDA_MAX_GRAPH_ROWS, memory.CUDA_GRAPH_SIZES)
    assert shapes.SHORT_LENGTHS == memory.CUDA_SHORT_LENGTHS
    assert cuda_graphs.LEAST_BYTES * 2 == memory.CUDA_GRAPH_BYTES
    assert (cuda_pieces.SIZES, cuda_pieces.WORTHWHILE) == (
        memory.CUDA_PIECE_SIZES,
        memory.CUDA_PIECES_WORTHWHILE,
    )


def test_a_family_of_a_plugin_is_planned_with_a_note(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "architectures": ["ForeignForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = doctor(capsys, str(folder))
    assert len(found["kv_cache"]["groups"]) == 2
    assert any("not one of frame's own" in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--memory-gib", "0"], "--memory-gib must be above 0"),
        (["--disk-gib-per-s", "nan"], "--disk-gib-per-s must be above 0"),
        (["--platform", "foreign"], "not those of platform 'foreign'"),
        (["--max-model-len", "4000"], "is above the 1024 tokens"),
        (["/no/such"], "no folder '/no/such'"),
    ],
)
def test_wrong_arguments_are_one_sentence(flags, sentence, capsys):
    assert main(["doctor", *flags]) == 1
    assert sentence in capsys.readouterr().err


def test_broken_checkpoints_are_one_sentence(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    file = sorted(folder.glob("*.safetensors"))[0]
    content = file.read_bytes()
    for broken, sentence in (
        (content[:-100], "is shorter than its header says"),
        (b"junk", "is not a safetensors file"),
        (b"\x05" + bytes(7) + b"[1,2]", "is not a safetensors file"),
    ):
        file.write_bytes(broken)
        assert main(["doctor", str(folder)]) == 1
        assert sentence in capsys.readouterr().err
    file.unlink()
    assert main(["doctor", str(folder)]) == 1
    assert "which is missing" in capsys.readouterr().err


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="--memory-gib"):
        find_device("cuda", None)
    assert find_device("auto", None).kind == "cpu"


def test_torch_is_not_imported():
    words = ["doctor", "--kv-offloading-size", "0.1"]
    code = f"import sys\nfrom frame.core.cli.main import main\nmain({words})\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("family", ["llama-tied", "mamba2"])
def test_the_packed_copy_of_a_tied_head_is_predicted(family, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, family, vocab_size=16_384, tie_word_embeddings=True)
    (weights, copies) = held_weights(str(folder))
    assert doctor(capsys, str(folder))["weights"]["num_bytes"] == weights + copies
    (folder / "model.safetensors").unlink()
    assert doctor(capsys, str(folder))["weights"]["num_bytes"] == pytest.approx(weights + copies, rel=0.01)
    gpu = doctor(capsys, str(folder), "--platform", "cuda", "--memory-gib", "24", "--dtype", "float32")
    assert gpu["weights"]["num_bytes"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("convert", ["embed", "none"])
def test_no_copy_of_a_head_that_a_pooling_model_leaves_out_is_predicted(convert, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama-tied", vocab_size=16_384)
    flags = {"runner": "pooling", "convert": convert}
    (weights, copies) = held_weights(str(folder), **flags)
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert doctor(capsys, str(folder), *words)["weights"]["num_bytes"] == weights + copies


def held_weights(folder: str, **settings) -> tuple[int, int]:
    """Bytes of an engine's parameters, and of the copies that it has packed."""
    llm = LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=20, **settings)
    try:
        (found,) = llm.collective_rpc(
            lambda worker: (
                sum(one.nbytes for one in worker.model.parameters()),
                sum(one.nbytes for one in worker.model.buffers() if one.is_mkldnn),
            )
        )
    finally:
        llm.close()
    return found


def test_weights_in_host_memory_leave_the_device_to_the_cache(tmp_path, capsys):
    """By whole layers, as the engine chooses them, less the places through which they pass."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 1024}
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, **shape)
    device = Device("cuda", "a GPU", 8 * GIB, 8 * GIB)
    whole = plan(folder, device, plugin={"cuda": {"capture_prompts": False}})
    made = plan(folder, device, cpu_offload_gb=1, cpu_offload_ahead=1)
    assert made.kept.host == 4 * made.kept.ring
    assert made.budget.parts["weights"] == made.held_bytes == whole.weights_bytes - made.kept.saved
    assert made.budget.kv_bytes == whole.budget.kv_bytes + made.kept.saved
    half = plan(folder, device, cpu_offload_gb=made.kept.host / 2 / GIB, cpu_offload_ahead=1)
    assert half.kept.host * 2 == made.kept.host
    assert plan(folder, Device("cpu", "a CPU", 8 * GIB, 8 * GIB), cpu_offload_gb=1).kept.host == 0
    with pytest.raises(ConfigError, match="keeps 1 of 8 layers in host memory, and the device holds 3 of them"):
        plan(folder, device, cpu_offload_gb=made.kept.host / 8 / GIB)
    flags = ["--platform", "cuda", "--memory-gib", "8", "--cpu-offload-gb", "1"]
    assert main(["doctor", str(folder), *flags]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"in host memory   \S+ MiB of the weights of a device, which has room for \S+ MiB of them at", text
    )
    assert "GiB of host memory are free for the weights of each device" in text
