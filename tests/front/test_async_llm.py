from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from itertools import pairwise

import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.front.prompts import InvalidRequest
from frame.core.plugin_host.registry import Registry
from frame.interfaces import (
    ChatOptions,
    EngineDeadError,
    EngineOutput,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from frame.offline.async_llm import AsyncLLM

from .engines import FakeEngine
from .test_front import checkpoint

DELTA = RequestOutputKind.DELTA


class FakeClient:
    """A fake engine behind asyncio; `pause` seconds between steps, and none while it is not `stepping`."""

    def __init__(self, script, width=2, pause=0.0):
        self.engine = FakeEngine(script, width)
        self.info = self.engine.info
        self.error = None
        self.pause = pause
        self.stepping = asyncio.Event()
        self.stepping.set()
        self._queue = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        while True:
            await self.stepping.wait()
            outputs = self.engine.step()
            if outputs:
                self._queue.put_nowait(outputs)
            await asyncio.sleep(self.pause)

    async def add(self, request):
        if self.error:
            raise EngineDeadError(self.error)
        self.engine.add(request)

    async def abort(self, request_ids):
        self.engine.abort(request_ids)

    async def outputs(self):
        while (batch := await self._queue.get()) is not None:
            yield batch

    async def stats(self):
        return self.engine.stats()

    async def call(self, method, arguments=None):
        return self.engine.call(method, arguments)

    async def die(self, error):
        self.error = error
        lost = [EngineOutput(request_id=name, finish_reason="error", error=error) for name in self.engine.requests]
        self.engine.requests.clear()
        self._queue.put_nowait(lost)

    async def close(self):
        self._task.cancel()
        self._queue.put_nowait(None)


@pytest.fixture
async def make(source, monkeypatch):
    clients = []
    registry = Registry([], [])

    def build(script, **options):
        client = FakeClient(script, **options)
        clients.append(client)
        llm = AsyncLLM(
            config=from_flat({}), client=client, checkpoint=checkpoint(), registry=registry, tokenizer=source
        )
        return llm, client

    yield build
    for client in clients:
        await client.close()


async def collect(stream):
    return [output async for output in stream]


async def running(client):
    """Returns once the engine has requests."""
    async with asyncio.timeout(60):
        while not client.engine.requests:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("given", "keywords", "found"), [((), {}, "nothing"), (("m",), {}, "'m'"), ((), {"modle": "m"}, "'modle'")]
)
def test_the_constructor_says_how_an_engine_is_started(given, keywords, found):
    with pytest.raises(ConfigError, match=rf"not {found}; AsyncLLM.from_engine_args\(AsyncEngineArgs\(model="):
        AsyncLLM(*given, **keywords)


async def test_an_unknown_keyword_is_refused(make):
    llm, _ = make(lambda request: [1])
    with pytest.raises(InvalidRequest, match=r"generate has no keyword 'prioritty' \(did you mean priority\?\)"):
        await collect(llm.generate("a", None, "r", prioritty=1))


async def test_pooling_of_a_text_is_refused_where_the_model_generates(make):
    llm, _ = make(lambda request: [1])
    with pytest.raises(InvalidRequest, match="the model generates text, so it cannot do 'encode'"):
        await collect(llm.encode("a", None, "r"))
    with pytest.raises(InvalidRequest, match="the model generates text, so it cannot do 'score'"):
        await llm.pair("a", "b", PoolingParams(task="score"))


async def test_deltas_join_to_the_text(make, tokenizer):
    ids = tokenizer.encode("hello 日本語 😀 the quick brown fox")
    llm, _ = make(lambda request: ids)
    outputs = await collect(llm.generate("fox", SamplingParams(max_tokens=60, output_kind=DELTA), "r"))
    assert "".join(output.outputs[0].text for output in outputs) == tokenizer.decode(ids)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    (final,) = await collect(
        llm.generate("fox", SamplingParams(max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY), "s")
    )
    assert final.outputs[0].text == tokenizer.decode(ids)


