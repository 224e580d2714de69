"""A cache of latents whose first part is in 8 bits: how far scores move, ranks, chunks, prefixes, and its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.cli.main import main
from frame.core.engine.agreement import agreed_layout
from frame.core.plugin_host.offers import NoPluginError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.worker import Worker
from frame.interfaces import LatentKV, Mesh, Placement
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import running
from frame.testing.thread_executor import with_threads
from tests.engine.test_fp8_cache import PROMPTS, all_answers, config_of, prompt_scores

#: How far log-probabilities may lie from transformers' over the same rounded latents: a sum in another order may round
#: a number to the next code.
CLOSE = 0.05
#: How far the log-probability of a known token moves at most, and on average a fifth of it. Of a latent's numbers those
#: before the turned part keep 4 significant bits; experts may be chosen otherwise.
MOVES = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("latents"), "deepseek-v2")


def scores(folder: Path, ranks: int = 1, twice: bool = False, **given: Any) -> np.ndarray:
    if ranks > 1:
        given |= {"tensor_parallel_size": ranks, "executor": "threads", "num_threads": 1}
    with running(config_of(folder, **given), with_threads(Registry.load())) as engine:
        found = all_answers(engine)
        if twice:
            again = all_answers(engine, prompt_logprobs=None)
            assert all(tokens(again[name]) == tokens(found[name]) for name in found)
    return np.concatenate([prompt_scores(found[name]) for name in sorted(found)])


def tokens(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def expected(folder: Path) -> np.ndarray:
    """What transformers gives in float32 where the numbers that are kept in 8 bits have been in 8 bits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.register_forward_hook(lambda module, given, out: out.to(torch.float8_e4m3fn).float())
    found = []
    for prompt in map(torch.tensor, PROMPTS):
        with torch.inference_mode():
            logprobs = model(prompt[None]).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(1, prompt[1:, None]).squeeze(1).numpy())
    return np.concatenate(found)


def test_scores_are_those_of_rounded_latents_on_any_ranks_in_any_chunks(folder: Path) -> None:
    found = scores(folder, kv_cache_dtype="fp8_e4m3", twice=True)
    assert np.allclose(found, expected(folder), atol=CLOSE)
    moved = np.abs(found - scores(folder))
    assert 0 < moved.max() < MOVES
    assert moved.mean() < MOVES / 5
    for given in ({"ranks": 2}, {"max_num_batched_tokens": 24, "max_num_seqs": 3}):
        assert np.allclose(scores(folder, kv_cache_dtype="fp8_e4m3", **given), found, atol=CLOSE)


def test_the_bytes_of_a_block_are_those_of_its_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    rank, rope, layers = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_hidden_layers"]
    given = {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16", "num_gpu_blocks_override": None}
    worker = Worker(config_of(folder, kv_cache_memory_bytes=1 << 20, **given), Registry.load(), Placement())
    facts = worker.load()
    (spec,) = set(facts.kv_specs.values())
    assert spec == LatentKV(dim=rank, dtype="float8_e4m3fn", extra_bytes=2 * rope)
    layout = agreed_layout(worker.config, Mesh(), [facts])
    assert layout.pools[0] == (1 << 20) // (16 * layers * (rank + 2 * rope))
    worker.close()
    flags = ["--kv-cache-dtype", "fp8", "--dtype", "bfloat16", "--memory-gib", "1", "--json"]
    assert main(["doctor", str(folder), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["bytes_per_token"] == layers * (rank + 2 * rope)


def test_the_sparse_index_refuses_it_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v32")
    words = "float8_e4m3fn not supported by the index of sparse attention"
    worker = Worker(config_of(tmp_path, kv_cache_dtype="fp8_e4m3"), Registry.load(), Placement())
    with pytest.raises(NoPluginError, match=words):
        worker.load()
    worker.close()
