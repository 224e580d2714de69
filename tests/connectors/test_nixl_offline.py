"""`LLM` and `AsyncLLM` say what a request tells the KV connector where vLLM's users say it."""

from __future__ import annotations

import asyncio
import time

import pytest

from frame import LLM, AsyncLLM, SamplingParams
from frame.core.config.flat import from_flat
from frame.offline.transfer_args import take_transfer
from frame.testing.engines import SMALL
from frame.testing.tiny import write_tiny

pytest.importorskip("nixl")

PROMPT = {"prompt_token_ids": [3 + 7 * i % 90 for i in range(60)]}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}


def params(transfer, count=6, **extra):
    return SamplingParams(
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer, **extra},
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, "LlamaForCausalLM")
    (folder / "secret").write_text("a secret of the tests")
    nixl = {"secret_file": str(folder / "secret"), "lease_seconds": 60}
    return {**SMALL, "model": str(folder), "kv_connector": "nixl", "num_threads": 1, "plugin": {"nixl": nixl}}


def test_prompts_travel_from_one_llm_to_another(settings):
    with LLM(**settings) as there, LLM(**settings) as here:
        asks = params(ASKS, 1)
        first, second = there.generate([PROMPT, {"prompt_token_ids": [5] * 40}], asks, use_tqdm=False)
        assert asks.extra_args == {"kv_transfer_params": ASKS}
        assert first.kv_transfer_params["remote_request_id"] != second.kv_transfer_params["remote_request_id"]
        (answer,) = here.generate(PROMPT, params(first.kv_transfer_params), use_tqdm=False)
        assert answer.num_cached_tokens == 59
        (plain,) = there.generate(PROMPT, params(None), use_tqdm=False)
        assert answer.outputs[0].token_ids == plain.outputs[0].token_ids
        # nobody steps an engine between calls: a later one gives back what was read, once the notice of it has come
        held, until = there.llm_engine.core.scheduler.lifecycle.held, time.monotonic() + 60
        while "0" in held and time.monotonic() < until:
            there.generate(PROMPT, params(None), use_tqdm=False)
        assert list(held) == ["1"]


def test_prompts_travel_to_an_async_llm(settings):
    async def ask(transfer):
        llm = AsyncLLM.from_config(from_flat(settings))
        try:
            async for output in llm.generate(PROMPT, params(transfer), "a"):
                last = output
            return last
        finally:
            llm.shutdown()

    with LLM(**settings) as there:
        (first,) = there.generate(PROMPT, params(ASKS, 1), use_tqdm=False)
        assert asyncio.run(ask(first.kv_transfer_params)).num_cached_tokens == 59


@pytest.mark.parametrize(
    ("transfer", "what"),
    [
        ([1], "must be a dictionary with texts as names, got list"),
        ({1: 2}, "must be a dictionary with texts as names, got dict"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "cannot both be true"),
    ],
    ids=str,
)
def test_what_is_no_transfer_is_refused(transfer, what):
    with pytest.raises(ValueError, match=what):
        take_transfer(params(transfer))


def test_other_extra_arguments_stay():
    asked = params(ASKS, target=3)
    taken, transfer = take_transfer(asked)
    assert (taken.extra_args, transfer) == ({"target": 3}, ASKS)
    assert take_transfer(params(None))[0].extra_args is None
    assert take_transfer(SamplingParams(), ASKS)[1] is ASKS
    with pytest.raises(ValueError, match="leave one out"):
        take_transfer(asked, ASKS)