async def test_texts_are_tokenised_one_in_a_turn_of_the_loop_and_long_ones_on_a_thread(make, monkeypatch):
    llm, _ = make(lambda request: [5])
    turns, done = 0, []
    tokenize = llm.front.tokenize

    def note(prompt, params):
        done.append((turns, threading.current_thread() is threading.main_thread()))
        return tokenize(prompt, params)

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(llm.front, "tokenize", note)
    counting = asyncio.create_task(count())
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
    texts = ["fox", "dog", "hen", "fox " * 3000]
    await asyncio.gather(*(collect(llm.generate(text, params, str(name))) for name, text in enumerate(texts)))
    counting.cancel()
    short = [turn for turn, here in done if here]
    assert len(short) == 3
    assert len(done) == 4
    assert all(later > earlier for earlier, later in pairwise(short))


async def test_texts_that_are_too_long_even_when_truncated_are_refused_before_they_are_tokenised(make, tokenizer):
    llm, _ = make(lambda request: [5])
    assert await llm.tokenize("fox") == tokenizer.encode("fox")
    huge = "x" * 10_000_000
    with pytest.raises(InvalidRequest, match="the prompt has 10000000 characters"):
        await llm.tokenize(huge)
    chat = ChatOptions(chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="the prompt has 10000000 characters"):
        await llm.render_chat([{"role": "user", "content": huge}], chat)


async def test_a_slow_consumer_gets_several_steps_in_one_output(make, tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    llm, client = make(lambda request: ids, width=1)
    outputs = []
    async for output in llm.generate("fox", SamplingParams(max_tokens=60, output_kind=DELTA), "r"):
        outputs.append(output)
        while client.engine.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
    assert len(outputs) < len(ids)
    assert "".join(output.outputs[0].text for output in outputs) == tokenizer.decode(ids)
    assert [token for output in outputs for token in output.outputs[0].token_ids] == ids


async def test_two_hundred_streams_do_not_mix(make, tokenizer):
    llm, _ = make(lambda request: request.prompt_ids[::-1].tolist())
    prompts = [[5 + number % 50, 6, 7, 8 + number % 9] for number in range(200)]
    streams = [collect(llm.generate(p, SamplingParams(output_kind=DELTA), str(i))) for i, p in enumerate(prompts)]
    for prompt, outputs in zip(prompts, await asyncio.gather(*streams), strict=True):
        assert [token for output in outputs for token in output.outputs[0].token_ids] == prompt[::-1]
    assert llm.front.num_unfinished == 0


async def test_closing_a_stream_aborts_it(make):
    llm, client = make(lambda request: [5] * 40, width=1, pause=0.005)
    stream = llm.generate([1], SamplingParams(max_tokens=40), "r")
    await anext(stream)
    await stream.aclose()
    assert client.engine.aborted == ["r"]
    task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=40, n=2), "s")))
    await running(client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.engine.aborted == ["r", "0_s", "1_s"]
    assert (llm.front.num_unfinished, client.engine.requests) == (0, {})


async def test_abort_ends_the_stream(make):
    llm, client = make(lambda request: [5] * 40, width=1, pause=0.005)
    task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=40, output_kind=DELTA), "r")))
    await running(client)
    await llm.abort("r")
    await llm.abort(["unknown"])
    outputs = await task
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert client.engine.aborted == ["r"]


async def test_bad_input_touches_no_other_request(make):
    llm, client = make(lambda request: [5] * 30, width=1)
    good = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=30), "good")))
    await running(client)
    client.stepping.clear()
    for prompt, params, message in [
        ("", SamplingParams(), "empty"),
        ([9999], SamplingParams(), "ids go from 0"),
        ("x" * 100_000, SamplingParams(), "100000 characters"),
        ([1], SamplingParams(logits_processors=[lambda ids, row: row]), "stay in one process"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            await collect(llm.generate(prompt, params, "bad"))
    with pytest.raises(InvalidRequest, match="'good' is in use"):
        await collect(llm.generate([1], SamplingParams(), "good"))
    client.stepping.set()
    assert len((await good)[-1].outputs[0].token_ids) == 30


async def test_streams_of_an_engine_that_died_end_with_its_error(make):
    llm, client = make(lambda request: [5] * 40, width=1, pause=0.005)
    task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=40, output_kind=DELTA), "r")))
    await running(client)
    await llm.check_health()
    assert llm.is_running
    await client.die("the engine process was killed")
    completion = (await task)[-1].outputs[0]
    assert (completion.finish_reason, completion.error) == ("error", "the engine process was killed")
    assert llm.errored
    with pytest.raises(EngineDeadError, match="was killed"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="was killed"):
        await collect(llm.generate([1], SamplingParams(), "s"))
    client.error = None  # the engine was started again
    assert (await collect(llm.generate([1], SamplingParams(max_tokens=3), "t")))[-1].finished


