"""The offload connector under the whole engine: prompts that the device forgot come back from host memory."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch

from frame import LLM, LoRARequest, SamplingParams
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.testing.checkpoints import make_checkpoint
from tests.adapters.cases import make_adapter

SIZES = (90, 17, 64, 100, 5)
BLOCK_SIZE = 8
CACHED = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]
PROMPTS = [{"prompt_token_ids": [3 + (7 * i * (j + 1) + j) % 400 for i in range(n)]} for j, n in enumerate(SIZES)]


def llm_of(folder, family, **settings):
    return LLM(
        model=str(make_checkpoint(folder, family)),
        block_size=BLOCK_SIZE,
        max_model_len=160,
        skip_tokenizer_init=True,
        num_threads=1,
        disable_log_stats=False,
        **{"kv_offloading_size": 0.01, "num_gpu_blocks_override": 200, **settings},
    )


def complete(llm, prompts=PROMPTS):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens for one in outputs]


def number(llm, name):
    return sum(one.value for one in llm.get_metrics() if one.name.startswith(f"frame_kv_connector_offload_{name}"))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gemma2", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_prompts_that_the_device_forgot_come_back(tmp_path, family, settings):
    llm = llm_of(tmp_path, family, **settings)
    first, cached = complete(llm)
    assert cached == [0] * len(SIZES)
    assert llm.reset_prefix_cache()
    assert complete(llm) == (first, CACHED)
    assert number(llm, "hit_tokens") == sum(CACHED)
    assert number(llm, "load_bytes") > 0
    llm.close()


def wait_for_saves(llm, num_tokens, bytes_per_token):
    """Steps the engine until the KV of as many tokens of prompts has been copied to host memory."""
    deadline = time.monotonic() + 60
    while number(llm, "save_bytes") < num_tokens * bytes_per_token:
        assert time.monotonic() < deadline
        complete(llm, [PROMPTS[-1]])  # fills no block


def test_what_does_not_fit_on_the_device_is_in_host_memory(tmp_path):
    """A cache for one prompt at a time, and prompts that follow one another twice."""
    llm = llm_of(tmp_path, "llama", num_gpu_blocks_override=20)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    bytes_per_token = config["num_hidden_layers"] * 2 * heads * torch.float32.itemsize
    first, num_tokens = [], 0
    for prompt, size in zip(PROMPTS, SIZES, strict=True):
        first.append(complete(llm, [prompt])[0])
        # while half of the device's blocks are being copied, a prompt is not saved
        num_tokens += size // BLOCK_SIZE * BLOCK_SIZE
        wait_for_saves(llm, num_tokens, bytes_per_token)
    again = [complete(llm, [prompt]) for prompt in PROMPTS]
    assert [tokens for tokens, _ in again] == first
    assert [cached for _, (cached,) in again] == CACHED
    llm.close()


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
def test_adapters_stay_apart(tmp_path):
    pytest.importorskip("peft")
    llm = llm_of(tmp_path / "base", "llama", enable_lora=True, max_lora_rank=16)
    folders = [make_adapter(tmp_path / "base", tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    kinds = [None, *(LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)

    def told(kind):
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False, lora_request=kind)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    first = [told(kind) for kind in kinds]
    assert [cached for _, cached in first] == [0, 0, 0]
    assert len({tuple(tokens) for tokens, _ in first}) == 3
    assert llm.reset_prefix_cache()
    assert [told(kind) for kind in reversed(kinds)] == [(tokens, CACHED[0]) for tokens, _ in reversed(first)]
    llm.close()


def test_sleep_keeps_the_tier(tmp_path):
    llm = llm_of(tmp_path, "llama")
    first, _ = complete(llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert complete(llm) == (first, CACHED)
    llm.close()


def test_a_tier_that_is_reset_is_empty(tmp_path):
    llm = llm_of(tmp_path, "llama")
    first, _ = complete(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    assert complete(llm) == (first, [0] * len(SIZES))
    llm.close()


def test_a_tier_larger_than_memory_ends_the_start_with_one_sentence(tmp_path):
    """Before anything is loaded: here there are no weights."""
    make_checkpoint(tmp_path, "llama")
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ConfigError) as caught:
        LLM(model=str(tmp_path), skip_tokenizer_init=True, kv_offloading_size=100_000)
    assert re.fullmatch(
        r"KV connector 'offload': 100000.0 GiB of blocks are to be kept, and this machine has .* GiB of memory: lower "
        "kv_offloading_size",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size must be a number of GiB, 0 or more, got -1"),
        ({"kv_offloading_size": 10**400}, "kv_offloading_size must be a number of GiB, 0 or more, got 10000"),
        ({"kv_offloading_size": "much"}, "kv_offloading_size must be a number of GiB, 0 or more, got 'much'"),
        ({"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend='lmcache'"),
        ({"kv_offloading_size": 4, "kv_connector": "disk"}, "kv_connector='disk' is given too; leave one out"),
        (
            {"kv_offloading_size": 4, "kv_transfer_config": {"kv_connector": "disk"}},
            "kv_offloading_size and kv_transfer_config mean different values of kv_connector; leave one out",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(given, error):
    with pytest.raises(ConfigError, match=error):
        from_flat(given)


def test_vllm_s_names_choose_the_connector():
    config = from_flat({"kv_offloading_size": 8, "kv_offloading_backend": "native"})
    assert config.transfer.kv_connector == "offload"
    assert config.plugin["offload"] == {"size": 8}
    assert from_flat({"kv_offloading_size": 0}).transfer.kv_connector is None
