"""`frame doctor` says of each rank of an engine what its worker then loads and caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from frame.core.cli.main import main
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.plugins.commands.doctor import machine
from frame.plugins.commands.doctor.machine import Device
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES
from frame.testing.thread_executor import with_threads

GIB = 1 << 30
DIVISIONS = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dcp2": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


def doctor(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str, status: int = 0, **settings) -> dict:
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value)) if word != "True"]
    assert main(["doctor", str(folder), *words, *flags, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def held(worker) -> dict:
    """What a worker has: bytes of parameters and their packed copies, and of its part of the KV cache."""
    packed = [one for one in worker.model.buffers() if one.is_mkldnn]
    return {
        "weights_bytes": sum(one.nbytes for one in (*worker.model.parameters(), *packed)),
        "cache_bytes": sum(slot.nbytes for slot in worker.started.memory.slots),
    }


def is_same(
    family: str, division: str, folder: Path, capsys: pytest.CaptureFixture[str], rows: int = 0, **more
) -> None:
    make_checkpoint(folder, family, dtype=torch.bfloat16, **({"vocab_size": rows} if rows else {}))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_threads": 1, **DIVISIONS[division], **more}
    found = doctor(capsys, folder, **settings)
    values = {"model": str(folder), "executor": "threads", **settings}
    engine = make_engine(from_flat(values), with_threads(Registry.load()))
    try:
        workers = engine.executor.call("run", {"function": held})
        assert [{name: rank[name] for name in workers[0]} for rank in found["ranks"]] == workers
        assert found["kv_cache"]["num_blocks"] == engine.info.num_blocks
        (pools, *_) = engine.executor.call("run", {"function": lambda worker: worker.started.memory.layout.pools})
        if (states := found["kv_cache"]["states"]) is not None:
            assert 1 + states["num_live"] + states["num_checkpoints"] == pools[1]
            assert states["bytes_per_state"] == sum(rank["bytes_per_state"] for rank in found["ranks"])
        assert found["kv_cache"]["num_bytes"] == sum(worker["cache_bytes"] for worker in workers)
        assert found["capacity"]["longest_request"] == engine.info.max_model_len
        assert all(rank["fits"] for rank in found["ranks"])
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "division"),
    [
        ("llama", "tp2"),
        ("llama", "pp2"),
        ("llama-tied", "tp2-pp2"),
        ("llama", "dcp2"),
        ("qwen3-moe", "ep2"),
        ("mamba2", "tp2"),
        ("mamba2", "pp2"),
        ("lfm2", "tp2"),
        ("qwen3-next", "pp2"),
    ],
)
def test_each_rank_holds_what_was_predicted(family, division, tmp_path, capsys):
    is_same(family, division, tmp_path, capsys)


@pytest.mark.parametrize("division", ["tp2", "pp2"])
def test_a_cache_of_a_given_size_is_that_of_each_rank(division, tmp_path, capsys):
    is_same("gemma3", division, tmp_path, capsys, kv_cache_memory_bytes=2_000_000)


@pytest.mark.parametrize("division", ["tp2", "pp2"])
def test_packed_copies_of_tied_heads_are_those_of_each_rank(division, tmp_path, capsys):
    is_same("llama-tied", division, tmp_path, capsys, rows=50_000)


@pytest.mark.matrix
@pytest.mark.parametrize("division", ["tp2", "pp2", "tp2-pp2"])
@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith(("llama-l", "gemma3n", "gemma4"))])
def test_every_family(family, division, tmp_path, capsys):
    is_same(family, division, tmp_path, capsys)


def test_the_text_names_each_rank(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "qwen3-moe", num_hidden_layers=3)
    flags = ["-tp", "2", "-pp", "2", "--enable-expert-parallel", "--platform", "cuda", "--memory-gib", "24"]
    assert main(["doctor", str(folder), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    layout = next(index for index, line in enumerate(lines) if line.startswith("layout "))
    assert lines[layout].endswith("layers 2 + 1; 8 experts → 4 per rank")
    ranks = lines[layout + 1 : layout + 5]
    assert [line.split()[1] for line in ranks] == ["0", "1", "2", "3"]
    assert "layers 0–1, 4 experts a layer, weights " in ranks[0]
    assert "layer 2, 4 experts a layer, weights " in ranks[3]
    assert all(line.endswith("; fits a cuda device of 24 GiB") for line in ranks)


def test_a_stage_without_room_is_named(tmp_path, capsys):
    """The last stage has the head, and the reserve of a GPU leaves it nothing."""
    folder = make_checkpoint(tmp_path, "llama", vocab_size=64_000, num_hidden_layers=2)
    flags = ("--platform", "cuda", "--memory-gib", "0.98", "--pipeline-parallel-size", "2")
    found = doctor(capsys, folder, *flags, status=1)
    assert [rank["fits"] for rank in found["ranks"]] == [True, False]
    assert found["starts"] is False
    assert found["binding_limit"]["why"].startswith("the weights of rank 1 take ")
    assert "divide the model over more devices" in found["binding_limit"]["change"]


def test_ranks_share_the_memory_of_a_cpu(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama")
    flags = ("--platform", "cpu", "--memory-gib", "0.04", "--tensor-parallel-size", "2", "--kv-cache-memory-bytes")
    assert doctor(capsys, folder, *flags, "10000000")["starts"]
    found = doctor(capsys, folder, *flags, "30000000", status=1)
    assert found["binding_limit"]["why"].startswith("weights and KV cache of 2 ranks take 0.06 GiB together")


def test_each_rank_is_predicted_for_its_own_gpu(tmp_path, capsys, monkeypatch):
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    gpus = [Device("cuda", "H1", 80 * GIB, 80 * GIB), Device("cuda", "H2", 40 * GIB, 40 * GIB)]
    monkeypatch.setattr(machine, "_gpus", lambda: gpus)
    found = doctor(capsys, folder, tensor_parallel_size=2)
    assert [rank["device"] for rank in found["ranks"]] == ["GPU 0 (H1)", "GPU 1 (H2)"]
    available = [rank["available_bytes"] for rank in found["ranks"]]
    assert available[1] < available[0]
    assert found["ranks"][0]["cache_bytes"] == found["ranks"][1]["cache_bytes"] <= available[1], "the poorest decides"
    gpus[1] = Device("cuda", "H2", 40 * GIB, 10 * GIB)
    assert main(["doctor", str(folder), "-tp", "2"]) == 1
    assert "10240 MiB of GPU 1 (H2) are free" in capsys.readouterr().err
    assert main(["doctor", str(folder), "-tp", "2", "-dp", "2"]) == 1
    assert "4 devices are needed, and this machine has 2; --memory-gib says how much" in capsys.readouterr().err


def test_engines_that_share_experts_hold_a_part_of_them(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    alone = doctor(capsys, folder)
    found = doctor(capsys, folder, "--data-parallel-size", "2", "--enable-expert-parallel")
    (rank,) = found["ranks"]
    assert rank["experts"] == 4
    assert rank["weights_bytes"] < alone["weights"]["num_bytes"]
    assert any("one of 2 engines" in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["-tp", "3"], "tensor_parallel_size 3: the attention heads of model.layers.0.self_attn: 4 cannot be split"),
        (["-pp", "4"], "sizes that work: 1, 2, 3"),
        (["-dcp", "2"], "decode_context_parallel_size 2 does not divide tensor_parallel_size 1; sizes that work: 1"),
        (["-tp", "2", "--enable-expert-parallel"], "enable_expert_parallel: model LlamaForCausalLM has no experts"),
    ],
)
def test_impossible_divisions_are_refused_with_the_sizes_that_work(flags, sentence, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama")
    assert main(["doctor", str(folder), *flags]) == 1
    assert sentence in capsys.readouterr().err