async def test_shutdown_ends_streams(make):
    llm, client = make(lambda request: [5] * 40, width=1, pause=0.005)
    task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=40), "r")))
    await running(client)
    llm.shutdown()
    llm.shutdown()
    assert (await task)[-1].outputs[0].finish_reason == "abort"
    assert not llm.is_running
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(llm.generate([1], SamplingParams(), "s"))


async def test_a_closed_client_ends_streams_with_an_error(make):
    llm, client = make(lambda request: [5] * 40, width=1, pause=0.005)
    task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=40), "r")))
    await running(client)
    await client.close()
    with pytest.raises(EngineDeadError, match="client was closed"):
        await task


async def test_control_methods_call_the_engine(make, tokenizer):
    llm, client = make(lambda request: [5])
    assert await llm.get_tokenizer() is tokenizer.native
    assert await llm.reset_prefix_cache(reset_running_requests=True) is True
    assert client.engine.calls[0][0] == "reset_prefix_cache"
    assert await llm.is_tracing_enabled() is False
    assert (await llm.stats()).running == 0
    assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ValueError, match="by name and keyword arguments only"):
        await llm.collective_rpc(print)


async def test_requests_have_an_owner(make):
    owners = []
    llm, _ = make(lambda request: owners.append(request.owner) or [5])
    for options in ({}, {"owner": "digest"}):
        stream = llm.generate([1], SamplingParams(max_tokens=1), f"r{len(owners)}", **options)
        assert [output.finished async for output in stream] == [True]
    assert owners == ["", "digest"]


async def test_sleep_has_two_levels(make):
    llm, client = make(lambda request: [5])
    for level in (1, 2):
        await llm.sleep(level)
    assert client.engine.calls == [("sleep", {"keep": ["weights"]}), ("sleep", {"keep": []})]
    for level in (0, 7):
        with pytest.raises(ValueError, match=f"sleep level must be 1 or 2, got {level}"):
            await llm.sleep(level)


async def test_pauses_have_the_names_and_defaults_of_vllm(make):
    llm, client = make(lambda request: [5])
    running = [3, 1, 0]
    client.engine.call = lambda method, arguments: (
        calls.append((method, arguments)) or (running.pop(0) if method == "pause" else method == "is_paused")
    )
    calls = []
    await llm.pause_generation(mode="wait", clear_cache=False)
    assert calls == [("pause", {"mode": "wait", "clear_cache": False})] * 3
    running, calls = [2, 2], []
    await llm.pause_generation()
    await llm.pause_generation(mode="keep")
    assert calls == [("pause", {"mode": mode, "clear_cache": True}) for mode in ("abort", "keep")]
    assert (await llm.is_paused(), await llm.is_sleeping()) == (True, False)
    await llm.resume_generation()
    assert calls[-1][0] == "resume"


async def test_the_model_config_and_the_tasks_are_those_of_the_engine(make):
    llm, _ = make(lambda request: [5])
    assert (llm.model_config.max_model_len, llm.model_config.dtype) == (64, "float32")
    assert await llm.get_supported_tasks() == ("generate",)
    stream = llm.generate([1], SamplingParams(max_tokens=1), "traced", trace_headers={"traceparent": "00-1-2-01"})
    assert [output.finished async for output in stream] == [True]
    llm.config = from_flat({"model": "x", "metrics_sinks": ["otel"]})
    assert await llm.is_tracing_enabled() is True


async def test_a_call_of_workers_ends_in_time(make):
    llm, client = make(lambda request: [5])

    async def never(method, arguments=None):
        await asyncio.Event().wait()

    client.call = never
    with pytest.raises(TimeoutError):
        await llm.collective_rpc("describe", timeout=0.05)


async def test_an_llm_that_nobody_uses_any_more_is_deleted(make):
    """So that the engine that it started ends, also where nobody calls `shutdown`."""
    llm, _ = make(lambda request: [1])
    await collect(llm.generate([1], SamplingParams(max_tokens=1), "a"))
    found = weakref.ref(llm)
    del llm
    await asyncio.sleep(0)
    gc.collect()
    assert found() is None
