"""`frame doctor` says before loading what a KV connector holds afterwards."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from frame import LLM, SamplingParams
from frame.core.cli.main import main
from frame.plugins.commands.doctor import tiers
from frame.plugins.connectors.blocks.host_slab import HostSlab
from frame.testing import make_checkpoint

GIB = 1 << 30
SIZES = ["--block-size", "8", "--num-gpu-blocks-override", "40", "--max-num-seqs", "2"]


def doctor(capsys, *flags, status=0):
    assert main(["doctor", *map(str, flags), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def said(capsys, *flags, status=0):
    assert main(["doctor", *map(str, flags)]) == status
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"block_size": 32}),
        pytest.param("gemma2", {}, marks=pytest.mark.matrix),
        pytest.param("deepseek-v2", {}, marks=pytest.mark.matrix),
    ],
)
def test_predicted_blocks_in_host_memory_are_those_of_the_engine(family, options, tmp_path, capsys):
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    flags = [word for name, value in options.items() for word in (f"--plugin.offload.{name}", value)]
    found = doctor(capsys, folder, *SIZES, "--kv-offloading-size", "0.01", *flags)["tier"]
    llm = LLM(
        str(folder),
        block_size=8,
        num_gpu_blocks_override=40,
        max_num_seqs=2,
        kv_offloading_size=0.01,
        plugin={"offload": options},
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    prompt = {"prompt_token_ids": list(range(3, 70))}
    try:
        for _ in range(2):  # what the first one saved is told with the second
            llm.generate([prompt], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
        told = {one.name: one.value for one in llm.get_metrics() if one.labels.get("tier") == "host"}
    finally:
        llm.close()
    assert found["num_blocks"] * found["block_bytes"] == told["frame_kv_tier_size_bytes"] <= found["size_bytes"]
    assert found["block_tokens"] == options.get("block_size", 8)
    assert told["frame_kv_tier_used_bytes"] % found["block_bytes"] == 0 < told["frame_kv_tier_used_bytes"]
    assert found["tokens"] == found["num_blocks"] * found["block_tokens"]


def test_each_rank_takes_its_part_of_a_block(tmp_path, capsys):
    folder = make_checkpoint(tmp_path, "llama")
    whole = doctor(capsys, folder, *SIZES, "--kv-offloading-size", "0.01")["tier"]
    two = doctor(capsys, folder, *SIZES, "--kv-offloading-size", "0.01", "--tensor-parallel-size", 2)["tier"]
    assert sum(two["block_bytes_by_rank"]) == two["block_bytes"] == whole["block_bytes"]
    assert len(two["block_bytes_by_rank"]) == 2
    assert "on each rank" in said(capsys, folder, *SIZES, "--kv-offloading-size", "0.01", "--tensor-parallel-size", 2)


def test_rows_are_counted_as_they_are_taken(monkeypatch):
    draw = random.Random(0)
    monkeypatch.setattr(tiers, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr("frame.plugins.connectors.blocks.host_slab.PIECE_BYTES", 1 << 14)
    for _ in range(200):
        row, size = draw.randint(1, 40_000), draw.randint(1, 200_000)
        slab = HostSlab(row, size, lambda count: torch.empty(count, dtype=torch.uint8))
        assert tiers.rows_in(size, row) == slab.num_rows, (row, size)


def test_a_tier_larger_than_memory_is_said_to_be(capsys):
    text = said(capsys, "--memory-gib", 8, "--platform", "cpu", "--kv-offloading-size", 9, status=1)
    assert (
        "binding limit    kv_connector: 9.0 GiB of blocks are to be kept, and a cpu device of 8 GiB has 8.0 GiB" in text
    )
    assert "what to change   lower --kv-offloading-size\n" in text
    text = said(capsys, "--memory-gib", 8, "--platform", "cpu", "--kv-offloading-size", 7.9, status=1)
    assert re.search(
        r"7.9 GiB of blocks are to be kept, and \d\.\d GiB of the memory of a cpu device of 8 GiB are", text
    )
    found = doctor(capsys, *SIZES, "--kv-offloading-size", 1e-6, status=1)
    assert "hold no block of 8 tokens" in found["tier"]["problem"]
    assert found["binding_limit"]["change"] == "raise --kv-offloading-size"
    found = doctor(
        capsys, "--memory-gib", 8, "--platform", "cpu", "--kv-offloading-size", 3, "--data-parallel-size", 3, status=1
    )
    assert "9.0 GiB of blocks are to be kept" in found["binding_limit"]["why"]


def test_other_connectors_say_what_they_hold(tmp_path, capsys):
    disk = ["--kv-connector", "disk", "--plugin.disk.folder", tmp_path / "there"]
    text = said(capsys, *disk, "--plugin.disk.max_bytes", 10**9)
    assert f"tier             disk: files in {tmp_path / 'there'}, which has" in text
    assert re.search(r"  holds          15,\d\d\d blocks, 2\d\d,\d\d\d tokens, in 953.67 MiB", text)
    assert "no limit is set (max_bytes)" in said(capsys, *disk)
    assert not (tmp_path / "there").exists()
    assert "hold no block" in said(capsys, *disk, "--plugin.disk.max_bytes", 5, status=1)
    peer = ["--kv-connector", "peer", "--plugin.peer.listen", f"unix:{tmp_path}/a"]
    assert "1.0 GiB of host memory on each worker" in said(capsys, *peer)
    assert "blocks are read from peers" in said(capsys, *peer, "--kv-role", "consumer")
    nixl = ["--kv-connector", "NixlConnector", "--plugin.nixl.secret_file", "s", "--num-gpu-blocks-override", 101]
    assert "up to 50 blocks of the KV cache are kept for other engines, 30 s each" in said(capsys, *nixl)
    assert "exchanges no blocks" in said(capsys, "--kv-connector", "nixl")
    assert "tier" not in doctor(capsys)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kv-connector", "tape"], "no KV connector 'tape'"),
        (["--kv-connector", "disk"], "option folder of plugin 'disk'"),
        (["--kv-offloading-size", "much"], "kv_offloading_size must be a number of GiB"),
        (["--kv-offloading-size", "1", "--kv-offloading-backend", "tape"], "there is: native"),
    ],
)
def test_wrong_settings_are_one_sentence(flags, sentence, capsys):
    assert main(["doctor", *flags]) == 1
    assert sentence in capsys.readouterr().err
