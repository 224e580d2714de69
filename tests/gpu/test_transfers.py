"""KV that travels on GPUs: from another process's GPU, past NIXL, through it and sent, and from and to host memory."""

from __future__ import annotations

import socket

import pytest
import torch

from frame import LLM, SamplingParams
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import BLOCK_SIZE, Asked, Prefill, open_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = (90, 17, 64, 5)
#: Tokens of prompts that `push` sends in whole blocks, and that `nixl` reads.
SENT = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]
READ = [size - 1 if size > BLOCK_SIZE else 0 for size in SIZES]
GPU = {"platform": "cuda", "dtype": "float32", "enforce_eager": True}


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through nixl"])
def test_prompts_come_from_another_processs_gpu(family, direct, tmp_path):
    pytest.importorskip("nixl")
    model = make_checkpoint(tmp_path / "model", family)
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests")
    device = {"CUDA_VISIBLE_DEVICES": str(1 % max(1, torch.cuda.device_count()))}
    there = Prefill(model, secret, device, **GPU)
    try:
        with open_engine(model, secret, GPU, retry_seconds=0, direct=direct) as engine:
            there.wait_ready()
            here = Asked(engine)
            for number, prompt in enumerate(prompts()):
                here.add(f"d{number}", prompt, there.prefill(prompt))
                tokens = here.finish(f"d{number}")
                assert here.num_cached(f"d{number}") == READ[number]
                assert tokens == here.alone(prompt)
            assert here.counter("loaded_blocks") > 0
            assert here.counter("failed_blocks") == 0
            assert there.usage() == here.rest() == 0
            assert (here.counter("direct_reads") > 0) == direct
    finally:
        there.close()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "captured"])
def test_prompts_are_sent_from_another_processs_gpu(family, enforce_eager, tmp_path):
    model = make_checkpoint(tmp_path / "model", family)
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests")
    device = {"CUDA_VISIBLE_DEVICES": str(1 % max(1, torch.cuda.device_count()))}
    settings = {**GPU, "enforce_eager": enforce_eager, "kv_connector": "push"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = Prefill(model, secret, device, **settings, max_num_batched_tokens=32)
    try:
        with open_engine(model, secret, settings, port=port, wait_seconds=30) as engine:
            there.wait_ready()
            here = Asked(engine)
            for number, prompt in enumerate(prompts()):
                here.add(f"d{number}", prompt, there.prefill(prompt, remote_host="127.0.0.1", remote_port=port))
                tokens = here.finish(f"d{number}")
                assert here.num_cached(f"d{number}") == SENT[number]
                assert tokens == here.alone(prompt)
            assert here.counter("loaded_blocks", "push") > 0
            assert here.counter("failed_blocks", "push") == 0
            assert there.usage() == here.rest() == 0
    finally:
        there.close()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompts_that_the_device_forgot_come_back_from_host_memory(family, tmp_path):
    llm = LLM(
        model=str(make_checkpoint(tmp_path, family)), block_size=16, max_model_len=256, skip_tokenizer_init=True,
        kv_offloading_size=0.05, num_gpu_blocks_override=300, disable_log_stats=False, dtype="bfloat16",
    )  # fmt: skip
    given = [
        {"prompt_token_ids": [3 + (7 * i * (j + 1) + j) % 400 for i in range(n)]} for j, n in enumerate((90, 33, 200))
    ]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)

    def told():
        outputs = llm.generate(given, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens for one in outputs]

    first, cached = told()
    assert cached == [0, 0, 0]
    for _ in range(3):
        assert llm.reset_prefix_cache()
        again, cached = told()
        assert cached == [80, 32, 192]
        assert again == first
    llm.close()
