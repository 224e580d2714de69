"""KV that travels on GPUs: from another process's GPU, past NIXL, through it and sent, and from and to host memory."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from frame import LLM, SamplingParams
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import BLOCK_SIZE, Asked, Prefill, open_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = (90, 17, 64, 5)
#: Tokens of prompts that travel, and of models with running states.
READ = [size - 1 if size > BLOCK_SIZE else 0 for size in SIZES]
WHOLE = [(size - 1) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]
OTHER = {"CUDA_VISIBLE_DEVICES": str(1 % max(1, torch.cuda.device_count()))}
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
    there = Prefill(model, secret, OTHER, **GPU)
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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of the tests")
    return path


@pytest.mark.parametrize(
    ("direct", "family", "enforce_eager"),
    [
        pytest.param(True, "llama", True, id="direct-llama-eager"),
        pytest.param(True, "llama", False, id="direct-llama-captured"),
        pytest.param(True, "gemma2", False, id="direct-gemma2-captured"),
        pytest.param(True, "qwen3-next", False, id="direct-states-captured"),
        pytest.param(False, "llama", True, id="host-llama-eager"),
        pytest.param(False, "gemma2", False, id="host-gemma2-captured"),
    ],
)
def test_prompts_are_sent_from_another_processs_gpu(direct, family, enforce_eager, secret, tmp_path):
    model = make_checkpoint(tmp_path / "model", family)
    settings = {**GPU, "enforce_eager": enforce_eager, "kv_connector": "push"}
    port = free_port()
    there = Prefill(model, secret, OTHER, **settings, max_num_batched_tokens=32, options={"direct": direct})
    sizes = WHOLE if family == "qwen3-next" else READ
    try:
        with open_engine(model, secret, settings, port=port, wait_seconds=30, device_bytes=1 << 26) as engine:
            there.wait_ready()
            here = Asked(engine)
            for number, prompt in enumerate(prompts()):
                here.add(f"d{number}", prompt, there.prefill(prompt, remote_host="127.0.0.1", remote_port=port))
                tokens = here.finish(f"d{number}")
                assert here.num_cached(f"d{number}") == sizes[number]
                assert tokens == here.alone(prompt)
            assert here.counter("loaded_blocks", "push") > 0
            assert here.counter("failed_blocks", "push") == 0
            assert there.usage() == here.rest() == 0
            sent, written = (there.counter(name, "push") for name in ("sent_bytes", "direct_bytes"))
            assert written == (sent if direct else 0)
            assert sent > 0
            assert engine.stats().connector_gauges["push_device_buffer_used_bytes"] == 0
    finally:
        there.close()


def test_what_does_not_fit_on_the_other_gpu_crosses_host_memory(secret, tmp_path):
    model = make_checkpoint(tmp_path / "model", "llama")
    settings = {**GPU, "kv_connector": "push"}
    port = free_port()
    there = Prefill(model, secret, OTHER, **settings, max_num_batched_tokens=32)
    try:
        with open_engine(model, secret, settings, port=port, wait_seconds=30, device_bytes=1 << 16) as engine:
            there.wait_ready()
            here = Asked(engine)
            for number in range(6):
                prompt = prompts(number)[number % 2]  # long ones do not fit, short ones do
                here.add(f"d{number}", prompt, there.prefill(prompt, remote_host="127.0.0.1", remote_port=port))
                tokens = here.finish(f"d{number}")
                assert here.num_cached(f"d{number}") == READ[number % 2]
                assert tokens == here.alone(prompt)
            sent, written = (there.counter(name, "push") for name in ("sent_bytes", "direct_bytes"))
            assert 0 < written < sent
            assert there.usage() == here.rest() == 0
    finally:
        there.close()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_many_prompts_wait_for_room_on_the_other_gpu(family, secret, tmp_path):
    """None of them crosses host memory or is computed once more."""
    model = make_checkpoint(tmp_path / "model", family)
    settings = {**GPU, "enforce_eager": False, "kv_connector": "push"}
    port = free_port()
    there = Prefill(model, secret, OTHER, **settings, max_num_batched_tokens=256, options={"max_held_share": 1})
    given = [prompt for shift in range(8) for prompt in prompts(shift)[:3]]
    try:
        with open_engine(model, secret, settings, port=port, wait_seconds=30, device_bytes=1 << 18) as engine:
            there.wait_ready()
            here = Asked(engine)
            alone = [here.alone(prompt) for prompt in given]
            asks = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
            for number, prompt in enumerate(given):
                there.begin(id=f"p{number}", prompt=prompt, params=asks, count=1)
                here.add(f"d{number}", prompt, {"do_remote_prefill": True})
            assert [here.finish(f"d{number}") for number in range(len(given))] == alone
            for _ in given:
                there.answer()
            assert here.counter("failed_blocks", "push") == 0
            assert there.counter("direct_bytes", "push") == there.counter("sent_bytes", "push") > 0
            assert [here.num_cached(f"d{number}") for number in range(len(given))] == READ[:3] * 8
            assert here.counter("received_bytes", "push") > 1 << 18, "all prompts fit at once"
            assert there.usage() == here.rest() == 0
            assert engine.stats().connector_gauges["push_device_buffer_used_bytes"] == 0
    finally:
        there.close()


@pytest.mark.parametrize("victim", ["sends", "takes"])
def test_an_engine_that_dies_while_blocks_are_written_to_its_or_another_gpu(victim, secret, tmp_path):
    """The other one goes on, also with the next engine at that place."""
    model = make_checkpoint(tmp_path / "model", "llama")
    settings = {**GPU, "kv_connector": "push", "max_num_batched_tokens": 8}
    port = free_port()
    options = {"port": port, "wait_seconds": 2, "expiry_seconds": 2, "retry_seconds": 0, "device_bytes": 1 << 26}
    made = [
        Prefill(model, secret, OTHER, **settings, kv_role="producer", options={"retry_seconds": 0}),
        Prefill(model, secret, **settings, kv_role="consumer", options=options),
    ]

    def travel(shift):
        """A prompt through both; its tokens."""
        prompt = prompts(shift)[0]
        params = made[0].prefill(prompt, remote_host="127.0.0.1", remote_port=port)
        return made[1].ask(id=f"d{shift}", prompt=prompt, params=params, count=10)["tokens"]

    def alone(shift):
        return made[1].ask(id=f"alone {shift}", prompt=prompts(shift)[0], params=None, count=10)["tokens"]

    try:
        for one in made:
            one.wait_ready()
        expected = alone(1)
        assert made[1].ask(call="reset_prefix_cache")["result"]
        assert travel(1) == expected
        place = 0 if victim == "sends" else 1
        for number in range(2):
            asks = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
            made[0].begin(id=f"k{number}", prompt=prompts(10 + number)[0], params=asks, count=1)
            time.sleep(0.02 + 0.04 * number)
            made[place].close()
            if victim == "takes":
                assert made[0].answer()["tokens"]
            again = (
                Prefill(model, secret, OTHER, **settings, kv_role="producer", options={"retry_seconds": 0})
                if victim == "sends"
                else Prefill(model, secret, **settings, kv_role="consumer", options=options)
            )
            made[place] = again
            again.wait_ready()
            tokens = travel(20 + number)
            assert made[1].ask(call="reset_prefix_cache")["result"]
            assert tokens == alone(20 + number)
    finally:
        for one in made:
            one.close()


def test_an_engine_that_ends_has_its_gpus_memory_back(secret, tmp_path):
    """Although another process had mapped it, which does nothing."""
    model = make_checkpoint(tmp_path / "model", "llama")
    settings = {**GPU, "kv_connector": "push"}
    port = free_port()
    there = Prefill(model, secret, OTHER, **settings, kv_role="producer")
    taker = Prefill(model, secret, **settings, kv_role="consumer", options={"port": port, "device_bytes": 1 << 31})
    try:
        there.wait_ready()
        before, _ = torch.cuda.mem_get_info(0)
        taker.wait_ready()
        params = there.prefill(prompts()[0], remote_host="127.0.0.1", remote_port=port)
        assert taker.ask(id="d", prompt=prompts()[0], params=params, count=4)["tokens"]
        assert there.counter("direct_bytes", "push") > 0
        taker.close()
        latest = time.monotonic() + 20
        while torch.cuda.mem_get_info(0)[0] < before - (1 << 30):
            assert time.monotonic() < latest, "memory of an engine that ended is still taken"
            time.sleep(0.1)
    finally:
        for one in (there, taker):
            one.close()


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
